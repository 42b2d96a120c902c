"""The race: contenders train for the same time on the same data and are judged by playing games on the way.

A race has two parts. First each contender trains alone on its device, by the clock (`ridgeline.study.clocked`), and
leaves checkpoints; with several cards as many train at the same time. Then all games of all checkpoints are played, in
processes that have the machine to themselves. So no game ever slows a training down, and the other way round.

    RACE/race.json               what is raced
    RACE/CONTENDER/config.toml   see ridgeline.train.state
    RACE/CONTENDER/points.jsonl  a line a checkpoint
    RACE/CONTENDER/at-…s         the checkpoints
    RACE/CONTENDER/failure.txt   why its training ended before its time, if it did
    RACE/games.jsonl             a line a game
    RACE/record.json             the record for a report, at the end

Called again with the same arguments, it goes on after the last checkpoint and the last group of games.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline import checkpoint
from ridgeline.errors import ConfigError
from ridgeline.games.parallel import run_parallel
from ridgeline.play import GameResult, load_player
from ridgeline.play.evaluate import Job, groups, play_jobs
from ridgeline.play.ledger import Ledger
from ridgeline.study.clocked import Point, Task, checkpoint_name, read_failure, read_points, train_on_clock
from ridgeline.study.folder import claimed, is_foreign, write_whole
from ridgeline.study.racers import Contender
from ridgeline.train.config import AUTO
from ridgeline.train.guards import writing
from ridgeline.train.settings import to_dict

FORMAT = 1
RACE, GAMES = "race.json", "games.jsonl"
SETUP_SECONDS = 900.0  # that a training process may be silent: it compiles, and other contenders may do so beside it


@dataclass(frozen=True, kw_only=True)
class Games:
    """Which games are played at each checkpoint.

    Attributes:
        count: how many.
        level: strength of the opponent.
        temperature: 1 samples from the policy, 0 takes the most likely class of each head.
        first_seed: of the games; all checkpoints play the same.
        device: where the policies compute at play; "auto" for where each was trained.
        cache: what they keep between decisions; see ridgeline.play.player.Player.
    """

    count: int
    level: int
    temperature: float
    first_seed: int
    device: str
    cache: str


@dataclass(frozen=True, kw_only=True)
class Race:
    """What is raced.

    Attributes:
        contenders: who takes part.
        grid: times of checkpoints in seconds of training: 0 first, the end last.
        games: what each plays at each of them but the first.
        data: name of the data.
        fingerprint: of the data.
    """

    contenders: tuple[Contender, ...]
    grid: tuple[float, ...]
    games: Games
    data: str
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """What `race.json` holds: nothing of where the data lies, so that a race can go on on another machine."""
        settings = {contender.name: to_dict(contender.config) for contender in self.contenders}
        places = ("data", "out")
        return {
            "format": FORMAT,
            "contenders": {
                name: {key: value for key, value in config.items() if key not in places}
                for name, config in settings.items()
            },
            "grid": list(self.grid),
            "games": asdict(self.games),
            "data": self.data,
            "fingerprint": self.fingerprint,
        }


class Played(NamedTuple):
    """A game of a race: whose, at which time of the grid, and how it ended."""

    contender: str
    at: float
    result: GameResult


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a race came to: by contender its points, and why it ended early if it did; and all games."""

    points: dict[str, list[Point]]
    failures: dict[str, str]
    games: list[Played]


@dataclass(frozen=True)
class Watcher:
    """Whom to tell how a race goes.

    Attributes:
        trained: called with a contender's name and each of its points.
        played: called with the number of games that are played, and of all.
    """

    trained: Callable[[str, Point], object] = lambda name, point: None
    played: Callable[[int, int], object] = lambda done, total: None


