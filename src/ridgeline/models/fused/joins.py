"""Where a branch meets the residual stream: r = residual + dropout(branch + bias), rounded to its storage; h = norm(r).

A join is one kernel, forward and backward. A product may take the join beside it into its own kernel (ops/mlp): forward
the product that makes the branch, backward the one that makes the gradient of h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.config import DecoderConfig
from ridgeline.models.fused.attention import Shape
from ridgeline.models.fused.choices import Choices
from ridgeline.models.fused.gradients import WeightGradients
from ridgeline.models.plan import StoragePlan
from ridgeline.ops.linear import Masks, products
from ridgeline.ops.linear.folded import SHARE, FoldedNorm
from ridgeline.ops.mlp import kernels as rows
from ridgeline.ops.mlp import many
from ridgeline.ops.norm import triton as norms


class Pass(NamedTuple):
    """What holds for all blocks of a pass."""

    config: DecoderConfig
    shape: Shape
    choices: Choices
    plan: StoragePlan


class Norm(NamedTuple):
    """A norm's weights: scale, and shift where it has one."""

    weight_C: Tensor
    bias_C: Tensor | None


class Join(NamedTuple):
    """A join's parameters: the branch's bias (None without), the norm's weights, the number of its dropout.

    `folded`: the products beside the norm take its parts, so that it is never made. Not `normed`, whoever takes the
    stream wants the norm's statistics alone; a kernel may make it all the same.
    """

    branch_bias_C: Tensor | None
    norm: Norm
    site: int
    folded: bool = False
    normed: bool = True


class Joined(NamedTuple):
    """A join's results: the residual stream, its norm, and the norm's statistics.

    A norm that is folded into the products beside it is never made: the products take the stream, and `folded`.
    """

    r_NC: Tensor
    h_NC: Tensor
    mean_N: Tensor | None
    rstd_N: Tensor
    folded: FoldedNorm | None = None


class Slopes(NamedTuple):
    """The gradients behind a join: along the residual, and into the branch (the same tensor without dropout)."""

    dr_NC: Tensor
    dbranch_NC: Tensor


def linear(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None, *, impl: str = "torch") -> Tensor:
    """x Wᵀ + b, by the vendor's GEMM or, with "cuda", by ops/linear."""
    if impl == "torch":
        return torch.nn.functional.linear(x_NK, weight_MK, bias_M)
    out_NM = x_NK.new_empty(len(x_NK), len(weight_MK))
    products.forward_raw(x_NK, weight_MK, out_NM, bias_M=bias_M, impl=impl)
    return out_NM


def input_gradient(dy_NM: Tensor, weight_MK: Tensor, *, impl: str) -> Tensor:
    """dy W, by the vendor's GEMM or by ops/linear."""
    if impl == "torch":
        return dy_NM @ weight_MK
    dx_NK = dy_NM.new_empty(len(dy_NM), weight_MK.shape[1])
    products.input_gradient_raw(dy_NM, weight_MK, dx_NK, impl="cuda")
    return dx_NK


def _results(run: Pass, like_NC: Tensor, r_NC: Tensor) -> Joined:
    return Joined(r_NC, torch.empty_like(like_NC), *_statistics(run, like_NC))


def _statistics(run: Pass, like_NC: Tensor) -> tuple[Tensor | None, Tensor]:
    rstd_N = like_NC.new_empty(len(like_NC), dtype=torch.float32)
    return torch.empty_like(rstd_N) if run.config.norm == "layernorm" else None, rstd_N


def join_forward(
    run: Pass, branch_NC: Tensor, residual_NC: Tensor | None, join: Join, *, in_place: bool = True
) -> Joined:
    """The join alone; r takes the branch's memory unless told otherwise."""
    config, shape, norm = run.config, run.shape, join.norm
    out = _results(run, branch_NC, branch_NC if in_place else torch.empty_like(branch_NC))
    norms.norm_forward_raw(
        branch_NC, norm.weight_C, norm.bias_C, out.h_NC, out.mean_N, out.rstd_N, eps=config.norm_eps, kind=config.norm,
        r_NC=out.r_NC, residual_NC=residual_NC, branch_bias_C=join.branch_bias_C,
        T=shape.T, p=shape.p, dropout=shape.dropout if shape.p > 0 else None, site=join.site,
    )  # fmt: skip
    return out


