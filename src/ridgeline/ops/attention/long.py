"""Attention over windows of any length in Triton: launches that write into given buffers. Imports Triton.

A relative term is a product of its own, queries with the table's last T rows: (B, T, H, T) numbers, made for as many
windows at a time as a workspace of RELATIVE_BYTES holds, and made again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ridgeline.ops._triton.support import Launch, processors
from ridgeline.ops.attention import triton as kernels
from ridgeline.ops.attention.short import Dropping
from ridgeline.ops.linear.tiled import Tile, product_raw, segments_of
from ridgeline.ops.scope import scope

RELATIVE_BYTES = 2**27  # of relative scores at a time, one window's at least
RELATIVE_TILE = Tile(rows=128, columns=128, depth=64, warps=8, stages=3)  # of the products with the table
PART_ROWS = 64  # positions of a program that sums parts of dK and dV


@dataclass(frozen=True)
class Launches:
    """How the kernels are launched; `rows` are queries and `columns` keys of a tile.

    Attributes:
        forward: a program for each block of queries.
        queries: dQ, a program for each block of queries.
        keys: dK and dV, a program for each block of keys.
    """

    forward: Launch
    queries: Launch
    keys: Launch


def _square(rows: int, warps: int, stages: int = 2) -> Launch:
    return Launch(rows=rows, columns=rows, warps=warps, stages=stages)


def default_launches(D: int, relative: bool, dtype: torch.dtype) -> Launches:
    """Tiles that keep a program in registers: small ones for the relative term, which takes an address an element, and
    for fp32, whose products run in ordinary registers."""
    if dtype == torch.float32:
        one = _square(16, 4, 1) if relative or D > 64 else _square(32, 4 if D <= 32 else 8, 1)
        return Launches(one, one, one)
    if relative:
        small, flat = _square(32, 4), Launch(rows=64, columns=32, warps=4, stages=2)
        if D != 64:
            return Launches(small, small, small) if D > 64 else Launches(flat, small, flat)
        # on an H200, µs at hal-20m's size: forward 64 × 64 and 128 × 32 1.7 to 1.9 times as long; dQ 32 × 32 1,410,
        # 64 × 32 1,852, this 1,127; dK and dV 32 × 32 1,165, eight warps 1,764, this 1,009
        return Launches(flat, Launch(rows=32, columns=64, warps=4, stages=2), flat)
    if D > 64:
        return Launches(_square(64, 8), _square(64, 8), _square(32, 4))
    # on an H200 at D 32 and 64, T 512 to 2048: four warps and three stages before 8 warps, 32 or 128 rows; dK and dV,
    # which have more in shared memory, two stages
    return Launches(_square(64, 4, 3), _square(64, 4, 3), _square(64, 4))


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


def _by_head(x_BTHD: Tensor) -> Tensor:
    """(H, B · T, D): one matrix a head, a view where positions lie evenly."""
    return x_BTHD.movedim(2, 0).flatten(1, 2)


def _windows(q_BTHD: Tensor, table_RD: Tensor | None, drop: Dropping) -> Iterator[tuple[slice, Dropping]]:
    """Windows whose relative scores fit the workspace, and the dropout that begins with them; all without a table."""
    B, T, H, _ = q_BTHD.shape
    most = max(1, B)
    if table_RD is not None:
        most = max(1, RELATIVE_BYTES // (T * H * T * q_BTHD.element_size()))
    for first in range(0, B, most):
        yield slice(first, first + most), replace(drop, first_sample=drop.first_sample + first)


def _relative_scores(q_BTHD: Tensor, table_RD: Tensor) -> Tensor:
    """The products (B, T, H, T) of each query with the table's last T rows."""
    B, T, H, _ = q_BTHD.shape
    r_BTHT = torch.empty(B, T, H, T, device=q_BTHD.device, dtype=q_BTHD.dtype)
    with scope("attention"):
        product_raw(_by_head(q_BTHD), table_RD[-T:].t().expand(H, -1, -1), _by_head(r_BTHT), RELATIVE_TILE)
    return r_BTHT


