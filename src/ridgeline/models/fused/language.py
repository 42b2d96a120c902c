"""Both ends of a language model: embedding with positions, and the head's loss without a logits tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ridgeline.ops.cross_entropy import linear_cross_entropy
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.embedding import embedding

if TYPE_CHECKING:
    from ridgeline.models.language import LanguageModel


def language_loss(model: LanguageModel, batch: dict[str, Tensor], dropout: DropoutState | None) -> Tensor:
    """The loss of `LanguageModel.losses`, by fused kernels."""
    decoder = model.decoder
    decoder.check_length(batch["tokens"].shape[-1])
    x_BTC = embedding(batch["tokens"].long(), model.tokens.weight, decoder.positions, impl="triton")
    h_BTC = decoder.transform(x_BTC, dropout)
    targets_N = batch["targets"].long().flatten()
    return linear_cross_entropy(h_BTC.flatten(0, 1), model.head.weight, None, targets_N, impl="triton")
