"""The judgement of a policy: seeded games in parallel processes, and what they say with which certainty."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline import checkpoint
from ridgeline.errors import ConfigError, WorkerError, enough_memory
from ridgeline.games import game
from ridgeline.games.env import FIRST_EVALUATION_SEED, check_seeds
from ridgeline.games.parallel import run_parallel
from ridgeline.play.ledger import Ledger
from ridgeline.play.player import Player, load_player
from ridgeline.play.rollout import GameResult, check_temperature, play_games
from ridgeline.play.statistics import bootstrap, wilson

MAX_GAMES = 10_000  # beyond it an interval is narrower than any difference that matters
GAMES_A_CALL = 8  # games that one call of the model decides in
SILENCE_SECONDS = 300.0  # after which a process counts as hung
HEARTBEAT_SECONDS = 5.0
COUNTS = ("wins", "ties", "ko", "ko_against")
MEANS = ("margin", "dealt", "taken")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of some games at one level.

    Attributes:
        level: strength of the opponent.
        results: one a game, by seed.
        seconds: from the start of the processes to the last game's end.
    """

    level: int
    results: tuple[GameResult, ...]
    seconds: float = field(default=0.0, compare=False)

    def summary(self) -> dict[str, Any]:
        """For JSON: games, wins, ties, ko, ko_against (numbers of games), margin, dealt, taken (mean points a game).

        `intervals` holds a 95 % interval of each, in the same unit; `level` is the opponent's. `seconds` is the time
        that all took, `games_per_s` their rate, and `decision_ms` the median decision, for the games of one call
        together, averaged over games.
        """
        games = len(self.results)
        rows = [_figures(result) for result in self.results]
        columns = {name: [row[name] for row in rows] for name in (*COUNTS, *MEANS)}
        intervals = {name: [games * end for end in wilson(sum(columns[name]), games)] for name in COUNTS}
        intervals |= {name: list(bootstrap(columns[name])) for name in MEANS}
        return {
            "games": games,
            **{name: sum(columns[name]) for name in COUNTS},
            **{name: sum(columns[name]) / games for name in MEANS},
            "intervals": intervals,
            "level": self.level,
            "seconds": round(self.seconds, 2),
            "games_per_s": round(games / self.seconds, 3) if self.seconds else None,
            "decision_ms": round(1e3 * sum(result.decision_s for result in self.results) / games, 3),
        }


def evaluate(
    source: str | Path | Callable[[], Player],
    games: int = 30,
    *,
    level: int = 0,
    temperature: float = 1.0,
    processes: int = 2,
    first_seed: int = FIRST_EVALUATION_SEED,
    device: str = "cpu",
    cache: str = "exact",
    timeout: float = SILENCE_SECONDS,
    keep: str | Path | None = None,
    on_game: Callable[[GameResult], None] | None = None,
) -> Evaluation:
    """Let a policy play games with the seeds first_seed, first_seed + 1, …

    The result does not depend on the number of processes.

    Args:
        source: folder of a checkpoint, or of a run, whose best is taken; or what returns a player, in any process.
        games: how many.
        level: strength of the opponent.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        processes: of which each plays up to GAMES_A_CALL games at a time, with one thread.
        first_seed: of the games.
        device: where a checkpoint's policy computes, in every process.
        cache: what a checkpoint's policy keeps between decisions; see Player.
        timeout: seconds without a decision after which a process counts as hung.
        keep: file of JSON lines that finished games of a checkpoint are kept in: called again, they are not played
            again. None for no file.
        on_game: called with every game as it ends; what it keeps outlives an error in a later game.

    Raises:
        CheckpointError: no policy that can play here.
        ConfigError: no games, or a level, temperature or seed that cannot be.
        WorkerError: a process died or hung, or a game did not end. A game is never just missing.
    """
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    check_games(games, first_seed)
    check_temperature(temperature)
    load = source if callable(source) else partial(load_player, source, device, cache)
    check_level(load().game, level)  # loaded here as well, so that a mistake is told at once
    ledger = None if keep is None else Ledger(Path(keep))
    key: Mapping[str, Any] = (
        {}
        if callable(source)
        else {"checkpoint": checkpoint.digest(checkpoint.find(source)), "temperature": temperature, "cache": cache}
    )
    begun = time.monotonic()
    results: list[GameResult] = []
    jobs = [Job(load, group, level, temperature, key) for group in groups(games, first_seed)]
    for _, result in play_jobs(jobs, processes=processes, timeout=timeout, ledger=ledger):
        results.append(result)
        if on_game:
            on_game(result)
    if len(results) != games:
        raise WorkerError(f"{len(results)} of {games} games came back; this is a mistake of ridgeline, report it")
    ordered = tuple(sorted(results, key=lambda result: result.seed))
    return Evaluation(level=level, results=ordered, seconds=time.monotonic() - begun)


