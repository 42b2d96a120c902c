"""One Transformer block with an explicit forward and backward: what is saved and what is fused is decided here.

    qkv = h₁ Wqkvᵀ + b        o, lse = attention(qkv)        y = o Woutᵀ
    r₁, h₂ = join(r₀, y)      u = h₂ Wupᵀ                    a = gelu(u + b)      z = a Wdownᵀ
    r₂, h₃ = join(r₁, z)      with the next block's first norm, or the stack's last

`join` is one kernel: r = residual + dropout(branch + bias), rounded to its storage, and h = norm(r). Its backward is
one kernel too: dr = dresidual + norm'(dh), dbranch = dropout'(dr), and the column sums of the scale's, the shift's
and the branch bias's gradients. A block hands on (r, h); it takes back dh and the gradient along the residual.

Saved a token, in elements of 2 bytes, for width C, joint projection Q and MLP width F:
    r₀ h₁ o r₁ h₂: 5 C      qkv: Q      u a: 2 F (F when a is recomputed)      and fp32 statistics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.config import DecoderConfig
from ridgeline.models.fused.attention import ATTENTION, AttentionStep, Shape
from ridgeline.models.fused.choices import Choices
from ridgeline.models.fused.gradients import Side, column_gradients, deliver, matrix_gradient
from ridgeline.models.fused.mlp import Hidden, hidden_backward, hidden_forward
from ridgeline.ops.norm import triton as norm


class Norm(NamedTuple):
    """A norm's weights: scale, and shift where it has one."""

    weight_C: Tensor
    bias_C: Tensor | None


class BlockWeights(NamedTuple):
    """A block's weights in the order in which the stack's autograd function takes them."""

    norm_1: Norm
    qkv_QC: Tensor
    qkv_bias_Q: Tensor | None
    relative_RD: Tensor | None
    out_CM: Tensor
    out_bias_C: Tensor | None
    norm_2: Norm
    up_FC: Tensor
    up_bias_F: Tensor | None
    down_CF: Tensor
    down_bias_C: Tensor | None


class Joined(NamedTuple):
    """A join's results: the residual stream, its norm, and the norm's statistics."""

    r_NC: Tensor
    h_NC: Tensor
    mean_N: Tensor | None
    rstd_N: Tensor


class Saved(NamedTuple):
    """What a block's backward reads besides its input join."""

    attention: AttentionStep
    middle: Joined
    hidden: Hidden


class JoinGradients(NamedTuple):
    """A join's gradients: along the residual, into the branch; of its scale, its shift and the branch's bias."""

    dr_NC: Tensor
    dbranch_NC: Tensor
    dweight_C: Tensor | None
    dbias_C: Tensor | None
    dbranch_bias_C: Tensor | None


def join_forward(
    config: DecoderConfig,
    shape: Shape,
    branch_NC: Tensor,
    residual_NC: Tensor | None,
    branch_bias_C: Tensor | None,
    weights: Norm,
    site: int,
    *,
    in_place: bool = True,
) -> Joined:
    """r = residual + dropout(branch + bias), in the branch's memory unless told otherwise; h = norm(r)."""
    r_NC = branch_NC if in_place else torch.empty_like(branch_NC)
    h_NC, rstd_N = torch.empty_like(branch_NC), branch_NC.new_empty(shape.N, dtype=torch.float32)
    mean_N = torch.empty_like(rstd_N) if config.norm == "layernorm" else None
    norm.norm_forward_raw(
        branch_NC, weights.weight_C, weights.bias_C, h_NC, mean_N, rstd_N, eps=config.norm_eps, kind=config.norm,
        r_NC=r_NC, residual_NC=residual_NC, branch_bias_C=branch_bias_C,
        T=shape.T, p=shape.p, dropout=shape.dropout if shape.p > 0 else None, site=site,
    )  # fmt: skip
    return Joined(r_NC, h_NC, mean_N, rstd_N)


