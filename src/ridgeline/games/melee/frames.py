"""One frame of Melee, whatever it was read from: a Slippi replay, a running console, or the championship's protocol.

The record holds what the policies see and nothing else, in units of the game, so that every source gives the same
record and all that follows (features, controller classes) is written once.

- Characters and stages have several numberings. Here both are internal: characters as in the replay's post-frame
  update (Fox 1, Falco 22, Marth 18), stages as the console's memory has them (Battlefield 24).
- Percent is whole, rounded down, as the screen shows it and as the protocol carries it.
- Sticks are whole eightieths and triggers whole 140ths: that is how the game holds them, and it makes the choice of a
  class exact. They are the game's processed values, after dead zone and clamping.
- Buttons are the physical ones. The game's own "processed" buttons report A whenever Z is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIRST_FRAME = -123  # of every match; players may act from −39 on, 0 is GO
STICK_UNITS = 80
TRIGGER_UNITS = 140

A, B, X, Y, Z, L, R = (1 << bit for bit in range(7))  # bits of `buttons`

CONTROLLER = np.dtype(
    [
        ("main", np.int8, (2,)),  # right, up, in eightieths
        ("c", np.int8, (2,)),
        ("trigger", np.uint8),  # the further pressed one, in 140ths
        ("buttons", np.uint8),
    ]
)
FIGHTER = np.dtype(
    [
        ("x", np.float32),
        ("y", np.float32),
        ("shield", np.float32),  # 60 when whole
        ("action", np.uint16),  # the game's action state
        ("percent", np.uint16),
        ("character", np.uint8),
        ("stocks", np.uint8),
        ("jumps", np.uint8),  # left
        ("right", np.bool_),  # which way it faces
        ("on_ground", np.bool_),
        ("invulnerable", np.bool_),
        ("controller", CONTROLLER),  # the input that led to this frame
    ]
)
FRAME = np.dtype([("frame", np.int32), ("stage", np.uint8), ("players", FIGHTER, (2,))])

Frames = NDArray[Any]  # of FRAME

# fmt: off
_CHARACTERS = (
    "MARIO", "FOX", "CPTFALCON", "DK", "KIRBY", "BOWSER", "LINK", "SHEIK", "NESS", "PEACH", "POPO", "NANA", "PIKACHU",
    "SAMUS", "YOSHI", "JIGGLYPUFF", "MEWTWO", "LUIGI", "MARTH", "ZELDA", "YLINK", "DOC", "FALCO", "PICHU",
    "GAMEANDWATCH", "GANONDORF", "ROY",
)
# fmt: on
CHARACTERS: Mapping[str, int] = {name: number for number, name in enumerate(_CHARACTERS)}
STAGES: Mapping[str, int] = {  # those that tournaments allow
    "FOUNTAIN_OF_DREAMS": 8,
    "POKEMON_STADIUM": 18,
    "YOSHIS_STORY": 6,
    "DREAMLAND": 26,
    "BATTLEFIELD": 24,
    "FINAL_DESTINATION": 25,
}


def character_name(number: int) -> str:
    """Name of a character by its internal number."""
    return next((name for name, known in CHARACTERS.items() if known == number), f"character {number}")


def stick(values: ArrayLike) -> NDArray[np.int8]:
    """Stick positions in [−1, 1] as whole eightieths."""
    return np.clip(np.rint(np.asarray(values) * STICK_UNITS), -STICK_UNITS, STICK_UNITS).astype(np.int8)


def trigger(values: ArrayLike) -> NDArray[np.uint8]:
    """Trigger positions in [0, 1] as whole 140ths."""
    return np.clip(np.rint(np.asarray(values) * TRIGGER_UNITS), 0, TRIGGER_UNITS).astype(np.uint8)


def percent(values: ArrayLike) -> NDArray[np.uint16]:
    """Damage as the screen shows it."""
    return np.clip(np.floor(values), 0, 999).astype(np.uint16)


def final_rows(ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The rows of a recording that the game ended up with, where online play predicted frames and took them back.

    A row stands if no later row has its frame or an earlier one. The rows that were taken back show inputs that the
    remote player never made.

    Args:
        ids: the frame number of each row, as recorded.
    """
    later = np.minimum.accumulate(ids[::-1])[::-1]
    stands = np.ones(len(ids), bool)
    stands[:-1] = ids[:-1] < later[1:]
    return np.flatnonzero(stands)
