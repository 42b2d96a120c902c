"""All blocks of a decoder as one autograd function over explicit block passes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.models.decoder import EMBEDDING_SITE, Block, Decoder, dropout_sites
from ridgeline.models.fused.attention import Shape
from ridgeline.models.fused.block import BlockWeights, block_backward, block_forward
from ridgeline.models.fused.choices import choose, settle
from ridgeline.models.fused.gradients import WeightGradients
from ridgeline.models.fused.joins import Join, Norm, Pass, join_backward, join_forward, without_norm
from ridgeline.models.fused.mlp import MlpWeights
from ridgeline.models.plan import fused_plan
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.early import early_launches
from ridgeline.ops.kept import Kept


def _norm(module: torch.nn.Module) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))  # type: ignore[arg-type]


def block_weights(block: Block) -> BlockWeights:
    """The weights of a reference block, under the names of the fused one."""
    a, m = block.attention, block.mlp
    return BlockWeights(
        _norm(block.norm_1), a.qkv.weight, a.qkv.bias, a.relative, a.out.weight, a.out.bias, _norm(block.norm_2),
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
    @staticmethod
    def forward(ctx: Any, run: Pass, x_NC: Tensor, *flat: Tensor | None) -> Tensor:
        blocks, final = _unflatten(flat)
        joins = _joins(blocks, final)
        with _launches(run):
            joined = join_forward(run, x_NC, None, joins[0], in_place=False)
            ctx.joined, ctx.saved = [joined], []
            for layer, weights in enumerate(blocks):
                saved, joined = block_forward(run, weights, joined, joins[layer + 1], dropout_sites(layer))
                ctx.joined[-1] = without_norm(run, ctx.joined[-1])
                ctx.joined.append(joined)
                ctx.saved.append(saved)
        ctx.run, ctx.flat, ctx.kept = run, flat, Kept(*flat, spends=True)
        return joined.h_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NC: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.demand()
        blocks, final = _unflatten(ctx.flat)
        joins, run = _joins(blocks, final), ctx.run
        grads = WeightGradients(dh_NC.device, run.choices)
        with _launches(run):
            behind = join_backward(run, dh_NC.contiguous(), None, ctx.joined.pop(), joins[-1], grads)
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
        return None, behind.dbranch_NC, *map(grads.take, ctx.flat)


def fused_stack(decoder: Decoder, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
    """Embedding dropout, blocks and final norm of `decoder` on x (B, T, C), positions already added."""
    B, T, C = x_BTC.shape
    config = decoder.config
    shape = Shape(B, T, config.dropout if decoder.training else 0.0, dropout)
    plan = fused_plan(decoder.impl)
    assert plan is not None
    run = Pass(config, shape, settle(choose(config, x_BTC.device, x_BTC.dtype, B, T), plan), plan)
    flat = _flatten([block_weights(block) for block in decoder.blocks], _norm(decoder.norm))  # type: ignore[arg-type]
    h_NC = _Stack.apply(run, x_BTC.reshape(B * T, C), *flat)
    return h_NC.view(B, T, C)
