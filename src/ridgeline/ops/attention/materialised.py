"""Attention with its scores and weights in memory: what stands between two plain products. Imports Triton.

    R = Q Eᵀ    S = Q Kᵀ    P = softmax(scale · (S + skewed R))    D = dropout(P)    O = D V
    dV = Dᵀ dO    dD = dO Vᵀ    dP = dropout'(dD)    dS = softmax'(P, dP) · scale
    dQ = dS K + dR E    dK = dSᵀ Q    dR = unskewed dS    dE = dRᵀ Q

The products are the caller's; here are the passes over (heads, T, T). Heads come as h · B + b, so that a head's rows
over all samples lie together and dE is one product a head. The specification is `reference.py`.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import grid_rows, power_of_two
from ridgeline.ops.attention.short import Dropping
from ridgeline.ops.attention.triton import _keep, _keys_of

TILE = 2048  # elements a program holds at once
WARPS = 4


@triton.jit(do_not_specialize=["N"])
def softmax_kernel(s_ptr, r_ptr, p_ptr, N, T, scale, ROWS: tl.constexpr, BLOCK_T: tl.constexpr):
    """p = softmax of scale · (s + skewed r) over the keys that a query may see; 0 beyond."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = n % T, tl.arange(0, BLOCK_T)
    place = n.to(tl.int64)[:, None] * T + j[None, :]
    seen = (n < N)[:, None] & (j[None, :] <= i[:, None])
    s = tl.load(s_ptr + place, mask=seen, other=0.0).to(tl.float32)
    if r_ptr is not None:
        s += tl.load(r_ptr + place + (T - 1 - i)[:, None], mask=seen, other=0.0).to(tl.float32)
    s = tl.where(seen, s * scale, -1e30)
    p = tl.where(seen, tl.exp(s - tl.max(s, 1)[:, None]), 0.0)
    p /= tl.maximum(tl.sum(p, 1), 1e-30)[:, None]
    tl.store(p_ptr + place, p.to(p_ptr.dtype.element_ty), mask=(n < N)[:, None] & (j < T)[None, :])


@triton.jit(do_not_specialize=["N"])
def softmax_gradient_kernel(p_ptr, dp_ptr, ds_ptr, N, T, scale, ROWS: tl.constexpr, BLOCK_T: tl.constexpr):
    """ds = p (dp − Σ p dp) · scale; 0 where p is."""
    n, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_T)
    place = n.to(tl.int64)[:, None] * T + j[None, :]
    inside = (n < N)[:, None] & (j < T)[None, :]
    p = tl.load(p_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dp = tl.load(dp_ptr + place, mask=inside, other=0.0).to(tl.float32)
    ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
    tl.store(ds_ptr + place, ds.to(ds_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "sample_offset"])
def drop_kernel(
    x_ptr, out_ptr, seed_step_ptr, site, sample_offset, kept, T, B, H,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out = x · keep · kept, by the mask of attention's weights; its own backward pass."""
    unit = tl.program_id(1)
    key_0, key_1 = _keys_of(seed_step_ptr, site, sample_offset, unit % B * H + unit // B, H)
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_T)
    place = unit.to(tl.int64) * T * T + i[:, None] * T + j[None, :]
    inside = (i < T)[:, None] & (j < T)[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    keep = _keep(key_0, key_1, i[:, None], j[None, :], (T + 15) // 16, THRESHOLD)
    tl.store(out_ptr + place, tl.where(keep, x * kept, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def unskew_kernel(ds_ptr, dr_ptr, N, T, ROWS: tl.constexpr, BLOCK_T: tl.constexpr):
    """From columns by key to columns by row of the table: dr[i, x] = ds[i, i − (T − 1 − x)], 0 where there is none."""
    n, x = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_T)
    j = x[None, :] - (T - 1 - n % T)[:, None]
    row = n.to(tl.int64)[:, None] * T
    inside = (n < N)[:, None] & (x < T)[None, :]
    ds = tl.load(ds_ptr + row + j, mask=inside & (j >= 0), other=0.0)
    tl.store(dr_ptr + row + x[None, :], ds, mask=inside)


def _rows_of(T: int) -> tuple[int, int]:
    """Rows of a tile, and its columns."""
    block = power_of_two(T)
    return max(1, TILE // block), block


def softmax_raw(s_UTT: Tensor, r_UTT: Tensor | None, p_UTT: Tensor, scale: float) -> None:
    """Write the causal weights of scores `s_UTT` and relative scores by table row `r_UTT` into `p_UTT`; contiguous."""
    T = s_UTT.shape[-1]
    N, (rows, block) = s_UTT.numel() // T, _rows_of(T)
    softmax_kernel[(grid_rows(N, rows),)](
        s_UTT, r_UTT, p_UTT, N, T, scale, ROWS=rows, BLOCK_T=block, num_warps=WARPS
    )  # fmt: skip


def softmax_gradient_raw(p_UTT: Tensor, dp_UTT: Tensor, ds_UTT: Tensor, scale: float) -> None:
    """Write the gradient of the unscaled scores into `ds_UTT`, given the weights and their gradient; contiguous."""
    T = p_UTT.shape[-1]
    N, (rows, block) = p_UTT.numel() // T, _rows_of(T)
    softmax_gradient_kernel[(grid_rows(N, rows),)](
        p_UTT, dp_UTT, ds_UTT, N, T, scale, ROWS=rows, BLOCK_T=block, num_warps=WARPS
    )  # fmt: skip


def drop_raw(x_HBTT: Tensor, out_HBTT: Tensor, drop: Dropping) -> None:
    """Write the dropped `x_HBTT` (weights or their gradient, heads first) into `out_HBTT`; contiguous."""
    H, B, T, _ = x_HBTT.shape
    rows, block = _rows_of(T)
    drop_kernel[(grid_rows(T, rows), H * B)](
        x_HBTT, out_HBTT, drop.seed_step, drop.site, drop.first_sample, drop.kept, T, B, H,
        THRESHOLD=drop.threshold, ROWS=rows, BLOCK_T=block, num_warps=WARPS,
    )  # fmt: skip


def unskew_raw(ds_UTT: Tensor, dr_UTT: Tensor) -> None:
    """Write the gradient of R into `dr_UTT`, given that of the scores; contiguous."""
    T = ds_UTT.shape[-1]
    N, (rows, block) = ds_UTT.numel() // T, _rows_of(T)
    unskew_kernel[(grid_rows(N, rows),)](ds_UTT, dr_UTT, N, T, ROWS=rows, BLOCK_T=block, num_warps=WARPS)
