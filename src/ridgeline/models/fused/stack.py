"""All blocks of a decoder as one autograd function over explicit block passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.models.config import DecoderConfig
from ridgeline.models.decoder import EMBEDDING_SITE, Block, Decoder, dropout_sites
from ridgeline.models.fused.attention import Shape
from ridgeline.models.fused.block import (
    BlockWeights,
    Norm,
    block_backward,
    block_forward,
    join_backward,
    join_forward,
)
from ridgeline.models.fused.choices import Choices, choose
from ridgeline.models.fused.gradients import Side
from ridgeline.ops.dropout import DropoutState


def _norm(module: torch.nn.Module) -> Norm:
    return Norm(module.weight, getattr(module, "bias", None))  # type: ignore[arg-type]


def block_weights(block: Block) -> BlockWeights:
    """The weights of a reference block, under the names of the fused one."""
    a, m = block.attention, block.mlp
    return BlockWeights(
        _norm(block.norm_1), a.qkv.weight, a.qkv.bias, a.relative, a.out.weight, a.out.bias,
        _norm(block.norm_2), m.up.weight, m.up.bias, m.down.weight, m.down.bias,
    )  # fmt: skip


def _flatten(weights: list[BlockWeights], final: Norm) -> list[Tensor | None]:
    flat: list[Tensor | None] = []
    for block in weights:
        for field in block:
            flat.extend(field if isinstance(field, Norm) else (field,))
    return [*flat, *final]


BLOCK_FIELDS = (
    "norm_1.weight_C", "norm_1.bias_C", "qkv_QC", "qkv_bias_Q", "relative_RD", "out_CM", "out_bias_C",
    "norm_2.weight_C", "norm_2.bias_C", "up_FC", "up_bias_F", "down_CF", "down_bias_C",
)  # fmt: skip


def _unflatten(flat: tuple[Tensor | None, ...]) -> tuple[list[BlockWeights], Norm]:
    blocks, width = [], len(BLOCK_FIELDS)
    for start in range(0, len(flat) - 2, width):
        f: Any = flat[start : start + width]
        blocks.append(BlockWeights(Norm(*f[:2]), *f[2:7], Norm(*f[7:9]), *f[9:]))  # type: ignore[call-arg]
    final: Any = flat[-2:]
    return blocks, Norm(*final)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, config: DecoderConfig, shape: Shape, choices: Choices, x_NC: Tensor, *flat: Tensor | None
    ) -> Tensor:
        blocks, final = _unflatten(flat)
        joined = join_forward(config, shape, x_NC, None, None, blocks[0].norm_1, EMBEDDING_SITE, in_place=False)
        ctx.joins, ctx.saved = [joined], []
        for layer, weights in enumerate(blocks):
            last_norm = blocks[layer + 1].norm_1 if layer + 1 < len(blocks) else final
            saved, joined = block_forward(config, shape, choices, weights, joined, last_norm, dropout_sites(layer))
            ctx.joins.append(joined)
            ctx.saved.append(saved)
        ctx.config, ctx.shape, ctx.choices, ctx.flat = config, shape, choices, flat
        return joined.h_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NC: Tensor) -> tuple[Tensor | None, ...]:
        config, shape, choices = ctx.config, ctx.shape, ctx.choices
        blocks, final = _unflatten(ctx.flat)
        norms = [*(block.norm_1 for block in blocks), final]
        grads: list[dict[str, Tensor | None]] = [{} for _ in norms]
        dh_NC, dresidual_NC = dh_NC.contiguous(), None
        side = Side(dh_NC.device, apart=choices.side_stream)
        for index in range(len(blocks), 0, -1):
            layer, weights = index - 1, blocks[index - 1]
            sites = dropout_sites(layer)
            joined = join_backward(
                config, shape, dh_NC, dresidual_NC, ctx.joins[index], norms[index],
                weights.down_bias_C, sites[2], side,
            )  # fmt: skip
            grads[index] |= {"norm_1.weight_C": joined.dweight_C, "norm_1.bias_C": joined.dbias_C}
            grads[layer]["down_bias_C"] = joined.dbranch_bias_C
            dh_NC, dresidual_NC, mine = block_backward(
                config, shape, choices, weights, ctx.joins[layer], ctx.saved[layer],
                joined.dbranch_NC, joined.dr_NC, sites, side,
            )  # fmt: skip
            grads[layer] |= mine
            ctx.saved[layer] = ctx.joins[index] = None  # freed: no earlier layer reads them
        joined = join_backward(config, shape, dh_NC, dresidual_NC, ctx.joins[0], norms[0], None, EMBEDDING_SITE, side)
        side.join()
        grads[0] |= {"norm_1.weight_C": joined.dweight_C, "norm_1.bias_C": joined.dbias_C}
        flat = [by_field.get(name) for by_field in grads[:-1] for name in BLOCK_FIELDS]
        flat += [grads[-1][name] for name in BLOCK_FIELDS[:2]]
        return None, None, None, joined.dbranch_NC, *flat


def fused_stack(decoder: Decoder, x_BTC: Tensor, dropout: DropoutState | None) -> Tensor:
    """Embedding dropout, blocks and final norm of `decoder` on x (B, T, C), positions already added."""
    B, T, C = x_BTC.shape
    config = decoder.config
    shape = Shape(B, T, config.dropout if decoder.training else 0.0, dropout)
    choices = choose(config, x_BTC.device, x_BTC.dtype, B, T)
    flat = _flatten([block_weights(block) for block in decoder.blocks], _norm(decoder.norm))  # type: ignore[arg-type]
    h_NC = _Stack.apply(config, shape, choices, x_BTC.reshape(B * T, C), *flat)
    return h_NC.view(B, T, C)
