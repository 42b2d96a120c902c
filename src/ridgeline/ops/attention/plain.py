"""Plain attention (no relative term, no dropout) over windows of any length in CUDA C++ for Hopper.

Launches that write into given buffers, as those of short.py; see cuda/plain.cuh for the plan. The backward pass at
head width 32 is spans.py's. At 64 it is two kernels, dQ with the rows' statistics and then dK and dV, and a third
where the query heads of a key head are split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.attention import hopper, spans

_FORWARD_KINDS, _QUERY_KINDS, _KEY_KINDS = "MMMPPiiiiifiIII", "MMMMMPPPPiiiiiif", "MMMMMPPPPPiiiiiiif"


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        groups: warpgroups of a thread block that compute.
        stages: tile pairs in a block's ring.
        per_processor: blocks a multiprocessor.
        step: columns of a square whose scores a warpgroup holds at a time backward, 64 or, in fewer registers, 32.
    """

    groups: int
    stages: int
    per_processor: int
    step: int = 64

    def smem(self, D: int, own: int, stats: bool = False) -> int:
        """Bytes of shared memory of a thread block whose warpgroups own `own` tiles: the sums of cuda/plain.cuh."""
        tile, barriers = 128 * D, 2 * self.stages + 4 * self.groups
        return 2 * (self.stages + self.groups * own) * tile + 512 * stats * self.stages + 8 * barriers

    @property
    def threads(self) -> int:
        """Threads of a block: of its warpgroups, and a warp (a warpgroup beside three or four) that copies."""
        return 128 * self.groups + (128 if self.groups >= 3 else 32)

    def units(self, T: int) -> int:
        """Units of a head."""
        return -(-T // (64 * self.groups))


class Launches(NamedTuple):
    """Launches of the three kernels."""

    forward: Launch
    queries: Launch
    keys: Launch


LAUNCHES = {  # backward at width 32: what spans.py is measured against
    32: Launches(Launch(4, 8, 1), Launch(4, 8, 1, step=32), Launch(4, 8, 1, step=32)),
    64: Launches(Launch(4, 8, 1), Launch(3, 5, 1), Launch(3, 7, 1)),
}


def unsupported(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, table_RD: Tensor | None) -> str | None:
    """Why these inputs are not for these kernels, or None."""
    if table_RD is not None:
        return "has no relative term"
    return hopper.unsupported({"q": q_BTHD, "k": k_BTGD, "v": v_BTGD})


def key_parts(q_BTHD: Tensor, k_BTGD: Tensor, launch: Launch) -> int:
    """Into how many parts the query heads of a key head are split for dK and dV: as few as give two rounds of units."""
    B, T, H, _ = q_BTHD.shape
    share, units = H // k_BTGD.shape[2], B * k_BTGD.shape[2] * launch.units(T)
    wanted = 2 * launch.per_processor * processors(q_BTHD.device)
    return next((parts for parts in range(1, share) if share % parts == 0 and parts * units >= wanted), share)


def column_sum_rows(q_BTHD: Tensor, k_BTGD: Tensor) -> int:
    """Rows of the partial column sums that `backward` can leave."""
    B, T, H, D = q_BTHD.shape
    if spans.WIDTH == D:
        return spans.column_sum_rows(q_BTHD, k_BTGD)
    launches, device = LAUNCHES[D], q_BTHD.device
    parts = B * k_BTGD.shape[2] * key_parts(q_BTHD, k_BTGD, launches.keys)
    units = ((launches.queries, B * H), (launches.keys, parts))
    return max(4 * launch.groups * _grid(launch, heads * launch.units(T), device)[0] for launch, heads in units)


def _kernel(name: str, launch: Launch, q_BTHD: Tensor, kinds: str, sums: bool = False) -> cuda.Kernel:
    defines = {
        "HEAD_WIDTH": q_BTHD.shape[3], "WARPGROUPS": launch.groups, "RING_STAGES": launch.stages,
        "BLOCKS_PER_PROCESSOR": launch.per_processor, "RL_FP16": int(q_BTHD.dtype == torch.float16),
        "RL_COLUMN_SUMS": int(sums), "STEP_COLUMNS": launch.step,
    }  # fmt: skip
    return cuda.load(hopper.SOURCES / f"{name}.cu", defines).kernel(f"attention_{name}", kinds, patient=True)


def _grid(launch: Launch, units: int, device: torch.device) -> tuple[int]:
    return (min(launch.per_processor * processors(device), units),)


def forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    launches: Launches | None = None,
) -> None:
    """Attention's output and the log-sum-exp (natural, fp32) of each row's scaled scores.

    Args:
        q_BTHD, k_BTGD, v_BTGD: bf16 or fp16, strided as `unsupported` says.
        out_BTHD: same dtype; heads are neighbours, any row pitch.
        lse_BHT: fp32, contiguous.
        scale: of the scores.
        launches: LAUNCHES[D] where none are given.
    """
    B, T, H, D = q_BTHD.shape
    launch = (launches or LAUNCHES[D]).forward
    units, share = B * H * launch.units(T), H // k_BTGD.shape[2]
    grid = _grid(launch, units, q_BTHD.device)
    divisor = B * H if units < 8 * grid[0] else launch.units(T)  # of a unit's number: cuda/plain.cuh, Turn
    arguments: tuple[cuda.Argument, ...] = (
        hopper.tiles(q_BTHD), hopper.tiles(k_BTGD), hopper.tiles(v_BTGD), out_BTHD, lse_BHT, T, H, share, units,
        hopper.pitch("out", out_BTHD), scale, divisor, *(hopper.inverse(x) for x in (divisor, H, share)),
    )  # fmt: skip
    kernel = _kernel("plain_forward", launch, q_BTHD, _FORWARD_KINDS)
    kernel.launch(grid, launch.threads, launch.smem(D, 1), arguments)


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
    column_sums: Tensor | None = None,
    launches: Launches | None = None,
) -> None:
    """All gradients of `forward`, each written once, in a fixed order of summation.

    Args:
        d_out_BTHD: gradient of the output, same dtype, strided as the inputs.
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT: as in `forward`.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients; heads are neighbours, any row pitch (dk's and dv's the same).
        scale: of the scores.
        launches: of the two kernels; where none are given, spans.py's at width 32 and LAUNCHES[D] else.
        column_sums: fp32 (`column_sum_rows`, (H + 2 G) · D), contiguous, or None: partial sums over all rows of dq, dk
            and dv, side by side; their sum over the first axis is the gradient of the joint projection's bias.
            Those of dk are zeros, as they would be without rounding (at head width 64 they are summed).
    """
    (B, T, H, D), G, device = q_BTHD.shape, k_BTGD.shape[2], q_BTHD.device
    if launches is None and spans.WIDTH == D:
        return spans.backward(
            d_out_BTHD, q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD, scale=scale,
            column_sums=column_sums,
        )  # fmt: skip
    sums, sum_rows = column_sums is not None, 0 if column_sums is None else len(column_sums)
    stats = torch.empty(B * H, 128 * -(-T // 64), device=device)  # for each row log-sum-exp and rowsum(dO ∘ O)
    inputs = [hopper.tiles(x) for x in (q_BTHD, k_BTGD, v_BTGD)]
    map_d_out, (_, of_queries, of_keys) = hopper.tiles(d_out_BTHD), launches or LAUNCHES[D]

    units = B * H * of_queries.units(T)
    arguments: tuple[cuda.Argument, ...] = (
        *inputs, hopper.tiles(out_BTHD), map_d_out, lse_BHT, dq_BTHD, stats, column_sums, T, H, H // G, units,
        hopper.pitch("dq", dq_BTHD), sum_rows, scale,
    )  # fmt: skip
    kernel = _kernel("plain_queries", of_queries, q_BTHD, _QUERY_KINDS, sums)
    kernel.launch(_grid(of_queries, units, device), of_queries.threads, of_queries.smem(D, 3), arguments)

    parts = key_parts(q_BTHD, k_BTGD, of_keys)
    units, kv_pitch = B * G * parts * of_keys.units(T), hopper.common_pitch(dk_BTGD, dv_BTGD)
    heads = torch.empty(2, B * G * parts * T * D if parts > 1 else 0, device=device)
    arguments = (
        *inputs, map_d_out, cuda.tensor_map(stats.view(torch.bfloat16), box=(1, 256), swizzle=0), dk_BTGD, dv_BTGD,
        heads[0], heads[1], column_sums, T, H, H // (G * parts), parts, units, kv_pitch, sum_rows, scale,
    )  # fmt: skip
    kernel = _kernel("plain_keys", of_keys, q_BTHD, _KEY_KINDS, sums)
    kernel.launch(_grid(of_keys, units, device), of_keys.threads, of_keys.smem(D, 2, stats=True), arguments)
    if parts > 1:
        hopper.sum_groups((heads[0], heads[1]), (dk_BTGD, dv_BTGD), parts, kv_pitch)