def norm_forward(run: Pass, r_NC: Tensor, norm: Norm) -> Joined:
    """The norm of a residual stream that a product has written."""
    config, out = run.config, _results(run, r_NC, r_NC)
    norms.norm_forward_raw(
        r_NC, norm.weight_C, norm.bias_C, out.h_NC, out.mean_N, out.rstd_N, eps=config.norm_eps, kind=config.norm
    )
    return out


def without_norm(run: Pass, joined: Joined) -> Joined:
    """What of a join's results is kept for the backward pass: on some plans not the norm, where it was made at all."""
    return joined if _keeps_norm(run, joined) else joined._replace(h_NC=joined.h_NC.new_empty(0))


def with_norm(run: Pass, kept: Joined, norm: Norm) -> Joined:
    """The results with a norm that was not kept made again."""
    return kept if _keeps_norm(run, kept) else kept._replace(h_NC=norm_forward(run, kept.r_NC, norm).h_NC)


def _keeps_norm(run: Pass, joined: Joined) -> bool:
    return run.plan.normalised or joined.folded is not None


def folded_norm(run: Pass, r_NC: Tensor, norm: Norm) -> tuple[Joined, FoldedNorm]:
    """What a norm will be that no kernel makes; the stream stands in the norm's place."""
    shares_SN2 = r_NC.new_empty(r_NC.shape[1] // SHARE, len(r_NC), 2, dtype=torch.float32)
    statistics = _statistics(run, r_NC)
    folded = FoldedNorm(run.config.norm, run.config.norm_eps, *norm, shares_SN2, *statistics)
    return Joined(r_NC, r_NC, *statistics, folded), folded


def rows_join(run: Pass, residual_NC: Tensor, join: Join) -> tuple[rows.Join, Joined]:
    """The join as a product's kernel takes it, and where its results will be."""
    out = _results(run, residual_NC, torch.empty_like(residual_NC))
    config, norm = run.config, join.norm
    return rows.Join(
        config.norm, config.norm_eps, norm.weight_C, norm.bias_C, join.branch_bias_C, residual_NC, *out[:4],
        _masks(run, join),
    ), out  # fmt: skip


def many_forward(run: Pass, x_NK: Tensor, weight_CK: Tensor, residual_NC: Tensor, join: Join) -> Joined:
    """The join of x Wᵀ for many rows."""
    fused, out = rows_join(run, residual_NC, join)
    many.project_many_forward_raw(x_NK, weight_CK, fused, normed=join.normed)
    return out


def many_backward(
    run: Pass, dy_NK: Tensor, weight_KC: Tensor, dresidual_NC: Tensor, joined: Joined, join: Join,
    grads: WeightGradients,
) -> Slopes:  # fmt: skip
    """Through dh = dy W and the join that made h, for many rows."""
    gradient, out = rows_slopes(run, dresidual_NC, joined, join, grads, many.blocks(len(dy_NK), dy_NK.device))
    many.project_many_backward_raw(dy_NK, weight_KC, gradient)
    rows_sums(gradient, join, grads)
    return out


def project_forward(run: Pass, x_NK: Tensor, weight_CK: Tensor, residual_NC: Tensor, join: Join) -> Joined:
    """The join of x Wᵀ: attention's output projection."""
    if "out" in run.choices.joined:
        return many_forward(run, x_NK, weight_CK, residual_NC, join)
    if "out" in run.choices.rows:
        fused, out = rows_join(run, residual_NC, join)
        rows.project_forward_raw(x_NK, weight_CK, fused)
        return out
    return product_join(run, x_NK, weight_CK, residual_NC, join, impl=run.choices.out)


def product_join(run: Pass, x_NK: Tensor, weight_CK: Tensor, residual_NC: Tensor, join: Join, *, impl: str) -> Joined:
    """The join of x Wᵀ behind that product or, with "residual", in part by it: the norm stands alone."""
    if impl != "residual":
        return join_forward(run, linear(x_NK, weight_CK, impl=impl), residual_NC, join)
    r_NC = torch.empty_like(residual_NC)
    joined, folded = folded_norm(run, r_NC, join.norm) if join.folded else (None, None)
    products.forward_raw(
        x_NK, weight_CK, r_NC,
        bias_M=join.branch_bias_C, residual_NM=residual_NC, masks=_masks(run, join),
        norm=folded, impl="cuda",
    )  # fmt: skip
    return joined or norm_forward(run, r_NC, join.norm)


def _masks(run: Pass, join: Join) -> Masks | None:
    shape = run.shape
    return Masks(shape.p, shape.dropout, join.site, shape.T) if shape.p > 0 and shape.dropout is not None else None


def _summed(join: Join, grads: WeightGradients) -> list[Tensor]:
    """The parameters whose gradients a join's backward kernel leaves as partial sums, in the order of its columns."""
    small = (join.norm.weight_C, join.norm.bias_C, grads.unsummed(join.branch_bias_C))
    return [weight for weight in small if weight is not None]


def _slopes(run: Pass, dr_NC: Tensor) -> Slopes:
    """Memory for the results, given dr's."""
    return Slopes(dr_NC, torch.empty_like(dr_NC) if run.shape.p > 0 else dr_NC)


def join_backward(
    run: Pass, dh_NC: Tensor, dresidual_NC: Tensor | None, joined: Joined, join: Join, grads: WeightGradients
) -> Slopes:
    """The gradients of `join_forward`; dr takes `dresidual_NC`'s memory unless a weight gradient may still read it."""
    (N, C), config, shape, norm = dh_NC.shape, run.config, run.shape, join.norm
    dr_NC = torch.empty_like(dh_NC) if dresidual_NC is None or grads.deferred else dresidual_NC
    small, out, dropped = _summed(join, grads), _slopes(run, dr_NC), shape.p > 0
    partials = dh_NC.new_empty(norms.partial_rows(N, C, dh_NC), len(small) * C, dtype=torch.float32)
    norms.norm_backward_raw(
        dh_NC, joined.r_NC, norm.weight_C, joined.mean_N, joined.rstd_N, partials, kind=config.norm,
        bias=norm.bias_C is not None, branch_bias=grads.unsummed(join.branch_bias_C) is not None,
        divided=joined.folded is not None, dresidual_NC=dresidual_NC, dr_NC=out.dr_NC,
        dbranch_NC=out.dbranch_NC if dropped else None,
        T=shape.T, p=shape.p, dropout=shape.dropout if dropped else None, site=join.site,
    )  # fmt: skip
    grads.sums(partials, small)
    return out


def rows_slopes(
    run: Pass, dresidual_NC: Tensor, joined: Joined, join: Join, grads: WeightGradients, partial_rows: int | None = None
) -> tuple[rows.JoinGradient, Slopes]:
    """The join's gradient as a product's kernel takes it, and where its results will be.

    `partial_rows`: of the kernel's partial sums, if it is not one of the MLP's.
    """
    (N, C), norm = joined.r_NC.shape, join.norm
    small, out = _summed(join, grads), _slopes(run, torch.empty_like(joined.r_NC))
    partial_rows = partial_rows or rows.partial_rows(N, rows.choose(N))
    partials_PW = joined.r_NC.new_empty(partial_rows, len(small) * C, dtype=torch.float32)
    gradient = rows.JoinGradient(
        run.config.norm, norm.weight_C, joined.r_NC, joined.mean_N, joined.rstd_N, dresidual_NC, out.dr_NC,
        out.dbranch_NC if run.shape.p > 0 else None, partials_PW, norm.bias_C is not None,
        grads.unsummed(join.branch_bias_C) is not None, _masks(run, join),
    )  # fmt: skip
    return gradient, out


def rows_sums(gradient: rows.JoinGradient, join: Join, grads: WeightGradients) -> None:
    """The parameters' gradients from what a product's kernel left."""
    grads.sums(gradient.partials_PW, _summed(join, grads))


def project_backward(
    run: Pass, dy_NK: Tensor, weight_KC: Tensor, dresidual_NC: Tensor, joined: Joined, join: Join,
    grads: WeightGradients,
) -> Slopes:  # fmt: skip
    """Through dh = dy W and the join that made h: the input gradient of the joint projection."""
    if "qkv" in run.choices.joined:
        return many_backward(run, dy_NK, weight_KC, dresidual_NC, joined, join, grads)
    if "qkv" not in run.choices.rows:
        dh_NC = input_gradient(dy_NK, weight_KC, impl=run.choices.rest)
        return join_backward(run, dh_NC, dresidual_NC, joined, join, grads)
    gradient, out = rows_slopes(run, dresidual_NC, joined, join, grads)
    rows.project_backward_raw(dy_NK, weight_KC, gradient)
    rows_sums(gradient, join, grads)
    return out
