"""Presets of Eric Gu's HAL, which plays Super Smash Bros. Melee by imitation.

Inputs of a frame: stage, both characters and both actions as embeddings, nine numbers a player, and the own previous
controller as one-hots. The recipe is the original's: AdamW at 3e-4 without warm-up, cosine to 1e-6 over 2²⁴ windows
of 256 frames in batches of 512, clip 1.0, dropout 0.2.
"""

from __future__ import annotations

from ridgeline.data.window import WindowSpec
from ridgeline.models import Category, DecoderConfig, Head, PolicyConfig
from ridgeline.optim import OptimizerConfig
from ridgeline.train.config import TrainConfig

NUMBERS = 18  # nine a player: percent, stock, facing, invulnerable, jumps, on ground, shield, x, y
RELATIVE_ROWS = 1024
WINDOWS = 2**24
BATCH = 512
TABLES = (7, 33, 400)  # stages, characters, actions: the game's raw ids
RELEASED_TABLES = (6, 27, 396)  # the released model's: only what its data set held
THREE_HEADS = (Head(name="c", classes=9), Head(name="main", classes=37), Head(name="buttons", classes=6))
FOUR_HEADS = (
    Head(name="shoulder", classes=3),
    Head(name="c", classes=9),
    Head(name="main", classes=37),
    Head(name="buttons", classes=5),
)


def hal_20m(*, shoulder: bool = False, tables: tuple[int, int, int] = TABLES) -> TrainConfig:
    """HAL, which plays Super Smash Bros. Melee: six layers of width 512, 19,845,065 parameters.

    With the released model's tables 19,844,861.

    Args:
        shoulder: the four-head form, where the analog shoulder is a head of its own and the buttons lack L and R:
            19,983,347 parameters with the released model's tables.
        tables: rows of the stage, character and action tables.
    """
    return _hal("hal-20m", layers=6, width=512, heads=8, stride=1, shoulder=shoulder, tables=tables)


def hal_5m() -> TrainConfig:
    """HAL's smaller model: half the width, every other frame. 5,309,641 parameters."""
    return _hal("hal-5m", layers=6, width=256, heads=4, stride=2, shoulder=False, tables=TABLES)


def _hal(
    name: str, *, layers: int, width: int, heads: int, stride: int, shoulder: bool, tables: tuple[int, int, int]
) -> TrainConfig:
    context = 256 // stride
    decoder = DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        positions="relative",
        position_table=RELATIVE_ROWS,
        dropout=0.2,
        context=context,
    )
    stages, characters, actions = tables
    model = PolicyConfig(
        decoder=decoder,
        heads=FOUR_HEADS if shoulder else THREE_HEADS,
        categories=(
            Category(name="stage", rows=stages, width=4),
            Category(name="character", rows=characters, width=12, columns=2),
            Category(name="action", rows=actions, width=32, columns=2),
        ),
        numbers=NUMBERS,
        previous=("main", "c", "buttons", "shoulder") if shoulder else ("main", "c", "buttons"),
    )
    return TrainConfig(
        preset=name,
        model=model,
        data="melee",
        window=WindowSpec(context=context, stride=stride),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=3e-4, floor=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip=1.0),
        steps=WINDOWS // BATCH,
        eval_interval=2**19 // BATCH,
        eval_windows=2**15,
        checkpoint_interval=2**19 // BATCH,
    )
