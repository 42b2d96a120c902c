"""Frames and controllers of the Universal Melee Interface, the protocol of the Computer Melee Championship."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.games.melee.frames import FRAME, STICK_UNITS, TRIGGER_UNITS, A, B, Frames, L, R, X, Y, Z, stick, trigger

BUTTONS = (A, B, X, Y, Z, L, R)  # in the order of the protocol, whose last one is the d-pad's up


def frames_of(frames: NDArray[Any]) -> Frames:
    """Frames of the protocol in the one schema; the bot is the first player.

    Args:
        frames: the protocol's FRAME[N].

    Returns:
        FRAME[N].
    """
    made = np.zeros(len(frames), FRAME)
    made["frame"], made["stage"] = frames["frame"], frames["stage"]
    fighters, theirs = made["players"], frames["players"]
    for name in ("x", "y", "action", "percent", "character", "stocks"):
        fighters[name] = theirs[name]
    fighters["shield"] = theirs["shield_strength"]
    fighters["jumps"] = theirs["jumps_left"]
    fighters["right"] = theirs["facing"] != 0
    fighters["on_ground"] = theirs["on_ground"] != 0
    fighters["invulnerable"] = theirs["hurtbox_state"] != 0  # as replays and libmelee have it
    controller, held = fighters["controller"], theirs["controller"]
    for name in ("main", "c"):
        for axis, direction in enumerate("xy"):
            controller[name][..., axis] = stick(2 * held[f"{name}_{direction}"] - 1)
    controller["trigger"] = trigger(held["shoulder"])
    controller["buttons"] = held["buttons"] & (A | B | X | Y | Z | L | R)  # the same bits
    return made


def controller_rows(controllers: Frames) -> NDArray[np.float32]:
    """What is to be held, CONTROLLER[N], as the protocol's rows.

    Returns:
        float32[N, 13]: main and c-stick and shoulder in [0, 1], then the buttons.
    """
    rows = np.zeros((len(controllers), 5 + len(BUTTONS) + 1), np.float32)
    rows[:, 0:2] = controllers["main"] / np.float32(2 * STICK_UNITS) + np.float32(0.5)
    rows[:, 2:4] = controllers["c"] / np.float32(2 * STICK_UNITS) + np.float32(0.5)
    rows[:, 4] = controllers["trigger"] / np.float32(TRIGGER_UNITS)
    rows[:, 5:-1] = controllers["buttons"][:, None] & np.array(BUTTONS, np.uint8) > 0
    return rows
