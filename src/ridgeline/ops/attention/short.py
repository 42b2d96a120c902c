"""Attention over short windows (T ≤ 256) in CUDA C++ for Hopper: launches that write into given buffers.

A head's queries, keys and values lie whole in one thread block's shared memory, so there is no second pass over keys,
no atomic addition and nothing of size (T, T) outside the chip. The kernels read Q, K and V as strided views of one
joint buffer and write the gradients into one, with no transposition anywhere; see cuda/forward.cu and backward.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.attention import hopper
from ridgeline.ops.dropout import DropoutState, quantise

LONGEST = 256
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


def unsupported(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None) -> str | None:
    """Why these inputs are not for these kernels, or None."""
    _, T, _, D = q_BTHD.shape
    reason = hopper.unsupported({"q": q_BTHD, "k": k_BTGD, "v": v_BTGD, "table": table_RD})
    if reason is None and T > LONGEST:
        reason = f"takes T from 1 to {LONGEST}, got {T}"
    if reason is None and table_RD is not None and (table_RD.shape[0] < T or table_RD.shape[1] != D):
        reason = f"needs a table of at least T = {T} rows of width {D}, got {tuple(table_RD.shape)}"
    return reason


def _defines(q_BTHD: Tensor, table_RD: Tensor | None, drop: Dropping) -> dict[str, int]:
    return {
        "HEAD_WIDTH": q_BTHD.shape[3],
        "ROW_BLOCKS": -(-q_BTHD.shape[1] // 64),
        "RL_RELATIVE": int(table_RD is not None),
        "RL_DROPOUT": int(drop.threshold > 0),
        "RL_FP16": int(q_BTHD.dtype == torch.float16),
    }


def _table_map(table_RD: Tensor) -> bytes:
    return cuda.tensor_map(table_RD, box=(64, table_RD.shape[1]), swizzle=2 * table_RD.shape[1])


def forward_smem(blocks: int, D: int, relative: bool, groups: int) -> int:
    """Bytes of shared memory of a forward thread block: the sums of cuda/forward.cu."""
    barriers = 2 * blocks + 2 if blocks == 4 and D == 64 else blocks + 1  # of a warpgroup
    return (relative + 2 * groups) * blocks * 128 * D + 8 * (groups * barriers + 1)


def forward_blocks(T: int, units: int, programs: int) -> int:
    """Row blocks that a forward thread block of three warpgroups is compiled for.

    The kernel copies a head's first key block while the query block before it is under way. Where there is but one, a
    warpgroup's second head would wait for keys that nobody copies: two then, of which the second lies beyond T.

    Args:
        T: length of the windows.
        units: heads of all samples.
        programs: thread blocks that run at a time.
    """
    least = 2 if units > _FORWARD_GROUPS * programs else 1
    return max(least, -(-T // 64))


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
    available = processors(q_BTHD.device)
    blocks = defines["ROW_BLOCKS"] = forward_blocks(T, B * H, available)
    halves = blocks == 4 and D == 32 and table_RD is None and _SHARING_GROUPS * available >= 2 * B * H
    groups = _SHARING_GROUPS if halves else _FORWARD_GROUPS
    defines |= {"WARPGROUPS": groups, "RL_HALVES": int(halves)}
    kernel = cuda.load(hopper.SOURCES / "forward.cu", defines).kernel("attention_forward", _FORWARD_KINDS, patient=True)
    map_k = hopper.tiles(k_BTGD)
    map_table, rows = (map_k, 0) if table_RD is None else (_table_map(table_RD), table_RD.shape[0])
    arguments = (
        hopper.tiles(q_BTHD), map_k, hopper.tiles(v_BTGD), map_table, q_BTHD, out_BTHD, lse_BHT, drop.seed_step,
        q_BTHD.stride(0), T, rows, H, H // k_BTGD.shape[2], B * H, q_BTHD.stride(1), q_BTHD.stride(2),
        hopper.pitch("out", out_BTHD), scale, drop.kept, drop.site, drop.first_sample * H, drop.threshold,
    )  # fmt: skip
    grid = min(available, B * H)
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
        return hopper.split_workspace(workspace, (self.table, self.carry, self.heads, self.heads))


def _grouping(q_BTHD: Tensor, k_BTGD: Tensor) -> int:
    """How gradients of shared keys are summed: 0 not shared, 1 by a second kernel, 2 within a thread block.

    Within a block takes all key blocks' sums in registers, and enough groups to keep every multiprocessor busy.
    """
    B, T, H, D = q_BTHD.shape
    G = k_BTGD.shape[2]
    if G == H:
        return 0
    return 2 if (D == 32 or T <= 128) and 3 * processors(q_BTHD.device) <= B * G else 1


def _workspace(q_BTHD: Tensor, k_BTGD: Tensor, table_RD: Tensor | None) -> _Workspace:
    B, T, H, D = q_BTHD.shape
    grid, rows = min(processors(q_BTHD.device), B * H), -(-T // 64) * 64
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
    return 4 * min(processors(q_BTHD.device), q_BTHD.shape[0] * q_BTHD.shape[2])


def backward_block(blocks: int, D: int, relative: bool, dropout: bool) -> tuple[int, int]:
    """Threads and bytes of shared memory of a backward thread block: the sums of cuda/schedule.cuh."""
    tile, square = 128 * D, 64 * 128
    pairs = 5 if blocks == 4 and D == 64 else 2 * blocks
    stages = 1 if relative and D == 64 and blocks > 2 else 2
    smem = (2 * pairs + 1) * tile + 2 * stages * square + 1024 * (1 + dropout) + 8 * (2 * blocks + 2 * stages + 33)
    if relative:
        smem += blocks * tile + 3 * square + blocks * 256 * D
    return (512 if relative else 384), smem


def _sum_tables(q_BTHD: Tensor, table: Tensor, d_table_RD: Tensor, grid: int, rows: int) -> None:
    """The table's gradient from what `grid` thread blocks have left of it in the workspace, `rows` rows each."""
    hopper.reduction(q_BTHD).kernel("table_gradient", "PPiii", patient=True).launch(
        (d_table_RD.shape[0],), 256, 0, (table, d_table_RD, grid, rows, q_BTHD.shape[1])
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
            Those of dk are zeros, as they would be without rounding.
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
    kernel = cuda.load(hopper.SOURCES / "backward.cu", defines).kernel(
        "attention_backward", _BACKWARD_KINDS, patient=True
    )
    kv_pitch = hopper.common_pitch(dk_BTGD, dv_BTGD)
    map_q = hopper.tiles(q_BTHD)
    grid = min(processors(q_BTHD.device), B * H)
    arguments = (
        map_q, hopper.tiles(k_BTGD), hopper.tiles(v_BTGD), hopper.tiles(out_BTHD, 16), hopper.tiles(d_out_BTHD),
        _table_map(table_RD) if table_RD is not None else map_q, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD, dk_heads, dv_heads,
        table, carry, column_sums, drop.seed_step, T, table_RD.shape[0] if table_RD is not None else 0, H, H // G,
        B * H, hopper.pitch("dq", dq_BTHD), kv_pitch, scale, drop.kept, drop.site, drop.first_sample * H,
        drop.threshold,
    )  # fmt: skip
    threads, smem = backward_block(blocks, D, table_RD is not None, drop.threshold > 0)
    kernel.launch((grid,), threads, smem, arguments)
    if d_table_RD is not None:
        _sum_tables(q_BTHD, table, d_table_RD, grid, 64 * blocks)
    if grouping == 1:
        hopper.sum_groups((dk_heads, dv_heads), (dk_BTGD, dv_BTGD), H // G, kv_pitch)
