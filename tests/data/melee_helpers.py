"""Real replays, and variants of them that were never played."""

import os
from pathlib import Path

import numpy as np
import pytest

from ridgeline.data.melee.replay import parse
from ridgeline.games.melee.events import GAME_END, GAME_START, HEAD, Recording
from ridgeline.games.melee.frames import final_rows

DATA = os.environ.get("RIDGELINE_TEST_DATA")
REPLAYS = Path(DATA or ".") / "replays"
needs_replays = pytest.mark.skipif(not DATA, reason="RIDGELINE_TEST_DATA is not set")

SCRIPTED = REPLAYS / "falco_ditto_fd_scripted_v3.19.0.slp"
ROLLBACK = REPLAYS / "falco_ditto_ys_rollback_v3.15.0.slp"
FOX_DITTO = REPLAYS / "fox_ditto_bf_v3.12.0.slp"
ONLINE = REPLAYS / "fox_marth_fd_v3.14.0.slp"
CPU = REPLAYS / "marth_falconcpu7_fod_v3.18.0.slp"
SHORT = REPLAYS / "fox_falco_ys_short_v3.16.0.slp"
TINY = REPLAYS / "marth_ditto_ps_124f_v3.12.0.slp"
TRUNCATED = REPLAYS / "truncated_corrupt.slp"
USABLE = (SCRIPTED, ROLLBACK, FOX_DITTO, ONLINE, CPU, SHORT)

# where in Game Start
VERSION, TEAMS, STAGE, NAMES, CODES = 1, 0x0D, 0x13, 0x1A5, 0x221
PRE, POST = 0x37, 0x38


def player_type(port):
    return 0x66 + 0x24 * port


def variant(file, *, start=None, events=None):
    """A replay's bytes with some of its Game Start replaced, {offset: bytes}, or its events mapped (None drops one)."""
    recording = Recording.read(file)
    parts = [recording.content[a:b] for a, b in recording.events()]
    for offset, new in (start or {}).items():
        parts = [part[:offset] + new + part[offset + len(new) :] if part[0] == GAME_START else part for part in parts]
    if events:
        parts = [made for part in parts if (made := events(part)) is not None]
    raw = b"".join(parts)
    return HEAD + len(raw).to_bytes(4, "big") + raw + recording.content[recording.end :]


def without_end(part):
    return None if part[0] == GAME_END else part


def shifted_frames(part):
    """Frame numbers as a training capture has them."""
    if part[0] in (0x37, 0x38, 0x3A, 0x3B, 0x3C):
        return part[:1] + (int.from_bytes(part[1:5], "big", signed=True) + 70_000).to_bytes(4, "big") + part[5:]
    return part


def changed_character(part):
    """The first player turns from Sheik into Zelda at frame 50."""
    if part[0] == POST and part[5] == 0:
        late = int.from_bytes(part[1:5], "big", signed=True) >= 50
        return part[:7] + bytes([19 if late else 7]) + part[8:]
    return part


def damaged(offset, value, event=POST):
    """One value of the first player at frame 7 is another."""
    content = np.array([value], value.dtype.newbyteorder(">")).tobytes()

    def change(part):
        if part[0] == event and part[5] == 0 and int.from_bytes(part[1:5], "big", signed=True) == 7:
            return part[:offset] + content + part[offset + len(content) :]
        return part

    return change


def without_frame(part):
    """Frame 7 is missing."""
    framed = part[0] in (0x37, 0x38, 0x3A, 0x3B, 0x3C)
    return None if framed and int.from_bytes(part[1:5], "big", signed=True) == 7 else part


def as_the_protocol_has_it(file):
    """A replay in the protocol's own words, by way of nothing of ours but which rows stand."""
    from umi.frame import BUTTONS, FRAME

    bits = {"A": 0x100, "B": 0x200, "X": 0x400, "Y": 0x800, "Z": 0x10, "L": 0x40, "R": 0x20, "D_UP": 0x8}
    game = parse(file)
    rows = final_rows(game.frames.id.to_numpy())
    made = np.zeros(len(rows), FRAME)
    made["frame"] = game.frames.id.to_numpy()[rows]
    made["stage"] = {2: 8, 3: 18, 8: 6, 28: 26, 31: 24, 32: 25}[game.start.stage]
    for seat, port in enumerate(game.frames.ports):
        pre, post, fighter = port.leader.pre, port.leader.post, made["players"][:, seat]
        for name, array in {
            "character": post.character, "stocks": post.stocks, "hurtbox_state": post.hurtbox_state,
            "jumps_left": post.jumps, "action": post.state, "x": post.position.x, "y": post.position.y,
            "shield_strength": post.shield,
        }.items():  # fmt: skip
            fighter[name] = array.to_numpy()[rows]
        fighter["percent"] = np.floor(post.percent.to_numpy()[rows])
        fighter["facing"] = post.direction.to_numpy()[rows] > 0
        fighter["on_ground"] = post.airborne.to_numpy()[rows] == 0
        held = fighter["controller"]
        for name, position in (("main", pre.joystick), ("c", pre.cstick)):
            held[f"{name}_x"] = (position.x.to_numpy()[rows] + 1) / 2
            held[f"{name}_y"] = (position.y.to_numpy()[rows] + 1) / 2
        held["shoulder"] = pre.triggers.to_numpy()[rows]
        pressed = pre.buttons_physical.to_numpy()[rows]
        for bit, name in enumerate(BUTTONS):
            held["buttons"] |= np.where(pressed & bits[name], 1 << bit, 0).astype(np.uint8)
    return made