def check_games(games: int, first_seed: int) -> None:
    """Refuse a number of games that cannot be played.

    Raises:
        ConfigError: none, too many, or seeds that a game cannot have.
    """
    if games < 1:
        raise ConfigError(f"games must be at least 1, got {games}")
    if games > MAX_GAMES:
        raise ConfigError(f"games must be at most {MAX_GAMES}, got {games}; play several times from other first seeds")
    check_seeds(first_seed, games)


def check_level(name: str, level: int) -> None:
    """Refuse an opponent that does not exist.

    Raises:
        ConfigError: the game called `name` has no such level.
    """
    levels = game(name).levels
    if level not in levels:
        raise ConfigError(f"{name} has the levels {', '.join(map(str, levels))}, got {level}")


class Job(NamedTuple):
    """Games that one process plays in lock step.

    Attributes:
        load: returns the player, in any process.
        seeds: one a game.
        level: strength of the opponent.
        temperature: see play_games.
        key: what the games depend on beside seeds and level, for a ledger.
        name: what to call the player in an error.
    """

    load: Callable[[], Player]
    seeds: Sequence[int]
    level: int
    temperature: float
    key: Mapping[str, Any]
    name: str = ""


def groups(games: int, first_seed: int) -> list[range]:
    """The seeds of so many games, in the groups that share a call of the model."""
    seeds = range(first_seed, first_seed + games)
    return [seeds[at : at + GAMES_A_CALL] for at in range(0, games, GAMES_A_CALL)]


def play_jobs(
    jobs: Sequence[Job], *, processes: int, timeout: float = SILENCE_SECONDS, ledger: Ledger | None = None
) -> Iterator[tuple[int, GameResult]]:
    """Play the games of all jobs in parallel processes and yield (index of the job, result) as they end.

    A game that is in the ledger is not played again.

    Raises:
        WorkerError: a process died or hung, or a game did not end.
        RidgelineError: the ledger cannot be written.
    """
    waiting, tasks = [], []
    for index, job in enumerate(jobs):
        known = ledger.find(job.key, job.level, job.seeds) if ledger else {}
        yield from ((index, result) for result in known.values())
        left = [seed for seed in job.seeds if seed not in known]
        if left:
            waiting.append(index)
            tasks.append(job._replace(seeds=left))
    names = [_name(job) for job in tasks]
    for place, finished in run_parallel(_play, tasks, processes=processes, timeout=timeout, names=names):
        for result in finished:
            if ledger:
                ledger.add(tasks[place].key, result)
            yield waiting[place], result


def _name(job: Job) -> str:
    return f"the games of seeds {job.seeds[0]} to {job.seeds[-1]}{job.name and f' of {job.name}'}"


def _play(job: Job) -> Iterator[list[GameResult]]:
    """Finished games as they come, and an empty list now and then as a sign of life."""
    torch.set_num_threads(1)
    with enough_memory("let fewer processes play at a time"):
        player, heard = job.load(), time.monotonic()
        if player.device.type == "cuda":
            torch.cuda.set_device(player.device.index or 0)
        for finished in play_games(player, job.seeds, level=job.level, temperature=job.temperature):
            if finished or time.monotonic() - heard > HEARTBEAT_SECONDS:
                heard = time.monotonic()
                yield finished


def _figures(result: GameResult) -> dict[str, int]:
    margin = result.dealt - result.taken
    return {
        "wins": int(margin > 0),
        "ties": int(margin == 0),
        "ko": int(result.knockout > 0),
        "ko_against": int(result.knockout < 0),
        "margin": margin,
        "dealt": result.dealt,
        "taken": result.taken,
    }
