"""The products of a linear layer, forward and backward, into given buffers.

The Hopper GEMM takes any width, but rows must start at multiples of 16 bytes: buffers for widths such as 521 come from
`aligned_empty`.

impl="torch"  cuBLAS through torch (any device), pointwise work by torch
impl="cuda"   what an H200 did fastest: with an inner size up to 768 the product with its weights in registers
              (`stationary`); else the Hopper GEMM, or cuBLAS, as `gemm.choose` says; in fp32 `doubles`
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops.linear import doubles, gemm, stationary
from ridgeline.ops.linear.codes import codes_empty
from ridgeline.ops.linear.folded import SHARE, FoldedNorm, FoldedWeights, folded_statistics
from ridgeline.ops.linear.reference import GeluKind, Masks, masked
from ridgeline.ops.norm.reference import norm_reference
from ridgeline.ops.scope import product_scope

ROW_ALIGNMENT = 16  # bytes: what the copy engine takes, and what cuBLAS's fast kernels want
TORCH_NAME = {"exact": "none", "tanh": "tanh"}


def aligned_empty(like: Tensor, rows: int, width: int) -> Tensor:
    """An uninitialised (rows, width) tensor whose rows start at multiples of 16 bytes (odd widths: not contiguous)."""
    step = ROW_ALIGNMENT // like.element_size()
    return like.new_empty(rows, -(-width // step) * step)[:, :width]


def aligned(x_NK: Tensor) -> Tensor:
    """`x_NK` itself if its rows start at multiples of 16 bytes, else a copy whose rows do."""
    step_bytes = x_NK.stride(0) * x_NK.element_size()
    if x_NK.stride(1) == 1 and step_bytes % ROW_ALIGNMENT == 0 and x_NK.data_ptr() % ROW_ALIGNMENT == 0:
        return x_NK
    return aligned_empty(x_NK, *x_NK.shape).copy_(x_NK)


def slope_empty(like: Tensor, rows: int, width: int, *, coded: bool = False) -> Tensor:
    """Memory for derivatives of GELU beside activations `like`: half precision beside 16 bits, else as they are.

    With `coded` ("cuda" alone, beside bf16) codes of 8 bits, in an order of the kernels' own.
    """
    if coded:
        return codes_empty(like, rows, width)
    slope_NM = aligned_empty(like, rows, width)
    return slope_NM.view(torch.float16) if like.element_size() == 2 else slope_NM


def forward_raw(
    x_NK: Tensor,
    weight_MK: Tensor,
    out_NM: Tensor,
    *,
    bias_M: Tensor | None = None,
    gelu: GeluKind | None = None,
    slope_NM: Tensor | None = None,
    residual_NM: Tensor | None = None,
    masks: Masks | None = None,
    norm: FoldedNorm | None = None,
    impl: str = "torch",
) -> None:
    """out = x Wᵀ + b; or its GELU, with the derivative in `slope_NM` if given; or residual + dropout(x Wᵀ + b).

    With a `norm` the residual's product leaves the norm's shares; any other takes norm(x) in x's place, and writes the
    statistics ("cuda": K of x up to 768).
    """
    _refuse_folded_floats(x_NK, norm, impl)
    epilogue: gemm.Epilogue = "plain" if bias_M is None else "bias"
    if gelu is not None or residual_NM is not None:
        epilogue = "gelu" if gelu is not None else "residual"
    taken, left = (norm, None) if residual_NM is None else (None, norm)
    if taken is not None:
        folded_statistics(taken)
    whole_tiles = masks is None or masks.T >= stationary.LEAST_SAMPLE
    named = product_scope("forward", len(x_NK), weight_MK.shape[1], weight_MK.shape[0])
    if impl == "cuda" and x_NK.dtype == torch.float32:
        with named:
            doubles.product(
                x_NK, weight_MK, out_NM,
                bias_N=bias_M, gelu=gelu, slope_MN=slope_NM, residual_MN=residual_NM if masks is None else None,
            )  # fmt: skip
        if masks is not None and residual_NM is not None:
            torch.add(masked(out_NM, masks), residual_NM, out=out_NM)
        return
    if impl == "cuda" and whole_tiles and x_NK.shape[1] <= stationary.LARGEST_K:
        with named:
            stationary.stationary(
                x_NK, weight_MK, out_NM,
                bias_N=bias_M, gelu=gelu, slope_MN=slope_NM, residual_MN=residual_NM, masks=masks, norm=norm,
                folded=_folded(weight_MK, bias_M, taken) if taken is not None else None,
            )  # fmt: skip
        return
    if taken is not None:
        x_NK = norm_reference(x_NK, taken.weight_K, taken.bias_K, eps=taken.eps, kind=taken.kind)
    config = gemm.choose(out_NM.shape[0], out_NM.shape[1], epilogue) if impl == "cuda" else None
    if config is not None:
        with named:
            gemm.gemm(
                x_NK, weight_MK, out_NM, config,
                bias_N=bias_M, gelu=gelu, slope_MN=slope_NM, residual_MN=residual_NM, masks=masks,
            )  # fmt: skip
    else:
        _forward_torch(x_NK, weight_MK, out_NM, bias_M, gelu, slope_NM, residual_NM, masks)
    if left is not None:
        parts = out_NM.float().unflatten(1, (-1, SHARE))
        left.shares_SM2.copy_(torch.stack([parts.sum(2), parts.square().sum(2)], 2).transpose(0, 1))


def _forward_torch(
    x_NK: Tensor, weight_MK: Tensor, out_NM: Tensor, bias_M: Tensor | None, gelu: GeluKind | None,
    slope_NM: Tensor | None, residual_NM: Tensor | None, masks: Masks | None,
) -> None:  # fmt: skip
    """`forward_raw` by cuBLAS and PyTorch's pointwise kernels, without a norm."""
    linear_NM = out_NM if gelu is None else out_NM.new_empty_strided(out_NM.shape, out_NM.stride())
    if bias_M is None:
        torch.mm(x_NK, weight_MK.t(), out=linear_NM)
    else:
        torch.addmm(bias_M, x_NK, weight_MK.t(), out=linear_NM)
    if gelu is not None:
        torch.ops.aten.gelu.out(linear_NM, approximate=TORCH_NAME[gelu], out=out_NM)
    if gelu is not None and slope_NM is not None:
        wide_NM = linear_NM.float()
        slope_NM.copy_(torch.ops.aten.gelu_backward(torch.ones_like(wide_NM), wide_NM, approximate=TORCH_NAME[gelu]))
    if masks is not None:
        out_NM.copy_(masked(out_NM, masks))
    if residual_NM is not None:
        out_NM.add_(residual_NM)


