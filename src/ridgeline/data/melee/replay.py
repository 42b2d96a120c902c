"""A Slippi replay (.slp) through peppi: read, checked, as frames of the one schema.

What is refused raises `RefusedError` with the reason, whatever the parser makes of it: it panics on some damaged files,
and a panic of Rust code is no `Exception`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import require
from ridgeline.games.melee.frames import (
    CHARACTERS,
    FIRST_FRAME,
    FRAME,
    STAGES,
    A,
    B,
    Frames,
    L,
    R,
    X,
    Y,
    Z,
    final_rows,
    percent,
    stick,
    trigger,
)

Version = tuple[int, int, int]
OLDEST: Version = (2, 1, 0)  # the first with jumps, ground and invulnerability
SLIPPI_BUTTONS = ((0x0100, A), (0x0200, B), (0x0400, X), (0x0800, Y), (0x0010, Z), (0x0040, L), (0x0020, R))
SLIPPI_STAGES = {2: 8, 3: 18, 8: 6, 28: 26, 31: 24, 32: 25}  # the file's number → the internal one
# far beyond what the game makes of them (positions end at the blast zones): such a value is damage
PLAUSIBLE = {
    "x": (-1000, 1000),
    "y": (-1000, 1000),
    "shield": (-60, 120),
    "character": (0, len(CHARACTERS) - 1),
    "stocks": (0, 99),
    "jumps": (0, 9),
}
SAME_GAME = 600  # frames (ten seconds) by which two recordings of one game are recognised


class RefusedError(Exception):
    """A replay that cannot be learned from; the message is the reason."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A whole game between two players.

    Attributes:
        frames: FRAME[T], one a frame of the game, players in the order of their ports.
        version: of the replay format.
        stage: internal number.
        characters: internal numbers.
        human: which of the two are no computer players.
        digest: equal for two recordings of one game, also where each player recorded it.
    """

    frames: Frames
    version: Version
    stage: int
    characters: tuple[int, int]
    human: tuple[bool, bool]
    digest: str


def read_replay(file: Path, oldest: Version = OLDEST) -> Replay:
    """Read and check a replay.

    Args:
        file: the .slp.
        oldest: the lowest version of the format that is taken.

    Raises:
        RefusedError: with the reason.
        MissingExtraError: the parser is not installed.
    """
    game = parse(file)
    _check_start(game, oldest)
    rows = final_rows(game.frames.id.to_numpy())
    frames = to_frames(game, rows)
    _check_frames(frames)
    players = frames["players"]
    return Replay(
        frames=frames,
        version=tuple(game.start.slippi.version),
        stage=int(frames["stage"][0]),
        characters=(int(players[0, 0]["character"]), int(players[0, 1]["character"])),
        human=tuple(player.type.name == "HUMAN" for player in game.start.players),
        digest=_digest(frames, game.start.random_seed),
    )


def parse(file: Path) -> Any:
    """The parser's own game.

    Raises:
        RefusedError: it cannot make one of the file.
        MissingExtraError: it is not installed.
    """
    peppi = require("peppi_py", "melee")
    try:
        str(file).encode()  # the parser takes no other names
        file.open("rb").close()
    except UnicodeEncodeError:
        raise RefusedError("its name is no UTF-8 text: rename it") from None
    except OSError as error:
        raise RefusedError(f"cannot be read ({error.strerror})") from None
    try:
        with _quiet():
            return peppi.read_slippi(str(file))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic derives from nothing closer
        # what stood in the file is not repeated: it may be a player's id
        words = ": ".join(" ".join(str(error).split()).split(": ")[:2])[:120] or type(error).__name__
        raise RefusedError(f"cut off, damaged or no Slippi replay ({words})") from None


def to_frames(game: Any, rows: NDArray[np.int64]) -> Frames:
    """Rows of the parser's game in the one schema; what its version lacks is 0.

    Args:
        game: with two players.
        rows: which rows.
    """
    frames = np.zeros(len(rows), FRAME)
    frames["frame"] = _column(game.frames.id, rows)
    frames["stage"] = SLIPPI_STAGES.get(game.start.stage, 0)
    for seat, port in enumerate(game.frames.ports):
        pre, post, fighter = port.leader.pre, port.leader.post, frames["players"][:, seat]
        fighter["x"] = _column(post.position.x, rows)
        fighter["y"] = _column(post.position.y, rows)
        fighter["shield"] = _column(post.shield, rows)
        fighter["action"] = _column(post.state, rows)
        fighter["percent"] = percent(_column(post.percent, rows))
        fighter["character"] = _column(post.character, rows)
        fighter["stocks"] = _column(post.stocks, rows)
        fighter["right"] = _column(post.direction, rows) > 0
        if post.hurtbox_state is not None:
            fighter["jumps"] = _column(post.jumps, rows)
            fighter["on_ground"] = _column(post.airborne, rows) == 0
            fighter["invulnerable"] = _column(post.hurtbox_state, rows) != 0
        controller = fighter["controller"]
        for name, position in (("main", pre.joystick), ("c", pre.cstick)):
            controller[name][:, 0] = stick(_column(position.x, rows))
            controller[name][:, 1] = stick(_column(position.y, rows))
        controller["trigger"] = trigger(_column(pre.triggers, rows))
        pressed = _column(pre.buttons_physical, rows)
        for bit, button in SLIPPI_BUTTONS:
            controller["buttons"] |= np.where(pressed & bit, np.uint8(button), np.uint8(0))
    return frames


def _column(array: Any, rows: NDArray[np.int64]) -> NDArray[Any]:
    if array.null_count:
        raise RefusedError("a player is missing from some frames")
    values = array.to_numpy()[rows]
    if not np.isfinite(values).all():
        raise RefusedError("damaged: a value is no number in some frames")
    return values


def _check_start(game: Any, oldest: Version) -> None:
    start = game.start
    version = tuple(start.slippi.version)
    if version < oldest:
        raise RefusedError(f"version {dotted(version)} of the format, older than {dotted(oldest)}")
    if start.is_teams:
        raise RefusedError("a team game")
    if len(start.players) != 2:
        raise RefusedError(f"{len(start.players)} players instead of 2")
    if start.stage not in SLIPPI_STAGES:
        raise RefusedError(f"stage number {start.stage} is none of {', '.join(STAGES)}")
    if game.end is None:
        raise RefusedError("the recording has no Game End: it was cut off")
    if game.frames is None or not len(game.frames.id):
        raise RefusedError("it has no frames")


def _check_frames(frames: Frames) -> None:
    ids = frames["frame"]
    if ids[0] != FIRST_FRAME:
        raise RefusedError(f"it begins at frame {ids[0]} instead of {FIRST_FRAME}: training or another special mode")
    if not (np.diff(ids) == 1).all():
        raise RefusedError("frames are missing in between")
    characters = frames["players"]["character"]
    if (characters != characters[0]).any():
        raise RefusedError("a player changes character (Zelda and Sheik)")
    for name, (least, most) in PLAUSIBLE.items():
        values = frames["players"][name]
        if values.min() < least or values.max() > most:
            raise RefusedError(f"damaged: {name} goes from {values.min():g} to {values.max():g}")


def _digest(frames: Frames, seed: int) -> str:
    """Of what both players' recordings of a game agree on: how it was seeded, and how it began."""
    begin = frames[:SAME_GAME]
    return hashlib.blake2b(seed.to_bytes(4, "big") + begin.tobytes(), digest_size=16).hexdigest()


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Standard error closed: what the parser says of a panic is said by the report already."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
