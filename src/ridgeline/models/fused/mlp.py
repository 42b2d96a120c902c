"""The MLP inside a block with the joins on both sides: up, bias, GELU, down, and the derivative on the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.fused.gradients import WeightGradients
from ridgeline.models.fused.joins import (
    Join,
    Joined,
    Pass,
    Slopes,
    input_gradient,
    join_backward,
    many_backward,
    many_forward,
    product_join,
    rows_join,
    rows_slopes,
    rows_sums,
)
from ridgeline.ops.activation import triton as activation
from ridgeline.ops.linear import products
from ridgeline.ops.linear.folded import FoldedNorm
from ridgeline.ops.mlp import kernels as rows
from ridgeline.ops.mlp import many


class MlpWeights(NamedTuple):
    """Up and down, with their biases (None without)."""

    up_FC: Tensor
    up_bias_F: Tensor | None
    down_CF: Tensor
    down_bias_C: Tensor | None


class Hidden(NamedTuple):
    """What the MLP saves: GELU's derivative (under mlp "torch" GELU's input without the bias; in whole rows and in
    codes in an order of the kernel's own), and the activation.
    """

    kept_NF: Tensor
    a_NF: Tensor


def mlp_forward(run: Pass, middle: Joined, weights: MlpWeights, join: Join) -> tuple[Hidden, Joined]:
    """u = h Wupᵀ and a = gelu(u + b), then the join of a Wdownᵀ."""
    if "mlp" in run.choices.rows:
        hidden = Hidden(*rows.hidden(middle.h_NC, len(weights.up_FC)))
        fused, last = rows_join(run, middle.r_NC, join)
        rows.mlp_forward_raw(
            middle.h_NC, weights.up_FC, weights.up_bias_F, weights.down_CF, *hidden, fused, gelu=run.config.gelu
        )
        return hidden, last
    hidden = hidden_forward(run, middle, weights)
    if "down" in run.choices.joined:
        return hidden, many_forward(run, hidden.a_NF, weights.down_CF, middle.r_NC, join)
    return hidden, product_join(run, hidden.a_NF, weights.down_CF, middle.r_NC, join, impl=run.choices.rest)


def hidden_forward(run: Pass, middle: Joined, weights: MlpWeights) -> Hidden:
    """u = h Wupᵀ and a = gelu(u + b), where no kernel makes more than that."""
    h_NC, up_FC, gelu = middle.h_NC, weights.up_FC, run.config.gelu
    a_NF = h_NC.new_empty(len(h_NC), len(up_FC))
    if run.choices.mlp == "cuda":
        kept_NF = products.slope_empty(h_NC, *a_NF.shape, coded=run.choices.coded)
        products.forward_raw(
            h_NC, up_FC, a_NF,
            bias_M=weights.up_bias_F, gelu=gelu, slope_NM=kept_NF, norm=middle.folded, impl="cuda",
        )  # fmt: skip
    else:
        kept_NF = torch.empty_like(a_NF)
        torch.mm(h_NC, up_FC.t(), out=kept_NF)
        activation.bias_gelu_forward_raw(kept_NF, weights.up_bias_F, a_NF, kind=gelu)
    return Hidden(kept_NF, a_NF)


def kept_hidden(run: Pass, hidden: Hidden) -> Hidden | None:
    """What the plan keeps of it: all, GELU's input alone (see `settle`), or nothing."""
    if not run.plan.preactivation:
        return None
    return hidden if run.plan.activation else hidden._replace(a_NF=hidden.a_NF.new_empty(0))


def whole_hidden(run: Pass, kept: Hidden | None, middle: Joined, weights: MlpWeights) -> Hidden:
    """All of it again, from what was kept."""
    if kept is None:
        return hidden_forward(run, middle, weights)
    if run.plan.activation:
        return kept
    a_NF = torch.empty_like(kept.kept_NF)
    activation.bias_gelu_forward_raw(kept.kept_NF, weights.up_bias_F, a_NF, kind=run.config.gelu)
    return kept._replace(a_NF=a_NF)


