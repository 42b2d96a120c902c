"""Games: the environment interface, the embedded Boxing, and the tables that training reads."""

from __future__ import annotations

import importlib

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