def _refuse_folded_floats(x: Tensor, norm: FoldedNorm | None, impl: str) -> None:
    """Raises UnsupportedError where the fp64 tensor cores would multiply, whose kernels know no norm."""
    if norm is not None and impl == "cuda" and x.dtype == torch.float32:
        raise UnsupportedError("impl='cuda' cannot run: in fp32 no product takes a folded norm; use impl='torch'")


def _folded(weight_MK: Tensor, bias_M: Tensor | None, norm: FoldedNorm) -> FoldedWeights:
    """The weights of a product behind a folded norm: a launch of its own."""
    from ridgeline.ops.linear.folded_triton import folded_weights_raw  # imports Triton

    folded = FoldedWeights(torch.empty_like(weight_MK), weight_MK.new_empty(len(weight_MK), dtype=torch.float32))
    folded_weights_raw(weight_MK, bias_M, norm, folded)
    return folded


def input_gradient_raw(
    dy_NM: Tensor,
    weight_MK: Tensor,
    dx_NK: Tensor,
    *,
    slope_NK: Tensor | None = None,
    norm: FoldedNorm | None = None,
    sums: bool = True,
    terms: gemm.RowTerms | None = None,
    impl: str = "torch",
) -> Tensor | None:
    """dx = dy W; where x was a GELU, with its derivative in `slope_NK`, the gradient of its input: dy W · slope.

    With `terms` ("cuda" alone) dx = factor · dy W + α + β c.

    Returns:
        With `slope_NK` and `sums`, fp32 rows [P, K] whose sum over P is the column sum of dx (the gradient of the
        GELU's bias).
        With the `norm` before the GELU's product too, whose 1 / σ then multiplies dx behind those sums.
    """
    _refuse_folded_floats(dy_NM, norm, impl)
    named = product_scope("input_gradient", len(dy_NM), weight_MK.shape[1], weight_MK.shape[0])
    if terms is not None:
        with named:
            fitting = gemm.choose(dx_NK.shape[0], dx_NK.shape[1], "terms") or gemm.Config()
            return gemm.gemm(dy_NM, weight_MK, dx_NK, fitting, transposed_b=True, terms=terms)
    if impl == "cuda" and dy_NM.dtype == torch.float32:
        with named:
            doubles.product(dy_NM, weight_MK, dx_NK, transposed_b=True, factor_MN=slope_NK)
        return dx_NK.sum(0, keepdim=True) if sums and slope_NK is not None else None
    if impl == "cuda" and dy_NM.shape[1] <= stationary.LARGEST_K:
        with named:
            return stationary.stationary(
                dy_NM, weight_MK, dx_NK, transposed_b=True, factor_MN=slope_NK, norm=norm, summed=sums
            )
    config = gemm.choose(dx_NK.shape[0], dx_NK.shape[1], "plain" if slope_NK is None else "factor")
    if impl == "cuda" and config is not None:
        with named:
            sums_PK = gemm.gemm(dy_NM, weight_MK, dx_NK, config, transposed_b=True, factor_MN=slope_NK)
    else:
        torch.mm(dy_NM, weight_MK, out=dx_NK)
        if slope_NK is None:
            return None
        torch.mul(dx_NK, slope_NK, out=dx_NK)
        sums_PK = dx_NK.sum(0, keepdim=True, dtype=torch.float32) if sums else None
    if norm is not None:
        dx_NK.mul_(norm.rstd_M[:, None])
    return sums_PK


def weight_gradient_raw(dy_NM: Tensor, x_NK: Tensor, dweight_MK: Tensor, *, accumulate: bool = True) -> None:
    """dW (+)= dyᵀ x into an fp32 buffer, fp32 accumulators; cuBLAS, which splits the rows among blocks itself.

    Deterministic as cuBLAS is: the same shapes on the same card give the same bits.
    """
    if dy_NM.dtype == torch.float32 or dy_NM.device.type != "cuda":
        product_MK = dy_NM.t().float() @ x_NK.float()
        dweight_MK.add_(product_MK) if accumulate else dweight_MK.copy_(product_MK)
    elif accumulate:
        torch.addmm(dweight_MK, dy_NM.t(), x_NK, out_dtype=torch.float32, out=dweight_MK)
    else:
        torch.mm(dy_NM.t(), x_NK, out_dtype=torch.float32, out=dweight_MK)