def mlp_backward(
    run: Pass, behind: Slopes, middle: Joined, hidden: Hidden, weights: MlpWeights, join: Join, grads: WeightGradients
) -> Slopes:
    """From behind the join after the MLP to behind `join`, the one before it, with the weights' gradients."""
    wants_sums, before = grads.unsummed(weights.up_bias_F) is not None, None
    if "hidden" in run.choices.joined:
        du_NF, partials_PF, before = _many_backward(run, behind, middle, hidden, weights, join, grads)
    elif "mlp" in run.choices.rows:
        du_NF, partials_PF, before = _rows_backward(run, behind, middle, hidden, weights, join, grads, wants_sums)
    else:
        du_NF, partials_PF = _hidden_backward(run, behind.dbranch_NC, hidden, weights, middle.folded, wants_sums)
    grads.product(weights.down_CF, behind.dbranch_NC, hidden.a_NF, weights.down_bias_C)
    grads.product(weights.up_FC, du_NF, middle.h_NC, weights.up_bias_F, partials_PF, norm=middle.folded)
    if before is None and "up" in run.choices.joined:
        before = many_backward(run, du_NF, weights.up_FC, behind.dr_NC, middle, join, grads)
    elif before is None:
        dh_NC = input_gradient(du_NF, weights.up_FC, impl=run.choices.rest)
        before = join_backward(run, dh_NC, behind.dr_NC, middle, join, grads)
    return before


def _rows_backward(
    run: Pass, behind: Slopes, middle: Joined, hidden: Hidden, weights: MlpWeights, join: Join, grads: WeightGradients,
    sums: bool,
) -> tuple[Tensor, Tensor | None, Slopes]:  # fmt: skip
    """du, where wanted fp32 partial sums of it over its rows, and what lies behind `join`."""
    dz_NC, (N, F) = behind.dbranch_NC, hidden.a_NF.shape
    du_NF, partials_PF = torch.empty_like(hidden.a_NF), None
    if sums:
        partials_PF = dz_NC.new_empty(rows.inner_partial_rows(N), F, dtype=torch.float32)
    gradient, before = rows_slopes(run, behind.dr_NC, middle, join, grads)
    rows.mlp_backward_raw(dz_NC, weights.up_FC, weights.down_CF, hidden.kept_NF, du_NF, partials_PF, gradient)
    rows_sums(gradient, join, grads)
    return du_NF, partials_PF, before


def _many_backward(
    run: Pass, behind: Slopes, middle: Joined, hidden: Hidden, weights: MlpWeights, join: Join, grads: WeightGradients
) -> tuple[Tensor, Tensor | None, Slopes]:
    """The same for many rows, whose sums the weight gradients make."""
    du_NF = torch.empty_like(hidden.a_NF)
    partial_rows = many.mlp_partial_rows(len(du_NF), du_NF.device)
    gradient, before = rows_slopes(run, behind.dr_NC, middle, join, grads, partial_rows)
    many.mlp_many_backward_raw(behind.dbranch_NC, weights.down_CF, weights.up_FC, hidden.kept_NF, du_NF, gradient)
    rows_sums(gradient, join, grads)
    return du_NF, None, before


def _hidden_backward(
    run: Pass, dz_NC: Tensor, hidden: Hidden, weights: MlpWeights, norm: FoldedNorm | None, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """du = (dz Wdown) · gelu'(u + b), and where wanted fp32 partial sums of it over its rows.

    Behind a folded norm du / σ, with the sums that its weight's gradient needs.
    """
    kept_NF, bias_F, gelu = hidden.kept_NF, weights.up_bias_F, run.config.gelu
    du_NF = torch.empty_like(hidden.a_NF)
    if run.choices.mlp == "cuda":
        free = bias_F is not None and dz_NC.element_size() == 2  # the kernels for 16 bits leave sums in any case
        sums = sums or free or norm is not None
        return du_NF, products.input_gradient_raw(
            dz_NC, weights.down_CF, du_NF, slope_NK=kept_NF, norm=norm, sums=sums, impl="cuda"
        )
    torch.mm(dz_NC, weights.down_CF, out=du_NF)
    partials_PF = None
    if sums:
        partial_rows = activation.partial_rows(du_NF.shape[0], du_NF.shape[1], du_NF)
        partials_PF = du_NF.new_empty(partial_rows, du_NF.shape[1], dtype=torch.float32)
    activation.bias_gelu_backward_raw(du_NF, kept_NF, bias_F, du_NF, partials_PF, kind=gelu)
    return du_NF, partials_PF
