"""Attention over short windows (T ≤ 256) in CUDA C++ for Hopper: launches that write into given buffers.

A head's queries, keys and values lie whole in one thread block's shared memory, so there is no second pass over keys,
no atomic addition and nothing of size (T, T) outside the chip. The kernels read Q, K and V as strided views of one
joint buffer and write the gradients into one, with no transposition anywhere; see cuda/forward.cu and backward.cu.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.dropout import DropoutState, quantise

LONGEST = 256
WIDTHS = (32, 64)
_SOURCES = Path(__file__).parent / "cuda"
_FORWARD_GROUPS = 3  # warpgroups of a thread block, each with a head of its own
_SHARING_GROUPS = 4  # where heads are so few that two warpgroups share each
_FORWARD_KINDS = "MMMMPPPPqiiiiiiiiffIII"
_BACKWARD_KINDS = "MMMMMMPPPPPPPPPPiiiiiiiffIII"


@dataclass(frozen=True)
class Dropping:
    """Dropout as the kernels take it: threshold of 2¹⁵, scale of what is kept, stream and site numbers."""

    seed_step: Tensor | None
    threshold: int
    kept: float
    site: int
    first_sample: int


def dropping(p: float, dropout: DropoutState | None, site: int) -> Dropping:
    """What p, state and site mean for a kernel; without a state or with p = 0 nothing is dropped."""
    if dropout is None or quantise(p)[0] == 0:
        return Dropping(None, 0, 1.0, 0, 0)
    threshold, kept = quantise(p)
    return Dropping(dropout.seed_step, threshold, kept, site, dropout.sample_offset)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def unsupported(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None) -> str | None:
    """Why these inputs are not for these kernels, or None."""
    _, T, _, D = q_BTHD.shape
    if q_BTHD.device.type != "cuda":
        return f"needs CUDA tensors, got device {q_BTHD.device}"
    if torch.cuda.get_device_capability(q_BTHD.device) != (9, 0):
        return f"needs a Hopper card (compute capability 9.0), got {torch.cuda.get_device_capability(q_BTHD.device)}"
    if not 1 <= T <= LONGEST:
        return f"takes T from 1 to {LONGEST}, got {T}"
    if D not in WIDTHS:
        return f"takes head widths {WIDTHS}, got {D}"
    if q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 and fp16, got {q_BTHD.dtype}"
    for name, x in (("q", q_BTHD), ("k", k_BTGD), ("v", v_BTGD), ("table", table_RD)):
        if x is None:
            continue
        if x.dtype != q_BTHD.dtype:
            return f"needs one dtype, got {name} {x.dtype} beside q {q_BTHD.dtype}"
        if x.stride(-1) != 1 or any(stride % 8 for stride in x.stride()[:-1]) or x.data_ptr() % 16:
            return f"needs {name} with last stride 1 and the others multiples of 8, got strides {x.stride()}"
    if table_RD is not None and (table_RD.shape[0] < T or table_RD.shape[1] != D):
        return f"needs a table of at least T = {T} rows of width {D}, got {tuple(table_RD.shape)}"
    return None


def _pitch(name: str, x_BTHD: Tensor) -> int:
    """Elements between rows of a tensor whose heads are neighbours and whose samples follow each other.

    Raises:
        UnsupportedError: the tensor is not laid out so.
    """
    _, T, _, D = x_BTHD.shape
    pitch = x_BTHD.stride(1)
    if x_BTHD.stride()[2:] != (D, 1) or x_BTHD.stride(0) != T * pitch or pitch % 4 or x_BTHD.data_ptr() % 8:
        raise UnsupportedError(
            f"{name} must be rows of neighbouring heads: strides (T·pitch, pitch, {D}, 1), got {x_BTHD.stride()}"
        )
    return pitch


def _defines(q_BTHD: Tensor, table_RD: Tensor | None, drop: Dropping) -> dict[str, int]:
    return {
        "HEAD_WIDTH": q_BTHD.shape[3],
        "ROW_BLOCKS": -(-q_BTHD.shape[1] // 64),
        "RL_RELATIVE": int(table_RD is not None),
        "RL_DROPOUT": int(drop.threshold > 0),
        "RL_FP16": int(q_BTHD.dtype == torch.float16),
    }


def _map(x_BTHD: Tensor, rows: int = 64) -> bytes:
    D = x_BTHD.shape[-1]
    return cuda.tensor_map(x_BTHD, box=(1, rows, 1, D), swizzle=2 * D)


def _table_map(table_RD: Tensor) -> bytes:
    return cuda.tensor_map(table_RD, box=(64, table_RD.shape[1]), swizzle=2 * table_RD.shape[1])


def forward_smem(blocks: int, D: int, relative: bool, groups: int) -> int:
    """Bytes of shared memory of a forward thread block: the sums of cuda/forward.cu."""
    barriers = 2 * blocks + 2 if blocks == 4 and D == 64 else blocks + 1  # of a warpgroup
    return (relative + 2 * groups) * blocks * 128 * D + 8 * (groups * barriers + 1)


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    drop: Dropping,
) -> None:
    """Attention's output and the log-sum-exp (natural, fp32) of each row's scaled scores.

    Args:
        q_BTHD, k_BTGD, v_BTGD: bf16 or fp16, strided as `unsupported` says.
        table_RD: position table of the same dtype, or None.
        out_BTHD: same dtype; heads are neighbours, any row pitch.
        lse_BHT: fp32, contiguous.
        scale: of the scores.
        drop: from `dropping`.
    """
    B, T, H, D = q_BTHD.shape
    defines = _defines(q_BTHD, table_RD, drop)
    blocks, processors = defines["ROW_BLOCKS"], _processors(q_BTHD.device)
    halves = blocks == 4 and D == 32 and table_RD is None and _SHARING_GROUPS * processors >= 2 * B * H
    groups = _SHARING_GROUPS if halves else _FORWARD_GROUPS
    defines |= {"WARPGROUPS": groups, "RL_HALVES": int(halves)}
    kernel = cuda.load(_SOURCES / "forward.cu", defines).kernel("attention_forward", _FORWARD_KINDS, patient=True)
    map_k = _map(k_BTGD)
    map_table, rows = (map_k, 0) if table_RD is None else (_table_map(table_RD), table_RD.shape[0])
    arguments = (
        _map(q_BTHD), map_k, _map(v_BTGD), map_table, q_BTHD, out_BTHD, lse_BHT, drop.seed_step, q_BTHD.stride(0), T,
        rows, H, H // k_BTGD.shape[2], B * H, q_BTHD.stride(1), q_BTHD.stride(2), _pitch("out", out_BTHD), scale,
        drop.kept, drop.site, drop.first_sample * H, drop.threshold,
    )  # fmt: skip
    grid = min(processors, B * H)
    kernel.launch((grid,), 128 * groups, forward_smem(blocks, D, table_RD is not None, groups), arguments)


@dataclass(frozen=True)
class _Workspace:
    """Parts of the backward pass's fp32 workspace, in elements."""

    table: int
    carry: int
    heads: int

    @property
    def total(self) -> int:
        return self.table + self.carry + 2 * self.heads

    def split(self, workspace: Tensor) -> tuple[Tensor, ...]:
        """The parts as views: table, carry, and dK and dV by query head."""
        if workspace.numel() < self.total or workspace.dtype != torch.float32:
            raise UnsupportedError(
                f"workspace must have {self.total} fp32 elements, got {workspace.numel()} of {workspace.dtype}"
            )
        return workspace[: self.total].split((self.table, self.carry, self.heads, self.heads))


