"""Games: the environment interface, the embedded Boxing, and the tables that training reads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError, nearest
from ridgeline.games.env import Game

GAMES = {"boxing": "ridgeline.games.boxing.adapter", "melee": "ridgeline.games.melee.adapter"}


def game(name: str) -> Game:
    """The adapter of a game. Its module is imported now, its emulator when a game is started.

    Raises:
        ConfigError: no such game.
    """
    if name not in GAMES:
        raise ConfigError(nearest(name, GAMES, "game"))
    return importlib.import_module(GAMES[name]).GAME


def stick_points(name: str) -> Mapping[str, NDArray[np.float32]]:
    """Where a stick is for each class of a head that is one: float32[classes, 2] by head, 1 at its end.

    Games that are not known here, whose tables a user wrote, have none.
    """
    return game(name).points if name in GAMES else {}
