"""All blocks of a decoder on a rung, as one autograd function with an explicit forward and backward.

A buffer is given back (`done`) as soon as the last kernel that reads it has been launched. What leaves the function,
its output and its input's gradient, is not one of those buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.models.decoder import EMBEDDING_SITE, Decoder, dropout_sites
from ridgeline.models.fused.attention import Shape
from ridgeline.models.fused.block import BlockWeights
from ridgeline.models.fused.joins import Join, Joined, Norm, Slopes
from ridgeline.models.fused.stack import block_weights
from ridgeline.models.rungs import joins
from ridgeline.models.rungs.attention import ATTENTION, MaterialisedAttention, SweptAttention
from ridgeline.models.rungs.joins import Hidden
from ridgeline.models.rungs.ladder import find_rung
from ridgeline.models.rungs.products import bias_gradient, input_gradient, project, weight_gradient
from ridgeline.models.rungs.run import Run, run_of
from ridgeline.ops._triton.support import triton_missing
from ridgeline.ops.attention.api import TRITON_WIDTHS
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.kept import Kept


class Saved(NamedTuple):
    """What a block's backward reads besides its input stream."""

    attention: SweptAttention | MaterialisedAttention
    mixed_NM: Tensor
    middle: Joined
    hidden: Hidden


class Layer(NamedTuple):
    """A block's weights, and the joins between its branches and behind it."""

    weights: BlockWeights
    site: int
    middle: Join
    after: Join


def block_forward(run: Run, layer: Layer, first: Joined, *, leaves: bool) -> tuple[Saved, Joined]:
    """From a block's input stream to the next one's, whose norm leaves the pass behind the last block."""
    weights, mlp = layer.weights, layer.weights.mlp
    attention = ATTENTION[run.rung.attention](run, layer.site)
    qkv_NQ = project(run, "qkv", first.h_NC, weights.qkv_QC, weights.qkv_bias_Q)
    mixed_NM = attention.forward(qkv_NQ, weights.relative_RD)
    middle = joins.branch(run, "out", mixed_NM, weights.out_CM, first.r_NC, layer.middle)
    hidden = joins.hidden(run, middle.h_NC, mlp)
    last = joins.branch(run, "mlp_down", hidden.a_NF, mlp.down_CF, middle.r_NC, layer.after, leaves=leaves)
    return Saved(attention, mixed_NM, middle, hidden), last


def block_backward(run: Run, layer: Layer, first: Joined, saved: Saved, slopes: Slopes) -> tuple[Tensor, Tensor]:
    """From the gradients behind a block to those of its first norm's output and of the stream before it.

    Spends what it is given and all that was kept, but for the input stream's r.
    """
    weights, mlp, done = layer.weights, layer.weights.mlp, run.buffers.done
    weight_gradient(run, "mlp_down", mlp.down_CF, slopes.dbranch_NC, saved.hidden.a_NF)
    done(saved.hidden.a_NF)
    du_NF = joins.hidden_backward(run, slopes.dbranch_NC, saved.middle.h_NC, saved.hidden.u_NF, mlp)
    done(_apart(slopes))
    weight_gradient(run, "mlp_up", mlp.up_FC, du_NF, saved.middle.h_NC)
    dh_NC = input_gradient(run, "mlp_up", du_NF, mlp.up_FC)
    done(du_NF, saved.middle.h_NC)
    inner = joins.backward(run, saved.middle, layer.middle, dh_NC, slopes.dr_NC)
    done(dh_NC, slopes.dr_NC)
    weight_gradient(run, "out", weights.out_CM, inner.dbranch_NC, saved.mixed_NM)
    dmixed_NM = input_gradient(run, "out", inner.dbranch_NC, weights.out_CM)
    done(_apart(inner))
    dqkv_NQ = saved.attention.backward(dmixed_NM)
    done(dmixed_NM, saved.mixed_NM)
    weight_gradient(run, "qkv", weights.qkv_QC, dqkv_NQ, first.h_NC)
    bias_gradient(run, weights.qkv_bias_Q, dqkv_NQ)
    dh_NC = input_gradient(run, "qkv", dqkv_NQ, weights.qkv_QC)
    done(dqkv_NQ, first.h_NC)
    return dh_NC, inner.dr_NC


