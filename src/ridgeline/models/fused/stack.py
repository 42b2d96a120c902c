"""All blocks of a decoder as one autograd function over explicit block passes."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.models.decoder import EMBEDDING_SITE, Block, Decoder, dropout_sites
from ridgeline.models.fused.attention import Shape
from ridgeline.models.fused.block import BlockWeights, block_backward, block_forward
from ridgeline.models.fused.choices import choose, settle
from ridgeline.models.fused.gradients import WeightGradients
from ridgeline.models.fused.joins import Join, Joined, Norm, Pass, Slopes, join_backward, join_forward, without_norm
from ridgeline.models.fused.mlp import MlpWeights
from ridgeline.models.plan import fused_plan
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.early import early_launches
from ridgeline.ops.embedding import Normed
from ridgeline.ops.kept import Kept
from ridgeline.ops.mlp.head import Statistics


def norm_of(module: torch.nn.Module) -> Norm:
    """The weights of a norm."""
    return Norm(module.weight, getattr(module, "bias", None))  # type: ignore[arg-type]


def block_weights(block: Block) -> BlockWeights:
    """The weights of a reference block, under the names of the fused one."""
    a, m = block.attention, block.mlp
    return BlockWeights(
        norm_of(block.norm_1), a.qkv.weight, a.qkv.bias, a.relative, a.out.weight, a.out.bias, norm_of(block.norm_2),
        MlpWeights(m.up.weight, m.up.bias, m.down.weight, m.down.bias),
    )  # fmt: skip


def _flatten(weights: list[BlockWeights], final: Norm) -> list[Tensor | None]:
    flat: list[Tensor | None] = []
    for block in weights:
        for field in block:
            flat.extend((field,) if field is None or isinstance(field, Tensor) else field)
    return [*flat, *final]


WEIGHTS_OF_A_BLOCK = 13


def _unflatten(flat: tuple[Tensor | None, ...]) -> tuple[list[BlockWeights], Norm]:
    blocks = []
    for start in range(0, len(flat) - 2, WEIGHTS_OF_A_BLOCK):
        f: Any = flat[start : start + WEIGHTS_OF_A_BLOCK]
        blocks.append(BlockWeights(Norm(*f[:2]), *f[2:7], Norm(*f[7:9]), MlpWeights(*f[9:])))  # type: ignore[call-arg]
    final: Any = flat[-2:]
    return blocks, Norm(*final)


def _joins(blocks: list[BlockWeights], final: Norm) -> list[Join]:
    """The joins between blocks: before the first, after each."""
    biases = [None, *(block.mlp.down_bias_C for block in blocks)]
    norms = [*(block.norm_1 for block in blocks), final]
    sites = [EMBEDDING_SITE, *(dropout_sites(layer)[2] for layer in range(len(blocks)))]
    return [Join(*parameters) for parameters in zip(biases, norms, sites, strict=True)]


def _launches(run: Pass) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if run.choices.early else early_launches(False)


class _Stack(torch.autograd.Function):
    """Takes x or, as `first`, what the first join makes of it, too.

    Gives the final norm or, not `whole`, the stream that it is of, and its statistics, which have no gradient.
    """

    @staticmethod
    def forward(ctx: Any, run: Pass, whole: bool, first: Joined | None, x_NC: Tensor, *flat: Tensor | None) -> Any:
        blocks, final = _unflatten(flat)
        joins = _joins(blocks, final)
        joins[-1] = joins[-1]._replace(normed=whole)
        with _launches(run):
            joined = first or join_forward(run, x_NC, None, joins[0], in_place=False)
            ctx.joined, ctx.saved = [joined], []
            for layer, weights in enumerate(blocks):
                saved, joined = block_forward(run, weights, joined, joins[layer + 1], dropout_sites(layer))
                ctx.joined[-1] = without_norm(run, ctx.joined[-1])
                ctx.joined.append(joined)
                ctx.saved.append(saved)
        ctx.run, ctx.whole, ctx.flat, ctx.kept = run, whole, flat, Kept(*flat, spends=True)
        if whole:
            return joined.h_NC
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[part for part in (joined.mean_N, joined.rstd_N) if part is not None])
        return joined.r_NC, joined.mean_N, joined.rstd_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NC: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        ctx.kept.demand()
        blocks, final = _unflatten(ctx.flat)
        joins, run = _joins(blocks, final), ctx.run
        grads = WeightGradients(dout_NC.device, run.choices)
        with _launches(run):
            if ctx.whole:  # what the last join has kept is not held by name: a block's gradient needs the memory
                behind = join_backward(run, dout_NC.contiguous(), None, ctx.joined.pop(), joins[-1], grads)
            else:
                ctx.joined.pop()
                behind = Slopes(dout_NC, dout_NC)
            for layer in reversed(range(len(blocks))):
                behind = block_backward(
                    run,
                    blocks[layer],
                    ctx.joined.pop(),
                    ctx.saved.pop(),
                    behind,
                    joins[layer],
                    dropout_sites(layer),
                    grads,
                )
            grads.finish()
        return None, None, None, behind.dbranch_NC, *map(grads.take, ctx.flat)


def pass_of(decoder: Decoder, shape_BTC: tuple[int, ...], like: Tensor, dropout: DropoutState | None) -> Pass:
    """What holds for all blocks of `decoder` on (B, T, C) numbers of the dtype and on the device of `like`."""
    B, T = shape_BTC[:2]
    config, plan = decoder.config, fused_plan(decoder.impl)
    assert plan is not None
    shape = Shape(B, T, config.dropout if decoder.training else 0.0, dropout)
    return Pass(config, shape, settle(choose(config, like.device, like.dtype, B, T), plan), plan)


def _apply(run: Pass, whole: bool, decoder: Decoder, x_BTC: Tensor, first: Joined | None = None) -> Any:
    flat = _flatten([block_weights(block) for block in decoder.blocks], norm_of(decoder.norm))  # type: ignore[arg-type]
    return _Stack.apply(run, whole, first, x_BTC.flatten(0, 1), *flat)


def fused_stack(decoder: Decoder, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
    """Embedding dropout, blocks and final norm of `decoder` on x (B, T, C), positions already added."""
    return _apply(pass_of(decoder, x_BTC.shape, x_BTC, dropout), True, decoder, x_BTC).view_as(x_BTC)  # type: ignore[no-any-return]


class Stream(NamedTuple):
    """The residual stream behind the last block, differentiable, and its statistics, which are not."""

    r_NC: Tensor
    statistics: Statistics


def leaves_stream(run: Pass) -> bool:
    """Whether the stack can leave its ends to what makes the first norm and takes the final one, too.

    Then no join's backward pass masks the gradient or sums the last branch's.
    """
    return run.shape.p == 0 and run.choices.grouped


def fused_stream(run: Pass, decoder: Decoder, x: Normed) -> Stream:
    """`fused_stack` without the first norm, which x brings along, and the final one, where the pass `leaves_stream`."""
    first = Joined(x.x_BTC.detach().flatten(0, 1), x.h_NC, x.mean_N, x.rstd_N)
    r_NC, *statistics = _apply(run, False, decoder, x.x_BTC, first)
    return Stream(r_NC, Statistics(*statistics))
