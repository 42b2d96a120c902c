"""The linear layer as an autograd function, whatever computes its products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops.linear.products import (
    aligned,
    aligned_empty,
    forward_raw,
    input_gradient_raw,
    slope_empty,
    weight_gradient_raw,
)
from ridgeline.ops.linear.reference import GeluKind, Masks, masked


class Linear(torch.autograd.Function):
    """(x, W, b, residual) → y; keeps x, W and a GELU's derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NK: Tensor,
        weight_MK: Tensor,
        bias_M: Tensor | None,
        residual_NM: Tensor | None,
        gelu: GeluKind | None,
        masks: Masks | None,
        impl: str,
    ) -> Tensor:
        """y of `linear_reference`, by `impl`."""
        x_NK, weight_MK = aligned(x_NK), aligned(weight_MK)
        residual_NM = None if residual_NM is None else aligned(residual_NM)
        out_NM = aligned_empty(x_NK, x_NK.shape[0], weight_MK.shape[0])
        slope_NM = slope_empty(x_NK, *out_NM.shape) if gelu is not None else None
        forward_raw(
            x_NK, weight_MK, out_NM,
            bias_M=bias_M, gelu=gelu, slope_NM=slope_NM, residual_NM=residual_NM, masks=masks, impl=impl,
        )  # fmt: skip
        ctx.save_for_backward(x_NK, weight_MK, slope_NM)
        ctx.masks, ctx.impl = masks, impl
        return out_NM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NM: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, W, b and residual, each in its tensor's dtype."""
        x_NK, weight_MK, slope_NM = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        dy_NM = dout_NM
        if ctx.masks is not None:
            dy_NM = masked(dy_NM, ctx.masks)
        if slope_NM is not None:
            dy_NM = torch.mul(dy_NM, slope_NM, out=torch.empty_like(dy_NM))
        dx_NK = dweight_MK = dbias_M = None
        dy_NM = aligned(dy_NM)
        if needs_x:
            dx_NK = aligned_empty(x_NK, *x_NK.shape)
            input_gradient_raw(dy_NM, weight_MK, dx_NK, impl=ctx.impl)
        if needs_weight:
            wide_MK = torch.empty_like(weight_MK, dtype=torch.float32)
            weight_gradient_raw(dy_NM, x_NK, wide_MK, accumulate=False)
            dweight_MK = wide_MK.to(weight_MK.dtype)
        if needs_bias:
            dbias_M = dy_NM.sum(0, dtype=torch.float32).to(dy_NM.dtype)
        return dx_NK, dweight_MK, dbias_M, dout_NM if needs_residual else None, None, None, None
