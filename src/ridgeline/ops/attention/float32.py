"""Attention in IEEE fp32 over short windows (T ≤ 256, head width 32) in CUDA C++: launches into given buffers.

A head lies whole in one thread block's shared memory, as in short.py. Tensor cores have no fp32: where they make fp64
as fast as the ordinary lanes make fp32 (Hopper), they make the products in fp64, else the lanes do. On an H200 both
are ahead of PyTorch's kernels, whose tiles are made for longer windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.reduce import Job, reduce_raw

LONGEST, WIDTH = 256, 32
_SOURCES = Path(__file__).parent / "cuda"
_TILE, _SQUARE = 4 * LONGEST * (WIDTH + 4), 4 * 16 * 72  # bytes, as in the kernels


class Kernels(NamedTuple):
    """Forward and backward kernels, with their threads and bytes of shared memory a block.

    Attributes:
        patient: launched early (ops/early.py).
    """

    source: Path
    forward_threads: int
    forward_smem: int
    backward_threads: int
    backward_smem: int
    patient: bool


LANES = Kernels(
    _SOURCES / "float32.cu", 512, 3 * _TILE + 16 * _SQUARE,
    256, 4 * _TILE + 8 * _SQUARE + 4 * 64 * (WIDTH + 4) + 8 * LONGEST, False,
)  # fmt: skip
DOUBLES = Kernels(_SOURCES / "doubles.cu", 128, 3 * _TILE, 256, 4 * _TILE + 8 * LONGEST, True)


def choose(device: torch.device) -> Kernels:
    """The faster kernels on this card."""
    return DOUBLES if torch.cuda.get_device_capability(device) == (9, 0) else LANES


def unsupported(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None) -> str | None:
    """Why these inputs are not for these kernels, or None."""
    _, T, _, D = q_BTHD.shape
    if q_BTHD.device.type != "cuda":
        return f"needs CUDA tensors, got device {q_BTHD.device}"
    if torch.cuda.get_device_capability(q_BTHD.device)[0] not in (9, 10):  # cards with 227 KB a thread block
        return f"needs {LANES.backward_smem} bytes of shared memory a thread block: compute capability 9.0 or 10.0"
    if q_BTHD.dtype != torch.float32:
        return f"takes float32, got {q_BTHD.dtype}"
    if not 2 <= T <= LONGEST or D != WIDTH:
        return f"takes T from 2 to {LONGEST} and head width {WIDTH}, got T = {T} and head width {D}"
    if table_RD is not None:
        return "has no relative term"
    for name, x in (("q", q_BTHD), ("k", k_BTGD), ("v", v_BTGD)):
        if (reason := misplaced(name, x)) is not None:
            return reason
    if k_BTGD.stride() != v_BTGD.stride():
        return f"needs k and v of one row pitch, got strides {k_BTGD.stride()} and {v_BTGD.stride()}"
    return None


def misplaced(name: str, x_BTHD: Tensor) -> str | None:
    """Why a tensor is not rows of neighbouring heads whose samples follow each other, aligned to 16 bytes, or None."""
    _, T, _, D = x_BTHD.shape
    pitch = x_BTHD.stride(1)
    if x_BTHD.stride() == (T * pitch, pitch, D, 1) and pitch % 4 == 0 and x_BTHD.data_ptr() % 16 == 0:
        return None
    return f"needs {name} as rows of neighbouring heads, strides (T·pitch, pitch, {D}, 1), got {x_BTHD.stride()}"


def forward(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, out_BTHD: Tensor, lse_BHT: Tensor, *, scale: float) -> None:
    """Attention's output and the log-sum-exp (natural) of each row's scaled scores; all fp32.

    Args:
        q_BTHD, k_BTGD, v_BTGD: as `unsupported` says.
        out_BTHD: laid out as `misplaced` says.
        lse_BHT: contiguous.
        scale: of the scores.
    """
    B, T, H, _ = q_BTHD.shape
    share, use = H // k_BTGD.shape[2], choose(q_BTHD.device)
    cuda.load(use.source).kernel("attention_forward_float", "PPPPPiiiiiif", patient=use.patient).launch(
        (B * H,), use.forward_threads, use.forward_smem,
        (q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT, T, H, share, q_BTHD.stride(1), k_BTGD.stride(1),
         out_BTHD.stride(1), scale),
    )  # fmt: skip


def backward(
    d_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    dv_BTGD: Tensor,
    *,
    scale: float,
) -> None:
    """All gradients of `forward`, in a fixed order of summation.

    Args:
        d_out_BTHD: gradient of the output, laid out as out_BTHD.
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT: as in `forward`.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients, laid out as `misplaced` says, dk and dv with one pitch.
        scale: as in `forward`.
    """
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    share, N, use = H // G, B * T, choose(q_BTHD.device)
    dk, dv, part = dk_BTGD, dv_BTGD, 0
    if share > 1:
        parts_SBTGD = torch.empty(share, 2, B, T, G, D, device=q_BTHD.device)
        dk, dv, part = parts_SBTGD[0, 0], parts_SBTGD[0, 1], parts_SBTGD.stride(0)
    cuda.load(use.source).kernel("attention_backward_float", "PPPPPPPPPqiiiiiiiif", patient=use.patient).launch(
        (B * H,), use.backward_threads, use.backward_smem,
        (q_BTHD, k_BTGD, v_BTGD, out_BTHD, d_out_BTHD, lse_BHT, dq_BTHD, dk, dv, part, T, H, share, q_BTHD.stride(1),
         k_BTGD.stride(1), out_BTHD.stride(1), dq_BTHD.stride(1), dk.stride(1), scale),
    )  # fmt: skip
    if share > 1:
        pitch = dk_BTGD.stride(1)
        rows = [x.as_strided((N, G * D), (pitch, 1)) for x in (dk_BTGD, dv_BTGD)]
        reduce_raw([Job(parts_SBTGD[:, n].view(share, N, G * D), row) for n, row in enumerate(rows)])
