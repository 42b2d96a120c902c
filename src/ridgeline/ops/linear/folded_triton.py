"""A folded norm's rows' statistics, and the last step of a weight's gradient behind it (folded.py), in Triton."""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import power_of_two
from ridgeline.ops.linear.folded import SHARE, FoldedNorm, FoldedWeights

ROWS, SLOTS = 4, 16  # of the weight in a program; of partial sums in a tile


@triton.jit(do_not_specialize=["P"])
def folded_gradient_kernel(
    product_ptr, sums_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, P, M, K: tl.constexpr,
    ADD_WEIGHT: tl.constexpr, ADD_BIAS: tl.constexpr, MEANS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """weight (+)= (product − MEANS its rows' means) γ + (Σ du) β for some rows; bias (+)= Σ du."""
    previous_done(EARLY)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_K = tl.arange(0, BLOCK_K)
    inside_R, inside_K = row_R < M, column_K < K
    slot_S = tl.arange(0, SLOTS)
    du_SR = tl.zeros((SLOTS, ROWS), dtype=tl.float32)
    for first in tl.range(0, P, SLOTS):
        inside_SR = (first + slot_S < P)[:, None] & inside_R[None, :]
        place_SR = sums_ptr + ((first + slot_S) * M)[:, None] + row_R[None, :]
        du_SR += tl.load(place_SR, mask=inside_SR, other=0.0)
    du_R = tl.sum(du_SR, axis=0)
    if bias_ptr is not None:
        total_R = du_R
        if ADD_BIAS:
            total_R += tl.load(bias_ptr + row_R, mask=inside_R, other=0.0).to(tl.float32)
        tl.store(bias_ptr + row_R, total_R.to(bias_ptr.dtype.element_ty), mask=inside_R)
    inside_RK = inside_R[:, None] & inside_K[None, :]
    place_RK = row_R[:, None] * K + column_K[None, :]
    grad_RK = tl.load(product_ptr + place_RK, mask=inside_RK, other=0.0)
    if MEANS:
        grad_RK -= (tl.sum(grad_RK, axis=1) / K)[:, None]
    grad_RK *= tl.load(scale_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)[None, :]
    if shift_ptr is not None:
        grad_RK += du_R[:, None] * tl.load(shift_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)[None, :]
    if ADD_WEIGHT:
        grad_RK += tl.load(weight_ptr + place_RK, mask=inside_RK, other=0.0).to(tl.float32)
    tl.store(weight_ptr + place_RK, grad_RK.to(weight_ptr.dtype.element_ty), mask=inside_RK)


def folded_gradient_raw(
    product_MK: Tensor,
    sums_PM: Tensor,
    norm: FoldedNorm,
    dweight_MK: Tensor,
    dbias_M: Tensor | None,
    *,
    add_weight: bool,
    add_bias: bool,
) -> None:
    """The gradients of a product behind a folded norm, from what its kernels leave. Allocates nothing.

    Args:
        product_MK: (du / σ)ᵀ r; fp32, contiguous.
        sums_PM: fp32 partial sums of du over rows, contiguous.
        norm: the norm.
        dweight_MK, dbias_M: written, or added to; contiguous, any storage.
    """
    (M, K), P = product_MK.shape, len(sums_PM)
    folded_gradient_kernel[(triton.cdiv(M, ROWS),)](
        product_MK, sums_PM, norm.weight_K, norm.bias_K, dweight_MK, dbias_M, P, M, K=K,
        ADD_WEIGHT=add_weight, ADD_BIAS=add_bias, MEANS=norm.mean_M is not None, ROWS=ROWS, SLOTS=SLOTS,
        BLOCK_K=power_of_two(K), num_warps=4, **early_launch(product_MK.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def folded_statistics_kernel(
    shares_ptr, mean_ptr, rstd_ptr, N, eps, PARTS: tl.constexpr, C: tl.constexpr, MEANS: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """mean and 1 / σ of some rows from the sums and sums of squares of their parts."""
    previous_done(EARLY)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < N
    both_R2 = tl.arange(0, 2)[None, :]
    sums_R2 = tl.zeros((ROWS, 2), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        place_R2 = shares_ptr + (tl.cast(part, tl.int64) * N + row_R)[:, None] * 2 + both_R2
        sums_R2 += tl.load(place_R2, mask=inside_R[:, None], other=0.0)
    sum_R, squares_R = tl.split(sums_R2)
    variance_R = squares_R / C
    if MEANS:
        mean_R = sum_R / C
        variance_R -= mean_R * mean_R
        tl.store(mean_ptr + row_R, mean_R, mask=inside_R)
    tl.store(rstd_ptr + row_R, 1.0 / tl.sqrt(tl.maximum(variance_R, 0.0) + eps), mask=inside_R)


def folded_statistics_raw(norm: FoldedNorm) -> None:
    """The statistics of the rows from their shares. Allocates nothing."""
    parts, N, _ = norm.shares_SM2.shape
    folded_statistics_kernel[(triton.cdiv(N, 256),)](
        norm.shares_SM2, norm.mean_M, norm.rstd_M, N, norm.eps, PARTS=parts, C=SHARE * parts,
        MEANS=norm.mean_M is not None, ROWS=256, num_warps=4, **early_launch(norm.rstd_M.device),
    )  # fmt: skip


@triton.jit
def folded_weights_kernel(
    weight_ptr, bias_ptr, scale_ptr, shift_ptr, scaled_ptr, out_bias_ptr, M,
    K: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """W diag(γ), CENTRED less its rows' means, and b + W β for some rows."""
    previous_done(EARLY)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_K = tl.arange(0, BLOCK_K)
    inside_R, inside_K = row_R < M, column_K < K
    inside_RK = inside_R[:, None] & inside_K[None, :]
    place_RK = row_R[:, None] * K + column_K[None, :]
    weight_RK = tl.load(weight_ptr + place_RK, mask=inside_RK, other=0.0).to(tl.float32)
    scale_K = tl.load(scale_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)
    scaled_RK = weight_RK * scale_K[None, :]
    if CENTRED:
        scaled_RK -= (tl.sum(scaled_RK, axis=1) / K)[:, None]
    tl.store(scaled_ptr + place_RK, scaled_RK.to(scaled_ptr.dtype.element_ty), mask=inside_RK)
    bias_R = tl.zeros((ROWS,), dtype=tl.float32)
    if bias_ptr is not None:
        bias_R += tl.load(bias_ptr + row_R, mask=inside_R, other=0.0).to(tl.float32)
    if shift_ptr is not None:
        shift_K = tl.load(shift_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)
        bias_R += tl.sum(weight_RK * shift_K[None, :], axis=1)
    tl.store(out_bias_ptr + row_R, bias_R, mask=inside_R)


def folded_weights_raw(weight_MK: Tensor, bias_M: Tensor | None, norm: FoldedNorm, out: FoldedWeights) -> None:
    """Write `out`. Allocates nothing; `weight_MK` is contiguous."""
    M, K = weight_MK.shape
    folded_weights_kernel[(triton.cdiv(M, ROWS),)](
        weight_MK, bias_M, norm.weight_K, norm.bias_K, *out, M, K=K, CENTRED=norm.mean_M is not None,
        ROWS=ROWS, BLOCK_K=power_of_two(K), num_warps=4,
        **early_launch(weight_MK.device),
    )  # fmt: skip
