"""The halves of a block as autograd functions over the kernels of this folder. Imports Triton.

What a kernel fuses forward it does not fuse backward: an MLP's forward takes the join after it, its backward the join
before it. The joins left over are the norm's own kernels, the weight gradients are the vendor's GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.linear.reference import Masks
from ridgeline.ops.mlp import kernels
from ridgeline.ops.mlp.kernels import Join, JoinGradient
from ridgeline.ops.mlp.reference import Norm
from ridgeline.ops.norm import triton as norms


class Statistics:
    """Results of a join or a norm over (N, C): residual, normalised, mean (None for RMSNorm), 1/σ."""

    def __init__(self, like_NC: Tensor, norm: Norm) -> None:
        self.r_NC, self.h_NC = torch.empty_like(like_NC), torch.empty_like(like_NC)
        self.rstd_N = like_NC.new_empty(len(like_NC), dtype=torch.float32)
        self.mean_N = torch.empty_like(self.rstd_N) if norm.kind == "layernorm" else None


def _norm_forward(r_NC: Tensor, norm: Norm) -> Statistics:
    out = Statistics(r_NC, norm)
    norms.norm_forward_raw(
        r_NC, norm.weight_C, norm.bias_C, out.h_NC, out.mean_N, out.rstd_N, eps=norm.eps, kind=norm.kind
    )
    return out


def _join(norm: Norm, bias_C: Tensor | None, residual_NC: Tensor, out: Statistics, masks: Masks | None) -> Join:
    return Join(
        norm.kind, norm.eps, norm.weight_C, norm.bias_C, bias_C, residual_NC, out.r_NC, out.h_NC, out.mean_N,
        out.rstd_N, masks,
    )  # fmt: skip


def _sums(partials_PW: Tensor, dtype: torch.dtype) -> Tensor:
    out_W = partials_PW.new_empty(partials_PW.shape[1])
    column_sums_raw(partials_PW, out_W, accumulate=False)
    return out_W.to(dtype)


def _join_backward(
    dr_NC: Tensor, dh_NC: Tensor, norm: Norm, saved: tuple[Tensor, ...], bias: bool, masks: Masks | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of residual and branch, and of scale, shift and branch bias as far as they exist."""
    r_NC, mean_N, rstd_N = saved
    N, C = r_NC.shape
    sums = 1 + (norm.bias_C is not None) + bias
    partials_PW = r_NC.new_empty(norms.partial_rows(N, C, r_NC), sums * C, dtype=torch.float32)
    total_NC = torch.empty_like(r_NC)
    dbranch_NC = torch.empty_like(r_NC) if masks else None
    norms.norm_backward_raw(
        dh_NC.contiguous(), r_NC, norm.weight_C, mean_N, rstd_N, partials_PW, kind=norm.kind,
        bias=norm.bias_C is not None, branch_bias=bias, dresidual_NC=dr_NC.contiguous(), dr_NC=total_NC,
        dbranch_NC=dbranch_NC, T=masks.T if masks else 1, p=masks.p if masks else 0.0,
        dropout=masks.state if masks else None, site=masks.site if masks else 0,
    )  # fmt: skip
    return total_NC, total_NC if dbranch_NC is None else dbranch_NC, list(_sums(partials_PW, r_NC.dtype).split(C))


def _norm_gradient(norm: Norm, saved: tuple[Tensor, ...], dresidual_NC: Tensor | None) -> JoinGradient:
    """Where a backward kernel puts the gradient of a norm alone."""
    r_NC, mean_N, rstd_N = saved
    N, C = r_NC.shape
    config = kernels.choose(N)
    shift = norm.bias_C is not None
    partials_PW = r_NC.new_empty(kernels.partial_rows(N, config), (1 + shift) * C, dtype=torch.float32)
    return JoinGradient(
        norm.kind, norm.weight_C, r_NC, mean_N, rstd_N, dresidual_NC, torch.empty_like(r_NC), None, partials_PW, shift,
        False, None,
    )  # fmt: skip


def _split(sums_W: Tensor, C: int, shift: bool) -> tuple[Tensor, Tensor | None]:
    parts = sums_W.split(C)
    return parts[0], parts[1] if shift else None


