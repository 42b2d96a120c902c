"""What the launches of attention's CUDA C++ kernels for Hopper share: maps, layouts, workspace, group sums."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import _cuda as cuda

SOURCES = Path(__file__).parent / "cuda"
WIDTHS = (32, 64)


def unsupported(tensors: dict[str, Tensor | None]) -> str | None:
    """Why these inputs, of which "q" (B T H D) is one, are not for kernels with tiles in 16 bits on Hopper, or None."""
    q_BTHD = tensors["q"]
    assert q_BTHD is not None
    if q_BTHD.device.type != "cuda":
        return f"needs CUDA tensors, got device {q_BTHD.device}"
    if torch.cuda.get_device_capability(q_BTHD.device) != (9, 0):
        return f"needs a Hopper card (compute capability 9.0), got {torch.cuda.get_device_capability(q_BTHD.device)}"
    if q_BTHD.shape[3] not in WIDTHS:
        return f"takes head widths {WIDTHS}, got {q_BTHD.shape[3]}"
    if q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 and fp16, got {q_BTHD.dtype}"
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype != q_BTHD.dtype:
            return f"needs one dtype, got {name} {x.dtype} beside q {q_BTHD.dtype}"
        if x.stride(-1) != 1 or any(stride % 8 for stride in x.stride()[:-1]) or x.data_ptr() % 16:
            return f"needs {name} with last stride 1 and the others multiples of 8, got strides {x.stride()}"
    return None


def tiles(x_BTHD: Tensor, rows: int = 64) -> bytes:
    """The tensor map of tiles of `rows` positions of one head."""
    D = x_BTHD.shape[-1]
    return cuda.tensor_map(x_BTHD, box=(1, rows, 1, D), swizzle=2 * D)


def pitch(name: str, x_BTHD: Tensor) -> int:
    """Elements between rows of a tensor whose heads are neighbours and whose samples follow each other.

    Raises:
        UnsupportedError: the tensor is not laid out so.
    """
    _, T, _, D = x_BTHD.shape
    found = x_BTHD.stride(1)
    if x_BTHD.stride()[2:] != (D, 1) or x_BTHD.stride(0) != T * found or found % 4 or x_BTHD.data_ptr() % 8:
        raise UnsupportedError(
            f"{name} must be rows of neighbouring heads: strides (T·pitch, pitch, {D}, 1), got {x_BTHD.stride()}"
        )
    return found


def common_pitch(dk_BTGD: Tensor, dv_BTGD: Tensor) -> int:
    """The row pitch of both, as `pitch` says.

    Raises:
        UnsupportedError: they differ.
    """
    found = pitch("dk", dk_BTGD)
    if pitch("dv", dv_BTGD) != found:
        raise UnsupportedError(f"dk and dv must have one row pitch, got {found} and {pitch('dv', dv_BTGD)}")
    return found


def split_workspace(workspace: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Parts of an fp32 workspace as views.

    Raises:
        UnsupportedError: it is too small or of another dtype.
    """
    total = sum(sizes)
    if workspace.numel() < total or workspace.dtype != torch.float32:
        raise UnsupportedError(
            f"workspace must have {total} fp32 elements, got {workspace.numel()} of {workspace.dtype}"
        )
    return workspace[:total].split(sizes)


def reduction(x_BTHD: Tensor) -> cuda.Module:
    """The second stages of the backward kernels, for tensors such as this."""
    defines = {"HEAD_WIDTH": x_BTHD.shape[-1], "RL_FP16": int(x_BTHD.dtype == torch.float16)}
    return cuda.load(SOURCES / "reduce.cu", defines)


def inverse(divisor: int) -> int:
    """What the kernels' `quotient` multiplies with to divide by `divisor`: 2³¹ / divisor, rounded up."""
    return -(-(1 << 31) // divisor)


def sum_groups(heads: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor], share: int, row_pitch: int) -> None:
    """Each key head's gradients (K's and V's, both B T G D) from `share` partial sums (B, G · share, T, D) in fp32."""
    B, T, G, D = sums[0].shape
    total = B * T * G * D // 4
    reduction(sums[0]).kernel("group_gradients", "PPPPiiiii", patient=True).launch(
        (-(-total // 256), 2), 256, 0, (*heads, *sums, total, T, G, share, row_pitch)
    )
