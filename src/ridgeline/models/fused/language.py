"""Both ends of a language model: embedding with positions, and the head's loss without a logits tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.models.fused.joins import Norm, Pass
from ridgeline.models.fused.stack import fused_stream, leaves_stream, norm_of, pass_of
from ridgeline.models.plan import fused_plan
from ridgeline.ops.cross_entropy import linear_cross_entropy
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.embedding import NormOf, embedding, embedding_norm
from ridgeline.ops.mlp import head

if TYPE_CHECKING:
    from ridgeline.models.language import LanguageModel


def language_loss(model: LanguageModel, batch: dict[str, Tensor], dropout: DropoutState | None) -> Tensor:
    """The loss of `LanguageModel.losses`, by fused kernels."""
    decoder, table_VC = model.decoder, model.tokens.weight
    tokens_BT, targets_N = batch["tokens"].long(), batch["targets"].long().flatten()
    decoder.check_length(tokens_BT.shape[-1])
    run = None if fused_plan(decoder.impl) is None else pass_of(decoder, tokens_BT.shape, table_VC, dropout)
    last = norm_of(decoder.norm)  # type: ignore[arg-type]
    if run is not None and _leaves_ends(run, model.head.weight, last):
        decoder.check_kernels(table_VC, dropout)
        first = norm_of(decoder.blocks[0].norm_1)  # type: ignore[arg-type]
        x = embedding_norm(tokens_BT, table_VC, decoder.positions, NormOf(*first, run.config.norm_eps, run.config.norm))
        stream, norm = fused_stream(run, decoder, x), head.FinalNorm(*last, run.config.norm)
        return head.norm_head_loss(*stream, norm, model.head.weight, targets_N)
    x_BTC = embedding(tokens_BT, table_VC, decoder.positions, impl="triton")
    h_BTC = decoder.transform(x_BTC, dropout)
    return linear_cross_entropy(h_BTC.flatten(0, 1), model.head.weight, None, targets_N, impl="triton")


def _leaves_ends(run: Pass, weight_VC: Tensor, last: Norm) -> bool:
    """Whether kernels of both ends take the norms there, the last one with all gradients."""
    alike = all(weight is None or weight.dtype == weight_VC.dtype for weight in last)
    wanted = torch.is_grad_enabled() and leaves_stream(run) and alike
    return wanted and head.missing(weight_VC.device, weight_VC.dtype, weight_VC.shape[1], len(weight_VC)) is None
