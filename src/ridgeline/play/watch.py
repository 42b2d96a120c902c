"""One game to look at: in the terminal while it is played, or as an animated picture of the real screen."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.games import game
from ridgeline.games.env import Drawn, Score
from ridgeline.play.decide import Decider, source
from ridgeline.play.player import Player
from ridgeline.play.rollout import GameResult, Seat, check_temperature

Screen = NDArray[np.uint8]  # [height, width, 3], red, green and blue
SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLORS = 256


@dataclass(frozen=True, eq=False)
class Sight:
    """What is to be seen after a decision.

    Attributes:
        screen: uint8[height, width, 3].
        score: points so far.
        seconds: of the game's time that the decision was held for.
    """

    screen: Screen
    score: Score
    seconds: float


class Watched:
    """A game that a policy plays now; iterating plays it.

    Args:
        player: the policy.
        seed: of the game.
        level: strength of the opponent.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.

    Raises:
        ConfigError: a temperature or level that cannot be.
        UnsupportedError: the game draws no screen of its own here.
    """

    def __init__(self, player: Player, seed: int, *, level: int, temperature: float = 1.0) -> None:
        check_temperature(temperature)
        adapter = game(player.game)
        self._player, self._temperature = player, temperature
        self._seat = Seat(adapter, player, seed, level)
        environment = self._seat.environment
        if not isinstance(environment, Drawn):
            raise UnsupportedError(f"{player.game} shows no screen here; play without --watch and --picture")
        self._drawn = environment

    def __iter__(self) -> Iterator[Sight]:
        seat = self._seat
        decide = Decider(self._player, 1, temperature=self._temperature, generators=[source(seat.seed)])
        while not seat.environment.done:
            begun, before = time.perf_counter(), seat.steps
            (chosen,) = decide([seat.window])
            seat.thought.append(time.perf_counter() - begun)
            seat.hold(chosen)
            seconds = (seat.steps - before) * self._drawn.step_seconds
            yield Sight(self._drawn.screen(), seat.environment.score, seconds)

    @property
    def result(self) -> GameResult:
        """How it ended."""
        return self._seat.result()


def show(sights: Iterable[Sight], stream: TextIO, size: Callable[[], os.terminal_size]) -> None:
    """Draw a game in a terminal at its own speed, two pixels a character.

    Args:
        sights: the game.
        stream: the terminal.
        size: of the terminal now.

    Raises:
        ConfigError: the stream is no terminal.
    """
    if not stream.isatty():
        raise ConfigError("a game is watched in a terminal; without one write it to a file: --picture game.png")
    stream.write("\x1b[?25l\x1b[2J")  # no cursor, a clear screen
    due = time.monotonic()
    try:
        for sight in sights:
            text = "\n".join(draw(sight.screen, size().columns, size().lines - 1))
            stream.write(f"\x1b[H{text}\n\x1b[0m{sight.score.dealt} dealt, {sight.score.taken} taken \x1b[K")
            stream.flush()
            due = max(due + sight.seconds, time.monotonic())
            time.sleep(due - time.monotonic() if due > time.monotonic() else 0)
    finally:
        stream.write("\x1b[0m\x1b[?25h\n")


def draw(screen: Screen, columns: int, lines: int) -> list[str]:
    """A screen as lines of half blocks in 24-bit colour, as large as fits with square pixels."""
    height, width, _ = screen.shape
    scale = min(columns / width, 2 * lines / height)
    rows, across = max(2, int(height * scale) // 2 * 2), max(1, int(width * scale))
    small = screen[np.arange(rows) * height // rows][:, np.arange(across) * width // across]
    drawn = []
    for upper, lower in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        parts, before = [], None
        for top, bottom in zip(upper, lower, strict=True):
            if (top, bottom) != before:
                parts.append("\x1b[38;2;{};{};{};48;2;{};{};{}m".format(*top, *bottom))
            before = (top, bottom)
            parts.append("▀")
        drawn.append("".join(parts) + "\x1b[0m")
    return drawn


def write_picture(sights: Iterable[Sight], file: Path) -> int:
    """Write a game as an animated PNG, which browsers play; every screen of it in its true colours.

    Returns:
        Number of screens.

    Raises:
        ConfigError: not a .png, or it cannot be written.
        UnsupportedError: a game of more than 256 colours.
    """
    if file.suffix.lower() not in (".png", ".apng"):
        raise ConfigError(f"a picture is an animated PNG, got {file}; let its name end in .png")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}; make it, or choose another file")
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; choose another file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):  # before the game is played in vain
        raise ConfigError(f"cannot write {file}: no permission; choose another file")
    picture = _Picture()
    for sight in sights:
        picture.add(sight.screen, sight.seconds)
    try:
        file.write_bytes(picture.content())
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose another file") from error
    return picture.screens


class _Picture:
    """An animated PNG with one palette; of each screen only the rectangle that changed is kept."""

    def __init__(self) -> None:
        self.screens = 0
        self._palette: dict[int, int] = {}
        self._before: NDArray[np.uint8] | None = None
        self._frames: list[tuple[tuple[int, int, int, int], float, bytes]] = []

    def add(self, screen: Screen, seconds: float) -> None:
        """Show a screen for so long."""
        indices = self._index(screen)
        box = (0, 0, *indices.shape)
        if self._before is not None:
            rows, columns = np.nonzero(indices != self._before)
            box = (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1) if len(rows) else (0, 0, 1, 1)
        top, left, bottom, right = (int(edge) for edge in box)
        part = indices[top:bottom, left:right]
        lines = np.concatenate([np.zeros((len(part), 1), np.uint8), part], axis=1)  # filter 0 before every line
        self._frames.append(((top, left, bottom, right), seconds, zlib.compress(lines.tobytes(), 9)))
        self._before = indices
        self.screens += 1

    def _index(self, screen: Screen) -> NDArray[np.uint8]:
        wide = screen.astype(np.int64)
        colors, places = np.unique(wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2], return_inverse=True)
        for color in colors.tolist():
            self._palette.setdefault(color, len(self._palette))
        if len(self._palette) > COLORS:
            raise UnsupportedError(f"a picture holds {COLORS} colours and this game has more; use --watch")
        own = np.array([self._palette[color] for color in colors.tolist()], np.uint8)
        return own[places.reshape(screen.shape[:2])]

    def content(self) -> bytes:
        """The file."""
        assert self._before is not None
        height, width = self._before.shape
        chunks = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))]
        chunks.append(_chunk(b"acTL", struct.pack(">II", len(self._frames), 0)))
        chunks.append(_chunk(b"PLTE", b"".join(color.to_bytes(3, "big") for color in self._palette)))
        sequence = 0
        for number, ((top, left, bottom, right), seconds, data) in enumerate(self._frames):
            shown = (sequence, right - left, bottom - top, left, top, round(1000 * seconds), 1000, 0, 0)
            chunks.append(_chunk(b"fcTL", struct.pack(">IIIIIHHBB", *shown)))
            sequence += 1
            if number == 0:
                chunks.append(_chunk(b"IDAT", data))
            else:
                chunks.append(_chunk(b"fdAT", struct.pack(">I", sequence) + data))
                sequence += 1
        return b"".join([SIGNATURE, *chunks, _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
