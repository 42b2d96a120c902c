"""One Transformer block with an explicit forward and backward: what is saved and what is fused is decided here.

    qkv = h₁ Wqkvᵀ + b        o, lse = attention(qkv)        y = o Woutᵀ
    r₁, h₂ = join(r₀, y)      u = h₂ Wupᵀ                    a = gelu(u + b)      z = a Wdownᵀ
    r₂, h₃ = join(r₁, z)      with the next block's first norm, or the stack's last

`join` is one kernel (joins.py): r = residual + dropout(branch + bias), rounded to its storage, and h = norm(r). Its
backward is one kernel too: dr = dresidual + norm'(dh), dbranch = dropout'(dr), and partial column sums of the
parameters' gradients. A block's forward goes from one join's results to the next one's; its backward from behind the
later join (dr, dbranch) to behind the earlier one, so that a product can take either join into its kernel.

Saved a token, in elements of 2 bytes, for width C, joint projection Q and MLP width F:
    r₀ h₁ o r₁ h₂: 5 C      qkv: Q      gelu'(u) (or u) and a: 2 F      and fp32 statistics.
The plan "lean" makes h₁, h₂ and a again and saves 3 C + Q + F, "leanest" u too, by its product, and saves 3 C + Q. A
norm that is folded into the products beside it is never made, and h₂ not saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.models.fused.attention import ATTENTION, AttentionStep
from ridgeline.models.fused.gradients import WeightGradients
from ridgeline.models.fused.joins import (
    Join,
    Joined,
    Norm,
    Pass,
    Slopes,
    input_gradient,
    linear,
    project_backward,
    project_forward,
    with_norm,
    without_norm,
)
from ridgeline.models.fused.mlp import Hidden, MlpWeights, kept_hidden, mlp_backward, mlp_forward, whole_hidden


class BlockWeights(NamedTuple):
    """A block's weights in the order in which the stack's autograd function takes them."""

    norm_1: Norm
    qkv_QC: Tensor
    qkv_bias_Q: Tensor | None
    relative_RD: Tensor | None
    out_CM: Tensor
    out_bias_C: Tensor | None
    norm_2: Norm
    mlp: MlpWeights


class Saved(NamedTuple):
    """What a block's backward reads besides its input join, as far as the plan keeps it."""

    attention: AttentionStep
    middle: Joined
    hidden: Hidden | None


def block_forward(
    run: Pass, weights: BlockWeights, first: Joined, after: Join, sites: tuple[int, int, int]
) -> tuple[Saved, Joined]:
    """From the results of the join before a block to those of the join `after` it."""
    attention = ATTENTION[run.choices.attention](run.config, run.shape, sites[0])
    qkv_NQ = linear(first.h_NC, weights.qkv_QC, weights.qkv_bias_Q, impl=run.choices.qkv)
    mixed_NM = attention.forward(qkv_NQ, weights.relative_RD)
    between = Join(weights.out_bias_C, weights.norm_2, sites[1], run.choices.folded)
    middle = project_forward(run, mixed_NM, weights.out_CM, first.r_NC, between)
    hidden, last = mlp_forward(run, middle, weights.mlp, after)
    return Saved(attention, without_norm(run, middle), kept_hidden(run, hidden)), last


def block_backward(
    run: Pass,
    weights: BlockWeights,
    first: Joined,
    saved: Saved,
    behind: Slopes,
    before: Join,
    sites: tuple[int, int, int],
    grads: WeightGradients,
) -> Slopes:
    """From behind the join after a block to behind the join `before` it, with all gradients of the block's weights.

    The parameters of `before` are among them, but its branch's bias only where that is left as partial sums.
    """
    between = Join(weights.out_bias_C, weights.norm_2, sites[1])
    joined = with_norm(run, saved.middle, weights.norm_2)
    hidden = whole_hidden(run, saved.hidden, joined, weights.mlp)
    middle = mlp_backward(run, behind, joined, hidden, weights.mlp, between, grads)
    grads.product(weights.out_CM, middle.dbranch_NC, saved.attention.mixed_NM, weights.out_bias_C)
    wants_sums = grads.unsummed(weights.qkv_bias_Q) is not None
    dmixed_NM = input_gradient(middle.dbranch_NC, weights.out_CM, impl=run.choices.out)
    attention = saved.attention.backward(dmixed_NM, bias=wants_sums)
    grads.deliver(weights.relative_RD, attention.dtable_RD)
    first = with_norm(run, first, weights.norm_1)
    grads.product(weights.qkv_QC, attention.dqkv_NQ, first.h_NC, weights.qkv_bias_Q, attention.partials_PQ)
    return project_backward(run, attention.dqkv_NQ, weights.qkv_QC, middle.dr_NC, first, before, grads)
