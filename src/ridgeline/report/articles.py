"""What the two articles published, to stand beside one's own measurements. Nothing here is compared by a ratio of
speeds across cards: only gains from one rung to the next are, each taken on one card.

Sources: "Decoder-Only Transformer Optimization 101" (September 2026; RTX 6000 Pro, bf16, 131,072 positions a step) and
"FastTransformer: Breaking the Compiler Ceiling via Architectural Co-Design" (Tesla T4, fp32, 8,192 positions a step).
"""

from __future__ import annotations

from dataclasses import dataclass

LADDER_CARD = "RTX 6000 Pro"


@dataclass(frozen=True, kw_only=True)
class ArticleRung:
    """A rung as published.

    Attributes:
        tokens_per_s: positions a second.
        forward_ms, backward_ms: kernel milliseconds a layer; None where the article has none.
    """

    tokens_per_s: int
    forward_ms: float | None = None
    backward_ms: float | None = None


LADDER = {
    "m0": ArticleRung(tokens_per_s=163_645, forward_ms=40.48, backward_ms=50.35),
    "m1": ArticleRung(tokens_per_s=207_146, forward_ms=31.66, backward_ms=39.23),
    "m2": ArticleRung(tokens_per_s=445_372, forward_ms=10.68, backward_ms=19.84),
    "m3": ArticleRung(tokens_per_s=660_540, forward_ms=10.57, backward_ms=19.91),
    "r16": ArticleRung(tokens_per_s=1_125_109, forward_ms=6.40, backward_ms=19.01),
}

LADDER_STEPS = tuple(zip(tuple(LADDER)[:-1], tuple(LADDER)[1:], strict=True))
"""Pairs of a rung and the next."""


def gain(lower: str, upper: str) -> float:
    """How many times faster the article's `upper` rung is than its `lower` one."""
    return LADDER[upper].tokens_per_s / LADDER[lower].tokens_per_s


SECOND = {
    ("gpt2-c256", 32, 256): "The second article, on a Tesla T4 in fp32: eager 125.2 ms, its own CUDA engine 107.2, "
    "torch.compile 101.3, so 1.17 and 1.24 times as fast as eager; sessions of its own differed by 13 %.",
    (
        "fast-c256",
        32,
        256,
    ): "The second article, on a Tesla T4 in fp32: 70.6 ms under torch.compile, 1.44 times as fast "
    "as its GPT-2 (the article says 1.445 over a baseline of another session).",
}
"""What the second article published of a workload (name, batch, context)."""
