"""Small models and batches for the tests of the step engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine import FlatParameters, TrainStep
from ridgeline.models import Category, DecoderConfig, Head, LanguageConfig, PolicyConfig
from ridgeline.optim import OptimizerConfig

SETTINGS = OptimizerConfig(lr=1e-2, clip=0.5)
LANGUAGE = LanguageConfig(decoder=DecoderConfig(layers=1, width=16, heads=2, context=8, dropout=0.2), vocabulary=11)
POLICY = PolicyConfig(
    decoder=DecoderConfig(layers=1, width=16, heads=2, context=8, dropout=0.2, positions="relative"),
    heads=(Head(name="c", classes=3), Head(name="main", classes=5)),
    categories=(Category(name="stage", rows=4, width=3),),
    numbers=2,
    previous=("c", "main"),
)


def language_batch(seed: int = 0, batch: int = 4, context: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, 11, (batch, context + 1), generator=generator)
    return {"tokens": tokens_BS[:, :-1].contiguous(), "targets": tokens_BS[:, 1:].contiguous()}


def policy_batch(seed: int = 0, batch: int = 4, context: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def classes(*limits: int) -> Tensor:
        return torch.stack([torch.randint(0, n, (batch, context), generator=generator) for n in limits], -1)

    return {
        "categories": classes(4),
        "numbers": torch.randn(batch, context, 2, generator=generator),
        "previous": classes(3, 5),
        "targets": classes(3, 5),
    }


class Stranger(nn.Module):
    """A small GPT as people write it: one shared weight, a float buffer, a frozen table, the loss inside."""

    def __init__(self, vocabulary: int = 11, width: int = 16, context: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.wpe.weight.requires_grad_(False)
        self.register_buffer("bias", torch.tril(torch.ones(context, context)))
        self.ln, self.attn, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        q, k, v = self.attn(self.ln(x)).chunk(3, -1)
        scores = (q @ k.mT) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.bias[: idx.shape[1], : idx.shape[1]] == 0, float("-inf"))
        x = x + self.proj(scores.softmax(-1) @ v)
        logits = self.lm_head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stranger_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["tokens"], batch["targets"])[1]


def stranger() -> Stranger:
    torch.manual_seed(1)
    return Stranger()


def strange_step(**rest: Any) -> TrainStep:
    return TrainStep(stranger(), stranger_loss, SETTINGS, **{"precision": "fp32", **rest})


def gather(flat: FlatParameters, gradients: list[Tensor | None], *, add: bool = False) -> None:
    """A pass of the first lane whose gradients autograd gave."""
    flat.lanes[0].begin(add=add)
    flat.lanes[0].gather(gradients)
