"""Frames as libmelee gives them, of a running console or of a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import require
from ridgeline.games.melee.frames import FRAME, A, B, Frames, L, R, X, Y, Z, final_rows, percent, stick, trigger

BUTTONS = {"A": A, "B": B, "X": X, "Y": Y, "Z": Z, "L": L, "R": R}


def frame_of(state: Any, ports: tuple[int, int]) -> Frames:
    """A GameState of libmelee in the one schema.

    Args:
        state: of a running match.
        ports: of the own player and of the other one, 1 to 4.

    Returns:
        FRAME[1].
    """
    made = np.zeros(1, FRAME)
    made["frame"], made["stage"] = state.frame, state.stage.value
    for fighter, port in zip(made[0]["players"], ports, strict=True):
        player = state.players[port]
        fighter["x"], fighter["y"] = player.position.x, player.position.y
        fighter["shield"] = player.shield_strength
        fighter["action"] = player.action.value
        fighter["percent"] = percent(player.percent)
        fighter["character"] = player.character.value
        fighter["stocks"] = player.stock
        fighter["jumps"] = player.jumps_left
        fighter["right"] = player.facing
        fighter["on_ground"] = player.on_ground
        fighter["invulnerable"] = player.invulnerable
        held = player.controller_state
        controller = fighter["controller"]
        controller["main"] = stick(2 * np.asarray(held.main_stick) - 1)
        controller["c"] = stick(2 * np.asarray(held.c_stick) - 1)
        controller["trigger"] = trigger(max(held.l_shoulder, held.r_shoulder))
        # the physical buttons, as in replays: `processed_button` has A wherever Z is held
        controller["buttons"] = sum(BUTTONS.get(button.value, 0) for button, down in held.button.items() if down)
    return made


def read_replay(file: Path) -> Frames:
    """A replay through libmelee: slower than the parser that data sets are made with, and equal to it.

    Args:
        file: a .slp of two players, of version 3.0 or later.

    Returns:
        FRAME[T], players in the order of their ports, frames that were rolled back left out.

    Raises:
        MissingExtraError: libmelee is not installed.
    """
    melee = require("melee", "melee")
    # by default it would keep the first row of a frame, which shows what was predicted of the remote player
    console = melee.Console(path=str(file), is_dolphin=False, skip_rollback_frames=False)
    console.connect()
    rows = []
    while (state := console.step()) is not None:
        first, second = sorted(state.players)
        rows.append(frame_of(state, (first, second)))
    frames = np.concatenate(rows)
    return frames[final_rows(frames["frame"])]
