"""Presets of the embedded game."""

from __future__ import annotations

import dataclasses

from ridgeline.data.window import WindowSpec
from ridgeline.games.boxing.policy import policy_config
from ridgeline.models import DecoderConfig
from ridgeline.optim import OptimizerConfig
from ridgeline.train.config import TrainConfig

CONTEXT = 16  # decisions: about a second of the game


def boxing() -> TrainConfig:
    """A small policy for Boxing that three minutes on two CPU cores train to win."""
    decoder = DecoderConfig(
        layers=2, width=128, heads=4, gelu="tanh", positions="relative", dropout=0.1, context=CONTEXT
    )
    return TrainConfig(
        preset="boxing",
        model=policy_config(decoder),
        data="boxing",
        window=WindowSpec(context=CONTEXT),
        batch=32,
        optimizer=OptimizerConfig(lr=2e-3, floor=2e-5, warmup=100, betas=(0.9, 0.99), weight_decay=0.05),
        minutes=3.0,
        eval_interval=1000,
        checkpoint_interval=1000,
    )


def boxing_fast() -> TrainConfig:
    """`boxing` trained by Muon: in 1,600 steps about as strong as `boxing` after 5,600.

    Over three seeds Muon's held-out loss is 0.12 nats below AdamW's after 800 steps of 32 windows.
    """
    plain = boxing()
    return dataclasses.replace(
        plain,
        preset="boxing-fast",
        optimizer=dataclasses.replace(plain.optimizer, algorithm="muon"),
        minutes=None,
        steps=1600,
        eval_interval=400,
        checkpoint_interval=400,
    )
