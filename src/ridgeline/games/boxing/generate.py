"""Generates demonstrations in parallel processes, into a file that survives being interrupted.

Finished games are appended to a file of JSON lines at once. Called again with the same file, the games in it are
kept and their seeds left out; a last line that an interruption cut off is dropped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import DataError
from ridgeline.games.boxing.demos import Demonstration, Drift, demonstrate_task, from_json, to_json
from ridgeline.games.boxing.experts import Expert
from ridgeline.games.parallel import run_parallel

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
        DataError: the file holds something else, or games of another expert.
        WorkerError: a process died or hung; finished games are kept.
    """
    start = time.monotonic()
    done = {game.seed: game for game in read_lines(path)} if path.exists() else {}
    _check_origin(path, done.values(), player)
    tasks = [_task(seed, player, levels) for seed in seeds if seed not in done]
    report = progress or (lambda state: None)
    report(Progress(len(done), len(done) + len(tasks), 0.0, None))
    total = len(done) + len(tasks)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = run_parallel(
        demonstrate_task,
        tasks,
        processes=processes,
        timeout=GAME_SECONDS,
        names=[f"the game of seed {task[0]}" for task in tasks],
    )
    with path.open("a", encoding="utf-8") as stream:
        for _, game in results:
            stream.write(json.dumps(to_json(game)) + "\n")
            stream.flush()
            done[game.seed] = game
            report(Progress(len(done), total, time.monotonic() - start, game))
            if seconds is not None and time.monotonic() - start > seconds:
                break
    results.close()
    return [done[seed] for seed in sorted(done)]


def read_lines(path: Path) -> list[Demonstration]:
    """The games of a file of JSON lines; a last line without an end is cut off from the file.

    Raises:
        DataError: it cannot be read or holds something else.
    """
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)
        return [from_json(json.loads(line)) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a file of demonstrations ({error}); choose another file") from error


def _task(seed: int, player: Expert, levels: Sequence[int] | None) -> tuple[int, int, str, dict, Drift]:
    level, drift = VARIETY[seed % len(VARIETY)]
    if levels:
        level = levels[seed % len(levels)]
    return seed, level, player.name, player.settings(), drift


def _check_origin(path: Path, games: Iterable[Demonstration], player: Expert) -> None:
    for game in games:
        if (game.origin.expert, game.origin.settings) != (player.name, player.settings()):
            raise DataError(f"{path} holds games of another expert ({game.origin.expert}); choose another file")
