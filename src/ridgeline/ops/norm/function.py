"""The norms' kernels as autograd functions. Imports Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.dropout.reference import DropoutState
from ridgeline.ops.norm import triton as kernels
from ridgeline.ops.norm.reference import NormKind


def _statistics(N: int, kind: NormKind, device: torch.device) -> tuple[Tensor | None, Tensor]:
    mean_N = torch.empty(N, device=device) if kind == "layernorm" else None
    return mean_N, torch.empty(N, device=device)


def _parameter_gradients(partials_PW: Tensor, parameters: list[Tensor | None]) -> list[Tensor | None]:
    """Column sums of the partials, one section for each parameter there is, in the parameter's dtype."""
    present = [p for p in parameters if p is not None]
    same = all(p.dtype == present[0].dtype for p in present)
    dtype = present[0].dtype if same else torch.float32
    sums = torch.empty(partials_PW.shape[1], dtype=dtype, device=partials_PW.device)
    column_sums_raw(partials_PW, sums, accumulate=False)
    sections = iter(sums.split(partials_PW.shape[1] // len(present)))
    return [None if p is None else next(sections).to(p.dtype) for p in parameters]


class Norm(torch.autograd.Function):
    """A norm alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float, kind: NormKind) -> Tensor:
        x_NC = x.view(-1, x.shape[-1])
        h = torch.empty_like(x)
        mean_N, rstd_N = _statistics(len(x_NC), kind, x.device)
        kernels.norm_forward_raw(x_NC, weight_C, bias_C, h.view_as(x_NC), mean_N, rstd_N, eps=eps, kind=kind)
        ctx.save_for_backward(x, weight_C, bias_C, mean_N, rstd_N)
        ctx.kind = kind
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C, bias_C, mean_N, rstd_N = ctx.saved_tensors
        x_NC, dx = x.view(-1, x.shape[-1]), torch.empty_like(x)
        N, C = x_NC.shape
        bias = bias_C is not None
        partials_PW = torch.empty(kernels.partial_rows(N, C, x), (1 + bias) * C, device=x.device)
        kernels.norm_backward_raw(
            dh.contiguous().view_as(x_NC), x_NC, weight_C, mean_N, rstd_N, partials_PW,
            kind=ctx.kind, bias=bias, dr_NC=dx.view_as(x_NC),
        )  # fmt: skip
        dweight_C, dbias_C = _parameter_gradients(partials_PW, [weight_C, bias_C])
        return dx, dweight_C, dbias_C, None, None


class ResidualNorm(torch.autograd.Function):
    """A norm joined with the residual write."""

    @staticmethod
    def forward(
        ctx: Any,
        branch_BTC: Tensor,
        residual_BTC: Tensor | None,
        weight_C: Tensor,
        bias_C: Tensor | None,
        branch_bias_C: Tensor | None,
        eps: float,
        kind: NormKind,
        p: float,
        dropout: DropoutState | None,
        site: int,
    ) -> tuple[Tensor, Tensor]:
        C = branch_BTC.shape[-1]
        r_BTC, h_BTC = torch.empty_like(branch_BTC), torch.empty_like(branch_BTC)
        mean_N, rstd_N = _statistics(r_BTC.numel() // C, kind, r_BTC.device)
        ctx.options = {"kind": kind, "T": branch_BTC.shape[1], "p": p, "dropout": dropout, "site": site}
        kernels.norm_forward_raw(
            branch_BTC.view(-1, C), weight_C, bias_C, h_BTC.view(-1, C), mean_N, rstd_N,
            eps=eps, r_NC=r_BTC.view(-1, C), residual_NC=None if residual_BTC is None else residual_BTC.view(-1, C),
            branch_bias_C=branch_bias_C, **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(r_BTC, weight_C, bias_C, branch_bias_C, mean_N, rstd_N)
        ctx.residual = residual_BTC is not None
        return r_BTC, h_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dr_BTC: Tensor, dh_BTC: Tensor) -> tuple[Tensor | None, ...]:
        r_BTC, weight_C, bias_C, branch_bias_C, mean_N, rstd_N = ctx.saved_tensors
        r_NC, parameters = r_BTC.view(-1, r_BTC.shape[-1]), [weight_C, bias_C, branch_bias_C]
        N, C = r_NC.shape
        dropped = ctx.options["dropout"] is not None and ctx.options["p"] > 0
        total_BTC = torch.empty_like(r_BTC)
        dbranch_BTC = torch.empty_like(r_BTC) if dropped else total_BTC
        width = sum(p is not None for p in parameters) * C
        partials_PW = torch.empty(kernels.partial_rows(N, C, r_BTC), width, device=r_BTC.device)
        kernels.norm_backward_raw(
            dh_BTC.contiguous().view(N, C), r_NC, weight_C, mean_N, rstd_N, partials_PW,
            bias=bias_C is not None, branch_bias=branch_bias_C is not None,
            dresidual_NC=dr_BTC.contiguous().view(N, C), dr_NC=total_BTC.view(N, C),
            dbranch_NC=dbranch_BTC.view(N, C) if dropped else None, **ctx.options,
        )  # fmt: skip
        dresidual_BTC = total_BTC if ctx.residual else None
        return dbranch_BTC, dresidual_BTC, *_parameter_gradients(partials_PW, parameters), *(None,) * 5