def _relative_gradients(dr_BTHT: Tensor, q_BTHD: Tensor, table_RD: Tensor, dq_BTHD: Tensor, d_table_RD: Tensor) -> None:
    """Add what comes by way of the relative scores to dQ and to the table's gradient."""
    (B, T, H, D), dr_UNT, q_UND = q_BTHD.shape, _by_head(dr_BTHT), _by_head(q_BTHD)
    dq_UND = dq_BTHD.movedim(2, 0).view(H, B * T, D)
    with scope("attention"):
        product_raw(dr_UNT, table_RD[-T:].expand(H, -1, -1), dq_UND, RELATIVE_TILE, accumulate=True)
    pieces, segment = segments_of(T, D, B * T, RELATIVE_TILE, q_BTHD, units=H)
    parts_USTD = torch.empty(H, pieces, T, D, device=q_BTHD.device)
    with scope("relative_table"):
        product_raw(dr_UNT.transpose(1, 2), q_UND, parts_USTD, RELATIVE_TILE, segment=segment)
        d_table_RD[-T:] += parts_USTD.sum((0, 1))


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
    _, T, H, D = q_BTHD.shape
    launch = (launches or default_launches(D, table_RD is not None, q_BTHD.dtype)).forward
    for windows, masks in _windows(q_BTHD, table_RD, drop):
        q, k, v, out = (x[windows] for x in (q_BTHD, k_BTGD, v_BTGD, out_BTHD))
        r_BTHT = None if table_RD is None else _relative_scores(q, table_RD)
        kernels.forward_kernel[(triton.cdiv(T, launch.rows), len(q) * H)](
            q, k, v, r_BTHT, out, lse_BHT[windows], masks.seed_step, masks.site, masks.first_sample, scale, masks.kept,
            T, H, *_strides(q, k, v, q if r_BTHT is None else r_BTHT, out),
            SHARE=H // k.shape[2], D=D, THRESHOLD=drop.threshold, SWEEPS=sweeps, **_tile(launch),
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
        d_table_RD: fp32, where there is a table; rows before the last T become zero.
        scale, drop, launches: as in `forward`.
    """
    launches = launches or default_launches(q_BTHD.shape[3], table_RD is not None, q_BTHD.dtype)
    if d_table_RD is not None:
        d_table_RD.zero_()
    dr_BTHT = None
    for windows, masks in _windows(q_BTHD, table_RD, drop):
        inputs = tuple(x[windows] for x in (q_BTHD, k_BTGD, v_BTGD))
        r_BTHT = None if table_RD is None else _relative_scores(inputs[0], table_RD)
        if r_BTHT is not None and dr_BTHT is None:  # where it is not written it stays zero, whatever the windows
            dr_BTHT = torch.zeros_like(r_BTHT)
        here = None if dr_BTHT is None else dr_BTHT[: len(inputs[0])]
        passed = tuple(x[windows] for x in (d_out_BTHD, out_BTHD, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD))
        _backward_windows(inputs, r_BTHT, here, passed, scale, masks, launches)
        if here is not None:
            assert table_RD is not None
            assert d_table_RD is not None
            _relative_gradients(here, inputs[0], table_RD, dq_BTHD[windows], d_table_RD)


def _backward_windows(
    inputs: tuple[Tensor, ...],
    r_BTHT: Tensor | None,
    dr_BTHT: Tensor | None,
    passed: tuple[Tensor, ...],
    scale: float,
    drop: Dropping,
    launches: Launches,
) -> None:
    """dQ, dK, dV and dR of some windows: their queries, keys and values, relative scores and their gradient, then
    gradient of the output, output, log-sum-exp, and where the gradients go."""
    (q_BTHD, k_BTGD, _), (d_out_BTHD, out_BTHD, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD) = inputs, passed
    (B, T, H, D), G = q_BTHD.shape, k_BTGD.shape[2]
    delta_BHT = torch.empty_like(lse_BHT)
    relative = q_BTHD if r_BTHT is None else r_BTHT
    randomness = (drop.seed_step, drop.site, drop.first_sample, scale, drop.kept)
    options = {"SHARE": H // G, "D": D, "THRESHOLD": drop.threshold}
    kernels.query_gradient_kernel[(triton.cdiv(T, launches.queries.rows), B * H)](
        *inputs, r_BTHT, dr_BTHT, out_BTHD, d_out_BTHD, lse_BHT, delta_BHT, dq_BTHD, *randomness, T, H,
        *_strides(*inputs, relative, out_BTHD, d_out_BTHD, dq_BTHD), **options, **_tile(launches.queries),
    )  # fmt: skip
    parts = key_parts(q_BTHD, k_BTGD, launches.keys)
    parts_SBTGD = None if parts == 1 else torch.empty(parts, 2, *k_BTGD.shape, device=q_BTHD.device)
    dk, dv = (dk_BTGD, dv_BTGD) if parts_SBTGD is None else (parts_SBTGD[0, 0], parts_SBTGD[0, 1])
    part = 2 * k_BTGD.numel()
    kernels.key_gradient_kernel[(triton.cdiv(T, launches.keys.columns), B * G, parts)](
        *inputs, r_BTHT, d_out_BTHD, lse_BHT, delta_BHT, dk, dv, *randomness, T, H,
        *_strides(*inputs, relative, d_out_BTHD), part, *_strides(dk, dv), **options, PARTS=parts,
        **_tile(launches.keys),
    )  # fmt: skip
    if parts_SBTGD is not None:
        kernels.key_parts_kernel[(triton.cdiv(T, PART_ROWS), B * G, 2)](
            parts_SBTGD, dk_BTGD, dv_BTGD, part, T, G, *_strides(dk_BTGD, dv_BTGD), PARTS=parts, D=D, ROWS=PART_ROWS,
        )  # fmt: skip