def join_backward(
    config: DecoderConfig,
    shape: Shape,
    dh_NC: Tensor,
    dresidual_NC: Tensor | None,
    joined: Joined,
    weights: Norm,
    branch_bias_C: Tensor | None,
    site: int,
    side: Side,
) -> JoinGradients:
    """The gradients of `join_forward`; dr takes `dresidual_NC`'s memory unless the side may still be reading it."""
    N, C = dh_NC.shape
    small = [w for w in (weights.weight_C, weights.bias_C, branch_bias_C) if w is not None]
    partials = dh_NC.new_empty(norm.partial_rows(N, C, dh_NC), len(small) * C, dtype=torch.float32)
    dropped = shape.p > 0
    dr_NC = torch.empty_like(dh_NC) if dresidual_NC is None or side.apart else dresidual_NC
    dbranch_NC = torch.empty_like(dh_NC) if dropped else dr_NC
    norm.norm_backward_raw(
        dh_NC, joined.r_NC, weights.weight_C, joined.mean_N, joined.rstd_N, partials, kind=config.norm,
        bias=weights.bias_C is not None, branch_bias=branch_bias_C is not None, dresidual_NC=dresidual_NC, dr_NC=dr_NC,
        dbranch_NC=dbranch_NC if dropped else None, T=shape.T, p=shape.p,
        dropout=shape.dropout if dropped else None, site=site,
    )  # fmt: skip
    grads = side.run(column_gradients, partials, small)
    dweight_C = grads.pop(0)
    dbias_C = grads.pop(0) if weights.bias_C is not None else None
    return JoinGradients(dr_NC, dbranch_NC, dweight_C, dbias_C, grads[0] if branch_bias_C is not None else None)


def linear(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, by the vendor's GEMM."""
    return torch.nn.functional.linear(x_NK, weight_MK, bias_M)


def block_forward(
    config: DecoderConfig,
    shape: Shape,
    choices: Choices,
    weights: BlockWeights,
    first: Joined,
    last_norm: Norm,
    sites: tuple[int, int, int],
) -> tuple[Saved, Joined]:
    """From a block's input join to the next one's."""
    qkv_NQ = linear(first.h_NC, weights.qkv_QC, weights.qkv_bias_Q)
    attention = ATTENTION[choices.attention](config, shape, sites[0])
    mixed_NM = attention.forward(qkv_NQ, weights.relative_RD)
    branch_NC = linear(mixed_NM, weights.out_CM)
    middle = join_forward(config, shape, branch_NC, first.r_NC, weights.out_bias_C, weights.norm_2, sites[1])
    hidden = hidden_forward(middle.h_NC, weights.up_FC, weights.up_bias_F, config.gelu, choices.mlp)
    branch_NC = linear(hidden.a_NF, weights.down_CF)
    last = join_forward(config, shape, branch_NC, middle.r_NC, weights.down_bias_C, last_norm, sites[2])
    return Saved(attention, middle, hidden), last


def block_backward(
    config: DecoderConfig,
    shape: Shape,
    choices: Choices,
    weights: BlockWeights,
    first: Joined,
    saved: Saved,
    dbranch_NC: Tensor,
    dresidual_NC: Tensor,
    sites: tuple[int, int, int],
    side: Side,
) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """From the gradients of the MLP's output and of r₁ to those of h₁ and r₀, and the weights' by field.

    The gradients of `norm_1` and of `down_bias_C` belong to the joins at the block's ends; the stack has them.
    """
    grads: dict[str, Tensor | None] = {
        "down_CF": side.run(matrix_gradient, weights.down_CF, dbranch_NC, saved.hidden.a_NF)
    }
    du_NF, grads["up_bias_F"] = hidden_backward(
        dbranch_NC, weights.down_CF, saved.hidden, weights.up_bias_F, config.gelu, choices.mlp, side
    )
    grads["up_FC"] = side.run(matrix_gradient, weights.up_FC, du_NF, saved.middle.h_NC)
    joined = join_backward(
        config, shape, du_NF @ weights.up_FC, dresidual_NC, saved.middle, weights.norm_2,
        weights.out_bias_C, sites[1], side,
    )  # fmt: skip
    grads |= {"norm_2.weight_C": joined.dweight_C, "norm_2.bias_C": joined.dbias_C, "out_bias_C": joined.dbranch_bias_C}
    grads["out_CM"] = side.run(matrix_gradient, weights.out_CM, joined.dbranch_NC, saved.attention.mixed_NM)
    attention = saved.attention.backward(joined.dbranch_NC @ weights.out_CM, bias=weights.qkv_bias_Q is not None)
    grads["relative_RD"] = side.run(deliver, weights.relative_RD, attention.dtable_RD)
    grads["qkv_QC"] = side.run(matrix_gradient, weights.qkv_QC, attention.dqkv_NQ, first.h_NC)
    if weights.qkv_bias_Q is not None:
        grads["qkv_bias_Q"] = side.run(column_gradients, attention.partials_PQ, [weights.qkv_bias_Q])[0]
    return attention.dqkv_NQ @ weights.qkv_QC, joined.dr_NC, grads
