"""Attention over windows of any length in Triton: launches that write into given buffers. Imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ridgeline.ops._triton.support import Launch, processors
from ridgeline.ops.attention import triton as kernels
from ridgeline.ops.attention.short import Dropping

TABLE_SHARES = 32  # programs that share the heads of one window of the table gradient
PART_ROWS = 64  # positions of a program that sums parts of dK and dV


@dataclass(frozen=True)
class Launches:
    """How the kernels are launched; `rows` are queries and `columns` keys of a tile.

    Attributes:
        forward: a program for each block of queries.
        queries: dQ, a program for each block of queries.
        keys: dK and dV, a program for each block of keys.
        table: the table gradient, square.
    """

    forward: Launch
    queries: Launch
    keys: Launch
    table: Launch


def _square(rows: int, warps: int, stages: int = 2) -> Launch:
    return Launch(rows=rows, columns=rows, warps=warps, stages=stages)


def default_launches(D: int, relative: bool, dtype: torch.dtype) -> Launches:
    """Tiles that keep a program in registers: small ones for the skew's gather, which needs two more of them, and for
    fp32, whose products run in ordinary registers."""
    if dtype == torch.float32:
        one = _square(16, 4, 1) if relative or D > 64 else _square(32, 4 if D <= 32 else 8, 1)
        return Launches(one, one, one, one)
    table = _square(32, 4, 1)
    if relative:
        return Launches(_square(32, 4), _square(32, 4), _square(32, 4), table)
    if D > 64:
        return Launches(_square(64, 8), _square(64, 8), _square(32, 4), table)
    # on an H200 at D 32 and 64, T 512 to 2048: four warps and three stages before 8 warps, 32 or 128 rows; dK and dV,
    # which have more in shared memory, two stages
    return Launches(_square(64, 4, 3), _square(64, 4, 3), _square(64, 4), table)


def key_parts(q_BTHD: Tensor, k_BTGD: Tensor, launch: Launch) -> int:
    """Into how many parts the query heads of a key head are split for dK and dV: as few as fill the card twice."""
    B, T, H, _ = q_BTHD.shape
    share, programs = H // k_BTGD.shape[2], B * k_BTGD.shape[2] * triton.cdiv(T, launch.columns)
    for parts in range(1, share):
        if share % parts == 0 and parts * programs >= 2 * processors(q_BTHD.device):
            return parts
    return share


def _strides(*tensors_BTHD: Tensor) -> list[int]:
    return [stride for x in tensors_BTHD for stride in x.stride()[:3]]


def _tile(launch: Launch) -> dict[str, int]:
    return {
        "QUERIES": launch.rows, "KEYS": launch.columns, "num_warps": launch.warps, "num_stages": launch.stages,
    }  # fmt: skip


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
    sweeps: int = 1,
    launches: Launches | None = None,
) -> None:
    """Attention's output and the natural log-sum-exp of each row's scaled scores.

    Args:
        q_BTHD, k_BTGD, v_BTGD: any strides with 1 as the last one.
        table_RD: contiguous, or None.
        out_BTHD: as q.
        lse_BHT: fp32, contiguous.
        scale: of the scores.
        drop: from `short.dropping`.
        sweeps: 1, or 2 to find each row's maximum and sum before the values are read.
        launches: `default_launches` where none are given.
    """
    B, T, H, D = q_BTHD.shape
    launch = (launches or default_launches(D, table_RD is not None, q_BTHD.dtype)).forward
    kernels.forward_kernel[(triton.cdiv(T, launch.rows), B * H)](
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT, drop.seed_step, drop.site, drop.first_sample, scale,
        drop.kept, T, 0 if table_RD is None else table_RD.shape[0], H, *_strides(q_BTHD, k_BTGD, v_BTGD, out_BTHD),
        SHARE=H // k_BTGD.shape[2], D=D, THRESHOLD=drop.threshold, SWEEPS=sweeps, **_tile(launch),
    )  # fmt: skip


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
    *,
    scale: float,
    drop: Dropping,
    launches: Launches | None = None,
) -> None:
    """All gradients of `forward`, in a fixed order of summation.

    Args:
        d_out_BTHD: gradient of the output.
        q_BTHD, k_BTGD, v_BTGD, table_RD, out_BTHD, lse_BHT: as in `forward`.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients, any strides with 1 as the last one.
        d_table_RD: fp32; rows before the last T become zero.
        scale, drop, launches: as in `forward`.
    """
    B, T, H, D = q_BTHD.shape
    G, R = k_BTGD.shape[2], 0 if table_RD is None else table_RD.shape[0]
    launches = launches or default_launches(D, table_RD is not None, q_BTHD.dtype)
    delta_BHT = torch.empty_like(lse_BHT)
    inputs = (q_BTHD, k_BTGD, v_BTGD)
    randomness = (drop.seed_step, drop.site, drop.first_sample, scale, drop.kept)
    options = {"SHARE": H // G, "D": D, "THRESHOLD": drop.threshold}
    kernels.query_gradient_kernel[(triton.cdiv(T, launches.queries.rows), B * H)](
        *inputs, table_RD, out_BTHD, d_out_BTHD, lse_BHT, delta_BHT, dq_BTHD, *randomness, T, R, H,
        *_strides(*inputs, out_BTHD, d_out_BTHD, dq_BTHD), **options, **_tile(launches.queries),
    )  # fmt: skip
    parts = key_parts(q_BTHD, k_BTGD, launches.keys)
    parts_SBTGD = None if parts == 1 else torch.empty(parts, 2, *k_BTGD.shape, device=q_BTHD.device)
    dk, dv = (dk_BTGD, dv_BTGD) if parts_SBTGD is None else (parts_SBTGD[0, 0], parts_SBTGD[0, 1])
    part = 2 * k_BTGD.numel()
    kernels.key_gradient_kernel[(triton.cdiv(T, launches.keys.columns), B * G, parts)](
        *inputs, table_RD, d_out_BTHD, lse_BHT, delta_BHT, dk, dv, *randomness, T, R, H,
        *_strides(*inputs, d_out_BTHD), part, *_strides(dk, dv), **options, PARTS=parts, **_tile(launches.keys),
    )  # fmt: skip
    if parts_SBTGD is not None:
        kernels.key_parts_kernel[(triton.cdiv(T, PART_ROWS), B * G, 2)](
            parts_SBTGD, dk_BTGD, dv_BTGD, part, T, G, *_strides(dk_BTGD, dv_BTGD), PARTS=parts, D=D, ROWS=PART_ROWS,
        )  # fmt: skip
    if d_table_RD is not None:
        shares, tile = min(TABLE_SHARES, B * H), launches.table.rows
        blocks = triton.cdiv(T, tile)
        sums = torch.empty(shares, blocks * tile, D, device=q_BTHD.device)
        kernels.table_gradient_kernel[(blocks, shares)](
            *inputs, table_RD, d_out_BTHD, lse_BHT, delta_BHT, sums, *randomness, T, R, H, B * H,
            *_strides(*inputs, d_out_BTHD), **options, TILE=tile, num_warps=launches.table.warps,
            num_stages=launches.table.stages,
        )  # fmt: skip
        d_table_RD.zero_()
        d_table_RD[-T:] = sums.sum(0)[:T].flip(0)
