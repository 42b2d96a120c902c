"""Generates demonstrations in parallel processes, into a file that survives being interrupted.

Finished games are appended to a file of JSON lines at once. Called again with the same file, the games in it are
kept and their seeds left out; a last line that an interruption cut off makes room for the next game. Reading never
changes a file, and nothing is appended to one that holds anything but demonstrations.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ridgeline import files
from ridgeline.errors import DataError
from ridgeline.games.boxing.demos import Demonstration, Drift, demonstrate_task, from_json, to_json
from ridgeline.games.boxing.experts import Expert
from ridgeline.games.parallel import run_parallel

LINES = ".jsonl"  # what a file of JSON lines is called
BEGINNING = b'{"seed": '  # of every line
GAME_SECONDS = 600.0  # that one game may take on a busy machine
VARIETY = tuple(  # levels and drift of one seed after another: half of the games at level 0
    (level, Drift(rate=rate)) for rate in (0.02, 0.05) for level in (0, 1, 0, 2, 0, 3)
)


@dataclass(frozen=True)
class Progress:
    """How far generation is.

    Attributes:
        done: games in the file.
        total: games asked for.
        seconds: since the start of this call.
        last: the game just finished, None at the start.
    """

    done: int
    total: int
    seconds: float
    last: Demonstration | None


class _Found(NamedTuple):
    """What a file of JSON lines holds: its games, their bytes, and whether part of another line follows."""

    games: list[Demonstration]
    whole: bytes
    cut_off: bool


def generate(
    path: Path,
    seeds: Sequence[int],
    player: Expert,
    *,
    processes: int,
    levels: Sequence[int] | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Demonstration]:
    """Let an expert demonstrate one game a seed.

    Args:
        path: the JSON lines; finished games in it are kept.
        seeds: all below FIRST_EVALUATION_SEED.
        player: the expert.
        processes: games at a time.
        levels: difficulties to cycle through; None for VARIETY's.
        seconds: stop after so long, unfinished games are dropped; None for all seeds.
        progress: called at the start and after every game.

    Returns:
        The games in the file, by seed.

    Raises:
        DataError: the file holds something else or games of another expert, or cannot be written.
        WorkerError: a process died or hung; finished games are kept.
    """
    start = time.monotonic()
    _check_place(path)
    found = _read(path) if path.exists() else _Found([], b"", False)
    _check_origin(path, found.games, player)
    done = {game.seed: game for game in found.games}
    tasks = [_task(seed, player, levels) for seed in seeds if seed not in done]
    total = len(done) + len(tasks)
    report = progress or (lambda state: None)
    report(Progress(len(done), total, 0.0, None))
    results = run_parallel(
        demonstrate_task,
        tasks,
        processes=processes,
        timeout=GAME_SECONDS,
        names=[f"the game of seed {task[0]}" for task in tasks],
    )
    with contextlib.closing(results), _appending(path, found.whole, found.cut_off) as append:
        for _, game in results:
            append(json.dumps(to_json(game)).encode() + b"\n")
            done[game.seed] = game
            report(Progress(len(done), total, time.monotonic() - start, game))
            if seconds is not None and time.monotonic() - start > seconds:
                break
    return [done[seed] for seed in sorted(done)]


def read_lines(path: Path) -> list[Demonstration]:
    """The games of a file of JSON lines, without a last line that an interruption cut off; the file stays as it is.

    Raises:
        DataError: it cannot be read or holds something else.
    """
    return _read(path).games


def _read(path: Path) -> _Found:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); choose another file") from error
    lines = content.splitlines(keepends=True)
    games: list[Demonstration] = []
    for number, line in enumerate(lines, start=1):
        try:
            games.append(from_json(files.parsed(line)))
        except (ValueError, DataError) as error:
            unended = number == len(lines) and not line.endswith(b"\n") and isinstance(error, ValueError)
            if unended and games and line[: len(BEGINNING)] == BEGINNING[: len(line)]:
                return _Found(games, content[: -len(line)], True)
            raise DataError(
                f"{path} is not a file of demonstrations (line {number}: {error}); choose another file"
            ) from error
    return _Found(games, content, False)


def _check_place(path: Path) -> None:
    """Refuse a file that demonstrations cannot be kept in, before anything is played."""
    if path.suffix != LINES:
        raise DataError(f"demonstrations are played into a file of JSON lines, got {path}; let its name end in {LINES}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        usable = path.is_file() or not path.exists()
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; choose another file") from error
    if not usable:
        raise DataError(f"{path} is not a file; choose another one for the demonstrations")


@contextlib.contextmanager
def _appending(path: Path, whole: bytes, cut_off: bool) -> Iterator[Callable[[bytes], None]]:
    """What appends a line to a file, all of it or nothing."""
    try:
        stream = io.FileIO(path, "a")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; choose another file") from error
    gap = b"" if whole.endswith(b"\n") or not whole else b"\n"

    def append(line: bytes) -> None:
        nonlocal cut_off, gap
        if cut_off:  # what an interruption left of a line goes, now that a whole one comes
            stream.truncate(len(whole))
        size = os.fstat(stream.fileno()).st_size
        rest = memoryview(gap + line)
        cut_off, gap = False, b""
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            stream.truncate(size)
            raise DataError(f"cannot write {path}: {error.strerror}; free space and call the same again") from error

    with stream:
        yield append


def _task(seed: int, player: Expert, levels: Sequence[int] | None) -> tuple[int, int, str, dict, Drift]:
    level, drift = VARIETY[seed % len(VARIETY)]
    if levels:
        level = levels[seed % len(levels)]
    return seed, level, player.name, player.settings(), drift


def _check_origin(path: Path, games: Iterable[Demonstration], player: Expert) -> None:
    for game in games:
        if (game.origin.expert, game.origin.settings) != (player.name, player.settings()):
            raise DataError(f"{path} holds games of another expert ({game.origin.expert}); choose another file")
