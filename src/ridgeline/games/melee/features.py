"""What a policy sees of Melee: one function for replays, live games and the championship.

The inputs of Eric Gu's HAL: stage, both characters and both actions as numbers of embedding rows, and nine numbers a
player, own player first. They are scaled by fixed constants, never by statistics of a data set, so a checkpoint needs
no file beside it. The constants come from 39 tournament-legal games between humans (324,929 frames):

    percent    0 to 184, mean 50; capped at 300
    shield     18.4 to 60
    x          mean 2.1, deviation 55.0, −257 to 271
    y          mean 13.7, deviation 32.9, −149 to 264
    jumps      0 to 6 (Jigglypuff and Kirby); everyone else at most 2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import DataError
from ridgeline.games.env import Row
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.frames import STAGES, Frames
from ridgeline.games.table import GameTable

FEATURES_VERSION = 1
ACTIONS = 400
GROUPS = (("stage", len(STAGES) + 1, 1), ("character", 33, 2), ("action", ACTIONS, 2))
NUMBERS = 18

MAX_PERCENT, HALF_PERCENT = 300, 150
HALF_STOCKS = 2
HALF_JUMPS = 3
HALF_SHIELD = 30
X_SCALE = 55
Y_CENTRE, Y_SCALE = 14, 33

_STAGE_ROWS = np.zeros(256, np.uint16)  # row 0 is any other stage
_STAGE_ROWS[list(STAGES.values())] = np.arange(1, len(STAGES) + 1)


def features(frames: Frames, ego: int = 0) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """The inputs of frames, in any number and order.

    Args:
        frames: FRAME[T].
        ego: which of the two players is the own one.

    Returns:
        categories: uint16[T, 5], rows of the tables in GROUPS.
        numbers: float32[T, 18].
    """
    players = [frames["players"][:, seat] for seat in (ego, 1 - ego)]
    categories = np.empty((len(frames), 5), np.uint16)
    categories[:, 0] = _STAGE_ROWS[frames["stage"]]
    numbers = np.empty((len(frames), NUMBERS), np.float32)
    for seat, player in enumerate(players):
        categories[:, 1 + seat] = np.minimum(player["character"], GROUPS[1][1] - 1)
        categories[:, 3 + seat] = np.minimum(player["action"], ACTIONS - 1)
        own = numbers[:, NUMBERS // 2 * seat :]
        own[:, 0] = np.minimum(player["percent"], MAX_PERCENT) / np.float32(HALF_PERCENT) - 1
        own[:, 1] = player["stocks"] / np.float32(HALF_STOCKS) - 1
        for column, flag in ((2, "right"), (3, "invulnerable"), (5, "on_ground")):
            own[:, column] = 2 * player[flag].astype(np.float32) - 1
        own[:, 4] = player["jumps"] / np.float32(HALF_JUMPS) - 1
        own[:, 6] = 1 - player["shield"] / np.float32(HALF_SHIELD)
        own[:, 7] = player["x"] / np.float32(X_SCALE)
        own[:, 8] = (player["y"] - np.float32(Y_CENTRE)) / np.float32(Y_SCALE)
    return categories, numbers


def game_table(frames: Frames, ego: int, encoding: Encoding) -> GameTable:
    """One player's rows of a whole game, from its first frame.

    A replay's frame holds the input and the state that the game made of it. So a row shows state and input of frame t,
    and its target is the input of frame t + 1: the last frame has none and is left out. Pairing a state with its own
    frame's input would show the answer (three in five jumps are under way in that very state).
    """
    categories, numbers = features(frames, ego)
    classes = encoding.encode(frames["players"][:, ego]["controller"])
    return GameTable(categories=categories[:-1], numbers=numbers[:-1], controller=classes[:-1], target=classes[1:])


def describe(encoding: Encoding) -> dict[str, Any]:
    """What a data set and a checkpoint record about inputs and classes."""
    return {
        "game": "melee",
        "version": FEATURES_VERSION,
        "buttons": encoding.buttons,
        "shoulder": encoding.shoulder,
    }


def encoding_of(recorded: Mapping[str, Any]) -> Encoding:
    """The classes that `describe` recorded.

    Raises:
        DataError: this version has other inputs or no such classes.
    """
    encoding = Encoding(int(recorded.get("buttons", 6)), bool(recorded.get("shoulder")))
    if dict(recorded) != describe(encoding):
        raise DataError(
            f"the features {dict(recorded)} are not those of this version ({describe(encoding)}); prepare the replays "
            "and train again, or use the version of ridgeline that made them"
        )
    return encoding


class MeleeEyes:
    """The same inputs live: shown a FRAME, it gives categories uint16[5] and numbers float32[18]."""

    def __init__(self, ego: int = 0) -> None:
        self.ego = ego

    def __call__(self, state: Any) -> Row:
        """See Eyes."""
        categories, numbers = features(np.asarray(state).reshape(1), self.ego)
        return categories[0], numbers[0]