def _grouping(q_BTHD: Tensor, k_BTGD: Tensor) -> int:
    """How gradients of shared keys are summed: 0 not shared, 1 by a second kernel, 2 within a thread block.

    Within a block takes all key blocks' sums in registers, and enough groups to keep every multiprocessor busy.
    """
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    if G == H:
        return 0
    return 2 if (D == 32 or T <= 128) and 3 * _processors(q_BTHD.device) <= B * G else 1


def _workspace(q_BTHD: Tensor, k_BTGD: Tensor, table_RD: Tensor | None) -> _Workspace:
    B, T, H, D = q_BTHD.shape
    grid, rows = min(_processors(q_BTHD.device), B * H), -(-T // 64) * 64
    return _Workspace(
        table=grid * rows * D if table_RD is not None else 0,
        carry=grid * 64 * D,
        heads=B * T * H * D if _grouping(q_BTHD, k_BTGD) == 1 else 0,
    )


def workspace_size(q_BTHD: Tensor, k_BTGD: Tensor, table_RD: Tensor | None) -> int:
    """fp32 elements of workspace that `backward` needs for such inputs."""
    return _workspace(q_BTHD, k_BTGD, table_RD).total


def column_sum_rows(q_BTHD: Tensor) -> int:
    """Rows of the partial column sums that `backward` can leave."""
    return 4 * min(_processors(q_BTHD.device), q_BTHD.shape[0] * q_BTHD.shape[2])


def backward_block(blocks: int, D: int, relative: bool, dropout: bool) -> tuple[int, int]:
    """Threads and bytes of shared memory of a backward thread block: the sums of cuda/schedule.cuh."""
    tile, square = 128 * D, 64 * 128
    pairs = 5 if blocks == 4 and D == 64 else 2 * blocks
    stages = 1 if relative and D == 64 and blocks > 2 else 2
    smem = (2 * pairs + 1) * tile + 2 * stages * square + 1024 * (1 + dropout) + 8 * (2 * blocks + 2 * stages + 33)
    if relative:
        smem += blocks * tile + 3 * square + blocks * 256 * D
    return (512 if relative else 384), smem


def _sum_groups(
    reduce: cuda.Module, heads: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor], share: int, pitch: int
) -> None:
    """Each key head's gradients (of K and of V, both B T G D) from those of the `share` query heads that use it."""
    B, T, G, D = sums[0].shape
    total = B * T * G * D // 4
    reduce.kernel("group_gradients", "PPPPiiiii", patient=True).launch(
        (-(-total // 256), 2), 256, 0, (*heads, *sums, total, T, G, share, pitch)
    )


def backward(
    d_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    dv_BTGD: Tensor,
    d_table_RD: Tensor | None,
    workspace: Tensor,
    *,
    scale: float,
    drop: Dropping,
    column_sums: Tensor | None = None,
) -> None:
    """All gradients of `forward`, each written once; no sum depends on the order in which blocks run.

    Args:
        d_out_BTHD: gradient of the output, same dtype, strided as the inputs.
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT: as in `forward`.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients; heads are neighbours, any row pitch (dk's and dv's the same).
        d_table_RD: fp32, contiguous; rows before the last T become zero.
        workspace: fp32, at least `workspace_size` elements, 16-byte aligned.
        scale, drop: as in `forward`.
        column_sums: fp32 (`column_sum_rows`, (H + 2 G) · D), contiguous, or None: partial sums over all rows of dq, dk
            and dv, side by side; their sum over the first axis is the gradient of the joint projection's bias.
    """
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    grouping = _grouping(q_BTHD, k_BTGD)
    table, carry, dk_heads, dv_heads = _workspace(q_BTHD, k_BTGD, table_RD).split(workspace)
    defines = _defines(q_BTHD, table_RD, drop) | {
        "RL_GROUPED": grouping,
        "RL_COLUMN_SUMS": int(column_sums is not None),
    }
    blocks = defines["ROW_BLOCKS"]
    kernel = cuda.load(_SOURCES / "backward.cu", defines).kernel("attention_backward", _BACKWARD_KINDS, patient=True)
    kv_pitch = _pitch("dk", dk_BTGD)
    if _pitch("dv", dv_BTGD) != kv_pitch:
        raise UnsupportedError(f"dk and dv must have one row pitch, got {kv_pitch} and {_pitch('dv', dv_BTGD)}")
    map_q = _map(q_BTHD)
    grid = min(_processors(q_BTHD.device), B * H)
    arguments = (
        map_q, _map(k_BTGD), _map(v_BTGD), _map(out_BTHD, 16), _map(d_out_BTHD),
        _table_map(table_RD) if table_RD is not None else map_q, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD, dk_heads, dv_heads,
        table, carry, column_sums, drop.seed_step, T, table_RD.shape[0] if table_RD is not None else 0, H, H // G,
        B * H, _pitch("dq", dq_BTHD), kv_pitch, scale, drop.kept, drop.site, drop.first_sample * H, drop.threshold,
    )  # fmt: skip
    threads, smem = backward_block(blocks, D, table_RD is not None, drop.threshold > 0)
    kernel.launch((grid,), threads, smem, arguments)
    reduce = cuda.load(_SOURCES / "reduce.cu", {"HEAD_WIDTH": D, "RL_FP16": defines["RL_FP16"]})
    if d_table_RD is not None:
        reduce.kernel("table_gradient", "PPiii", patient=True).launch(
            (d_table_RD.shape[0],), 256, 0, (table, d_table_RD, grid, 64 * blocks, T)
        )
    if grouping == 1:
        _sum_groups(reduce, (dk_heads, dv_heads), (dk_BTGD, dv_BTGD), H // G, kv_pitch)
