"""Demonstrations as game tables, to train on: replayed, verified, seen through the features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ridgeline.games.boxing.actions import CONTROLLERS, NEUTRAL
from ridgeline.games.boxing.demos import Demonstration, replay
from ridgeline.games.boxing.features import features
from ridgeline.games.boxing.game import Ram
from ridgeline.games.parallel import run_parallel
from ridgeline.games.table import GameTable

REPLAY_SECONDS = 120.0  # that a batch of replays may be silent
BATCH = 8  # games a process replays before it asks for more


def table(demonstration: Demonstration, states: Ram, *, visible: bool = False) -> GameTable:
    """One game's rows.

    Args:
        demonstration: the game.
        states: uint8[T, 128], as `replay` gives them.
        visible: only what the screen shows; see `features`.
    """
    codes = np.array(CONTROLLERS, np.uint8)
    executed = codes[demonstration.executed]
    return GameTable(
        categories=np.zeros((len(states), 0), np.uint16),
        numbers=features(states, visible=visible),
        controller=np.concatenate([np.array([NEUTRAL], np.uint8), executed[:-1]]),
        target=codes[demonstration.labels],
    )


def tables(
    demonstrations: Sequence[Demonstration],
    *,
    visible: bool = False,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[GameTable]:
    """Every game's rows, in the order of the demonstrations; each replay is verified.

    Args:
        demonstrations: the games.
        visible: only what the screen shows.
        processes: games that are replayed at a time.
        progress: called with the number of games that are ready, and of all.

    Raises:
        DataError: a game replays differently here.
        WorkerError: a process died or hung.
    """
    report = progress or (lambda done, total: None)
    report(0, len(demonstrations))
    parts = [demonstrations[start : start + BATCH] for start in range(0, len(demonstrations), BATCH)]
    found: dict[int, list[GameTable]] = {}
    names = [f"the replay of seeds {part[0].seed} to {part[-1].seed}" for part in parts]
    results = run_parallel(_replay, parts, processes=processes, timeout=REPLAY_SECONDS, names=names)
    for count, (index, states) in enumerate(results, start=1):
        part = found.setdefault(index, [])
        part.append(table(parts[index][len(part)], states, visible=visible))
        report(count, len(demonstrations))
    return [found[index][position] for index, part in enumerate(parts) for position in range(len(part))]


def _replay(games: Sequence[Demonstration]) -> Iterator[Ram]:
    for game in games:
        yield replay(game)
