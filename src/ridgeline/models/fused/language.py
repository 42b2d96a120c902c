"""Both ends of a language model: embedding with positions, and the head's loss without a logits tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.models.fused.choices import MANY_TOKENS
from ridgeline.models.fused.joins import Pass
from ridgeline.models.fused.stack import fused_stream, leaves_stream, norm_of, pass_of
from ridgeline.models.plan import fused_plan
from ridgeline.ops.cross_entropy import linear_cross_entropy
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.embedding import embedding
from ridgeline.ops.mlp import head

if TYPE_CHECKING:
    from ridgeline.models.language import LanguageModel


def language_loss(model: LanguageModel, batch: dict[str, Tensor], dropout: DropoutState | None) -> Tensor:
    """The loss of `LanguageModel.losses`, by fused kernels."""
    decoder = model.decoder
    decoder.check_length(batch["tokens"].shape[-1])
    x_BTC = embedding(batch["tokens"].long(), model.tokens.weight, decoder.positions, impl="triton")
    targets_N = batch["targets"].long().flatten()
    run = None if fused_plan(decoder.impl) is None else pass_of(decoder, x_BTC, dropout)
    if run is not None and _takes_stream(run, x_BTC, model.head.weight):
        stream = fused_stream(run, decoder, x_BTC)
        norm = head.FinalNorm(*norm_of(decoder.norm), decoder.config.norm)  # type: ignore[arg-type]
        return head.norm_head_loss(stream.r_NC, stream.statistics, norm, model.head.weight, targets_N)
    h_BTC = decoder.transform(x_BTC, dropout)
    return linear_cross_entropy(h_BTC.flatten(0, 1), model.head.weight, None, targets_N, impl="triton")


def _takes_stream(run: Pass, x_BTC: Tensor, weight_VC: Tensor) -> bool:
    """Whether the last norm, the head and the loss are one kernel's, with their gradients."""
    (B, T, C), V = x_BTC.shape, len(weight_VC)
    wanted = torch.is_grad_enabled() and B * T > MANY_TOKENS and leaves_stream(run)
    return wanted and head.missing(x_BTC.device, x_BTC.dtype, C, V) is None
