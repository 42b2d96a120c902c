"""Small data whose every value tells where it comes from."""

import numpy as np

from ridgeline.data import games, shards, text
from ridgeline.games.table import GameTable

HEADS = (("low", 251), ("high", 4), ("game", 64))
GROUPS = (("game", 64, 1), ("frame", 1000, 1))


def make_text(folder, length=1000, seed=0):
    content = np.random.default_rng(seed).integers(97, 123, length).astype(np.uint8)
    return text.open_text(shards.read(text.write(folder, content, "bytes", name="letters", source="random")))


def make_table(game, frames):
    """Every row holds its game and frame; the controller at t is the target at t − 1, as in a recorded game."""
    frame = np.arange(frames)
    target = np.stack([frame % 251, frame // 251, np.full(frames, game)], axis=1).astype(np.uint8)
    return GameTable(
        categories=np.stack([np.full(frames, game), frame], axis=1).astype(np.uint16),
        numbers=np.stack([np.full(frames, game), frame, frame / 2], axis=1).astype(np.float32),
        controller=np.concatenate([np.zeros((1, 3), dtype=np.uint8), target[:-1]]),
        target=target,
    )


def make_games(folder, lengths, seed=0):
    tables = [make_table(game, frames) for game, frames in enumerate(lengths)]
    origins = [{"seed": 100 + game} for game in range(len(tables))]
    features = {"name": "test", "version": 1}
    games.write(
        folder,
        tables,
        name="games",
        game="test",
        heads=HEADS,
        groups=GROUPS,
        features=features,
        provenance=origins,
        seed=seed,
    )
    return games.open_games(shards.read(folder))