def open_race(race: Race, folder: Path) -> None:
    """Make the folder of a race, or find the same race in it.

    Raises:
        ConfigError: the folder holds something else, or another race: says in what it differs.
    """
    file = folder / RACE
    if file.exists():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(before, dict) or "contenders" not in before:
                raise ValueError("it names no contenders")
        except ValueError as error:
            raise ConfigError(f"{file} is damaged ({error}); choose another --out") from error
        other = checkpoint.differences(before, race.to_json())
        if other:
            raise ConfigError(f"{folder} holds another race ({other}); choose another --out, or ask for the same race")
        return
    if is_foreign(folder):
        raise ConfigError(f"{folder} exists and holds no race; choose another --out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(race.to_json(), indent=1))


def run_race(
    race: Race,
    folder: Path,
    *,
    threads: int,
    processes: int,
    timeout: float,
    watcher: Watcher | None = None,
) -> Outcome:
    """Train and play, or go on with it.

    Args:
        race: what is raced.
        folder: opened by `open_race`.
        threads: that a training computes with on the CPU.
        processes: that play at a time.
        timeout: seconds without a decision after which a playing process counts as hung.
        watcher: whom to tell how it goes.

    Raises:
        ConfigError: another process runs this race.
        WorkerError: a process died or hung, or a game did not end; what was finished is kept.
        RidgelineError: a contender cannot be trained or cannot play.
    """
    watcher = watcher or Watcher()
    with claimed(folder):
        for name, point in _train(race, folder, threads):
            watcher.trained(name, point)
        points = {contender.name: read_points(folder / contender.folder) for contender in race.contenders}
        failures = {c.name: reason for c in race.contenders if (reason := read_failure(folder / c.folder))}
        games = _play(race, folder, processes, timeout, watcher.played)
    return Outcome(points=points, failures=failures, games=games)


def _train(race: Race, folder: Path, threads: int) -> Iterator[tuple[str, Point]]:
    """The points as they are reached, those of earlier calls first."""
    waiting = []
    for contender in race.contenders:
        done = read_points(folder / contender.folder)
        yield from ((contender.name, point) for point in done)
        if len(done) < len(race.grid) and read_failure(folder / contender.folder) is None:
            waiting.append(contender)
    for side_by_side in _rounds(waiting):
        tasks = [Task(to_dict(c.config), str(folder / c.folder), race.grid, threads) for c in side_by_side]
        names = [f"the training of {contender.name}" for contender in side_by_side]
        trained = run_parallel(train_on_clock, tasks, processes=len(tasks), timeout=SETUP_SECONDS, names=names)
        for index, point in trained:
            if point is not None:
                yield side_by_side[index].name, point


def _rounds(waiting: Sequence[Contender]) -> Iterator[list[Contender]]:
    """Who trains at the same time, each in a fresh process: one a device."""
    left = list(waiting)
    while left:
        by_device = {contender.config.device: contender for contender in reversed(left)}
        side_by_side = [contender for contender in left if by_device[contender.config.device] is contender]
        left = [contender for contender in left if contender not in side_by_side]
        yield side_by_side


def _play(
    race: Race, folder: Path, processes: int, timeout: float, report: Callable[[int, int], object]
) -> list[Played]:
    """All games; those that an earlier call finished are taken from the file."""
    wanted, played, jobs = race.games, [], []
    for contender in race.contenders:
        reached = read_points(folder / contender.folder)
        for at in race.grid[1 : len(reached)]:  # untrained, a policy presses buttons at random
            path = folder / contender.folder / checkpoint_name(at)
            device = contender.config.device if wanted.device == AUTO else wanted.device
            load, key = partial(load_player, path, device, wanted.cache), {"contender": contender.name, "at": at}
            name = f"{contender.name} at {at:g} s"
            jobs += [
                Job(load, seeds, wanted.level, wanted.temperature, key, name)
                for seeds in groups(wanted.count, wanted.first_seed)
            ]
    total = sum(len(job.seeds) for job in jobs)
    report(0, total)
    for index, result in play_jobs(jobs, processes=processes, timeout=timeout, ledger=Ledger(folder / GAMES)):
        played.append(Played(jobs[index].key["contender"], jobs[index].key["at"], result))
        report(len(played), total)
    return sorted(played, key=lambda game: (game.contender, game.at, game.result.seed))
