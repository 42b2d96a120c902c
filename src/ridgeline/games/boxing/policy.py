"""The inputs and heads of a policy for Boxing, under any trunk."""

from __future__ import annotations

from ridgeline.games.boxing.actions import HEADS
from ridgeline.games.boxing.features import count
from ridgeline.models.config import Conditioning, DecoderConfig, Head, PolicyConfig


def policy_config(
    decoder: DecoderConfig, *, visible: bool = False, conditioning: Conditioning = "logits"
) -> PolicyConfig:
    """A policy that plays Boxing.

    Args:
        decoder: the trunk.
        visible: it sees only what the screen shows.
        conditioning: how the button hears of the direction; see PolicyConfig.
    """
    heads = tuple(Head(name=name, classes=classes) for name, classes in HEADS)
    return PolicyConfig(
        decoder=decoder,
        heads=heads,
        numbers=count(visible),
        previous=tuple(head.name for head in heads),
        conditioning=conditioning,
    )