class MlpHalf(torch.autograd.Function):
    """(r, norm, MLP, next norm) → (r', h')."""

    @staticmethod
    def forward(
        ctx: Any, r_NC: Tensor, w_C: Tensor, b_C: Tensor | None, up_FC: Tensor, up_bias_F: Tensor | None,
        down_CF: Tensor, down_bias_C: Tensor | None, next_w_C: Tensor, next_b_C: Tensor | None, kind: Any, eps: float,
        gelu: Any, masks: Masks | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        norm, next_norm = Norm(kind, eps, w_C, b_C), Norm(kind, eps, next_w_C, next_b_C)
        first, out = _norm_forward(r_NC, norm), Statistics(r_NC, next_norm)
        kept, a_NF = kernels.hidden(first.h_NC, len(up_FC))
        join = _join(next_norm, down_bias_C, r_NC, out, masks)
        kernels.mlp_forward_raw(first.h_NC, up_FC, up_bias_F, down_CF, kept, a_NF, join, gelu=gelu)
        ctx.save_for_backward(
            r_NC, first.mean_N, first.rstd_N, out.r_NC, out.mean_N, out.rstd_N, first.h_NC, kept, a_NF, up_FC, down_CF,
            w_C, b_C, next_w_C, next_b_C,
        )  # fmt: skip
        ctx.kind, ctx.eps, ctx.masks = kind, eps, masks
        ctx.biases = up_bias_F is not None, down_bias_C is not None
        return out.r_NC, out.h_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dr_NC: Tensor, dh_NC: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        h_NC, kept, a_NF, up_FC, down_CF, w_C, b_C, next_w_C, next_b_C = saved[6:]
        (N, C), F = h_NC.shape, len(up_FC)
        up_bias, down_bias = ctx.biases
        next_norm, norm = Norm(ctx.kind, ctx.eps, next_w_C, next_b_C), Norm(ctx.kind, ctx.eps, w_C, b_C)
        total_NC, dz_NC, small = _join_backward(dr_NC, dh_NC, next_norm, saved[3:6], down_bias, ctx.masks)
        du_NF = torch.empty_like(a_NF)
        join = _norm_gradient(norm, saved[:3], total_NC)
        sums_PF = h_NC.new_empty(kernels.inner_partial_rows(N), F, dtype=torch.float32) if up_bias else None
        kernels.mlp_backward_raw(dz_NC, up_FC, down_CF, kept, du_NF, sums_PF, join)
        dw_C, db_C = _split(_sums(join.partials_PW, h_NC.dtype), C, join.bias)
        dnext_w_C, dnext_b_C = small[0], small[1] if next_b_C is not None else None
        return (
            join.dr_NC, dw_C, db_C, du_NF.t() @ h_NC, None if sums_PF is None else _sums(sums_PF, h_NC.dtype),
            dz_NC.t() @ a_NF, small[-1] if down_bias else None, dnext_w_C, dnext_b_C, None, None, None, None,
        )  # fmt: skip


class ProjectJoin(torch.autograd.Function):
    """(x, W, b, residual, norm) → (r', h')."""

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, weight_CK: Tensor, bias_C: Tensor | None, residual_NC: Tensor, w_C: Tensor,
        b_C: Tensor | None, kind: Any, eps: float, masks: Masks | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        norm = Norm(kind, eps, w_C, b_C)
        out = Statistics(residual_NC, norm)
        join = _join(norm, bias_C, residual_NC, out, masks)
        kernels.project_forward_raw(x_NK, weight_CK, join, patient=False)
        ctx.save_for_backward(out.r_NC, out.mean_N, out.rstd_N, x_NK, weight_CK, w_C, b_C)
        ctx.kind, ctx.eps, ctx.masks, ctx.bias = kind, eps, masks, bias_C is not None
        return out.r_NC, out.h_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dr_NC: Tensor, dh_NC: Tensor) -> tuple[Tensor | None, ...]:
        *saved, x_NK, weight_CK, w_C, b_C = ctx.saved_tensors
        norm = Norm(ctx.kind, ctx.eps, w_C, b_C)
        dresidual_NC, dy_NC, small = _join_backward(dr_NC, dh_NC, norm, tuple(saved), ctx.bias, ctx.masks)
        return (
            dy_NC @ weight_CK, dy_NC.t() @ x_NK, small[-1] if ctx.bias else None, dresidual_NC, small[0],
            small[1] if b_C is not None else None, None, None, None,
        )  # fmt: skip


class NormProject(torch.autograd.Function):
    """(r, norm, W, b) → norm(r) Wᵀ + b."""

    @staticmethod
    def forward(
        ctx: Any, r_NC: Tensor, w_C: Tensor, b_C: Tensor | None, weight_QC: Tensor, bias_Q: Tensor | None, kind: Any,
        eps: float,
    ) -> Tensor:  # fmt: skip
        first = _norm_forward(r_NC, Norm(kind, eps, w_C, b_C))
        ctx.save_for_backward(r_NC, first.mean_N, first.rstd_N, first.h_NC, weight_QC, w_C, b_C)
        ctx.kind, ctx.eps, ctx.bias = kind, eps, bias_Q is not None
        return torch.nn.functional.linear(first.h_NC, weight_QC, bias_Q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NQ: Tensor) -> tuple[Tensor | None, ...]:
        *saved, h_NC, weight_QC, w_C, b_C = ctx.saved_tensors
        dy_NQ = dy_NQ.contiguous()
        norm = Norm(ctx.kind, ctx.eps, w_C, b_C)
        join = _norm_gradient(norm, tuple(saved), None)
        kernels.project_backward_raw(dy_NQ, weight_QC, join)
        dw_C, db_C = _split(_sums(join.partials_PW, h_NC.dtype), h_NC.shape[1], join.bias)
        dbias_Q = dy_NQ.sum(0, dtype=torch.float32).to(dy_NQ.dtype) if ctx.bias else None
        return join.dr_NC, dw_C, db_C, dy_NQ.t() @ h_NC, dbias_Q, None, None