def _apart(slopes: Slopes) -> Tensor | None:
    """The branch's gradient where it is a tensor of its own."""
    return None if slopes.dbranch_NC is slopes.dr_NC else slopes.dbranch_NC


class Stack(NamedTuple):
    """The blocks with their joins, and the join before the first."""

    before: Join
    layers: list[Layer]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, stack: Stack, x_NC: Tensor, *weights: Tensor) -> Tensor:
        streams, saved = [joins.begin(run, x_NC, stack.before)], []
        for layer in stack.layers:
            kept, stream = block_forward(run, layer, streams[-1], leaves=layer is stack.layers[-1])
            streams.append(stream)
            saved.append(kept)
        ctx.run, ctx.stack, ctx.streams, ctx.saved, ctx.weights = run, stack, streams, saved, weights
        ctx.kept = Kept(*weights, spends=True)
        return streams[-1].h_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NC: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.demand()
        run, stack, streams, saved = ctx.run, ctx.stack, ctx.streams, ctx.saved
        slopes = joins.backward(run, streams.pop(), stack.layers[-1].after, dh_NC.contiguous(), None)
        for place in range(len(stack.layers) - 1, -1, -1):
            join = stack.layers[place - 1].after if place > 0 else stack.before
            dh_NC, dr_NC = block_backward(run, stack.layers[place], streams[-1], saved.pop(), slopes)
            slopes = joins.backward(run, streams.pop(), join, dh_NC, dr_NC, leaves=place == 0)
            run.buffers.done(dh_NC, dr_NC)
        if slopes.dbranch_NC is not slopes.dr_NC:
            run.buffers.done(slopes.dr_NC)
        return None, None, slopes.dbranch_NC, *(run.gradients.get(id(weight)) for weight in ctx.weights)


def _stack_of(decoder: Decoder) -> Stack:
    blocks = [block_weights(block) for block in decoder.blocks]  # type: ignore[arg-type]
    final = Norm(decoder.norm.weight, getattr(decoder.norm, "bias", None))  # type: ignore[arg-type]
    layers = []
    for number, (weights, norm) in enumerate(zip(blocks, [*(w.norm_1 for w in blocks[1:]), final], strict=True)):
        attention, out, mlp = dropout_sites(number)
        middle = Join(weights.out_bias_C, weights.norm_2, out)
        layers.append(Layer(weights, attention, middle, Join(weights.mlp.down_bias_C, norm, mlp)))
    return Stack(Join(None, blocks[0].norm_1, EMBEDDING_SITE), layers)


def rung_stack(decoder: Decoder, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
    """Embedding dropout, blocks and final norm of `decoder` on x (B, T, C), positions already added.

    Raises:
        UnsupportedError: Triton, or a tile of this head width, cannot run here.
    """
    B, T, C = x_BTC.shape
    config, rung = decoder.config, find_rung(decoder.impl)
    reason = triton_missing(x_BTC.device)
    if reason is None and rung.attention != "materialised" and config.head_dim not in TRITON_WIDTHS:
        reason = f"attention in tiles takes head widths {TRITON_WIDTHS}, got {config.head_dim}"
    if reason is not None:
        raise UnsupportedError(f"impl={decoder.impl!r} cannot run: {reason}")
    shape = Shape(B, T, config.dropout if decoder.training else 0.0, dropout)
    run = run_of(decoder, config, rung, shape, x_BTC.device)
    weights = [*decoder.blocks.parameters(), *decoder.norm.parameters()]
    return _Stack.apply(run, _stack_of(decoder), x_BTC.reshape(B * T, C), *weights).view(B, T, C)
