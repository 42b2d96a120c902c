"""A language model over tokens: characters, bytes or events."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.models.config import LanguageConfig
from ridgeline.models.decoder import Decoder, check_filled
from ridgeline.models.init import initialise
from ridgeline.ops.dropout import DropoutState

IGNORE = -100  # a target that does not count


class LanguageModel(nn.Module):
    """Token embedding, decoder, linear head without bias (optionally tied to the embedding)."""

    def __init__(self, config: LanguageConfig, *, impl: str = "torch", seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.decoder.width
        self.tokens = nn.Embedding(config.vocabulary, width)
        self.decoder = Decoder(config.decoder, impl=impl)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        initialise(self, config.decoder.layers, seed)

    def forward(self, tokens_BT: Tensor, dropout: DropoutState | None = None) -> Tensor:
        """Logits (B, T, V) of the next token at every position; `tokens_BT` is any integer dtype."""
        return self.head(self.decoder(self.tokens(tokens_BT.long()), dropout))

    def losses(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> dict[str, Tensor]:
        """Mean cross-entropy in nats a token, by name; targets of −100 do not count."""
        check_filled(batch)
        if self.decoder.fuses_ends:
            from ridgeline.models.fused.language import language_loss  # imports Triton

            return {"tokens": language_loss(self, batch, dropout)}
        with self.decoder.products():
            logits_BTV = self(batch["tokens"], dropout)
        targets_N = batch["targets"].long().flatten()
        return {"tokens": F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_N, ignore_index=IGNORE)}

    def loss(self, batch: dict[str, Tensor], dropout: DropoutState | None = None) -> Tensor:
        """The scalar to minimise for `batch` = {"tokens": int[B, T], "targets": int[B, T]}."""
        return self.losses(batch, dropout)["tokens"]
