"""The race: contenders train for the same time on the same data and are judged by playing games on the way.

A race has two parts. First each contender trains alone on its device, by the clock (`ridgeline.study.clocked`), and
leaves checkpoints; with several cards as many train at the same time. Then all games of all checkpoints are played, of
the last ones first, in processes that have the machine to themselves. So no game ever slows a training down, and the
other way round.

    RACE/race.json                 what is raced
    RACE/CONTENDER/config.toml     see ridgeline.train.state
    RACE/CONTENDER/machines.jsonl  where it trained: a line each time that its training began or went on
    RACE/CONTENDER/points.jsonl    a line a checkpoint
    RACE/CONTENDER/at-…s           the checkpoints
    RACE/CONTENDER/failure.txt     why its training ended before its time, if it did
    RACE/games.jsonl               a line a game
    RACE/record.json               the record for a report, at the end

Called again with the same arguments, it goes on after the last checkpoint and the last game; called with other
contenders, these join the race. A copy of the folder goes on on another machine with the same kind of card. Of the
checkpoints, which are large, it needs the last one of a contender that is still to train, and those that are still to
play games.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline import checkpoint, files
from ridgeline.errors import ConfigError
from ridgeline.games.parallel import run_parallel
from ridgeline.play import GameResult, load_player
from ridgeline.play.evaluate import Job, groups, play_jobs
from ridgeline.play.ledger import Ledger
from ridgeline.study.circumstances import card
from ridgeline.study.clocked import (
    Point,
    Task,
    checkpoint_name,
    read_failure,
    read_machines,
    read_points,
    train_on_clock,
)
from ridgeline.study.folder import claimed, is_foreign, write_whole
from ridgeline.study.racers import Contender, folder_of
from ridgeline.train.config import AUTO
from ridgeline.train.guards import writing
from ridgeline.train.settings import to_dict

FORMAT = 2
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
        device: where the policies compute at play; "auto" for where each was trained, or on all of the race's cards.
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
        gpus: cards over which contenders and games are spread.
    """

    contenders: tuple[Contender, ...]
    grid: tuple[float, ...]
    games: Games
    data: str
    fingerprint: str
    gpus: int = 1

    def to_json(self) -> dict[str, Any]:
        """What `race.json` holds: nothing of where data and cards are, so that a race can go on on another machine."""
        settings = {contender.name: to_dict(contender.config) for contender in self.contenders}
        places = ("data", "out", "device")
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
    """What a race came to: by contender points, where it was trained, why it ended early if it did; and all games."""

    points: dict[str, list[Point]]
    machines: dict[str, list[dict[str, Any]]]
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
    """Make the folder of a race, or find the same race in it, which contenders may join.

    Raises:
        ConfigError: the folder holds something else, or another race: says in what it differs.
    """
    file, wanted = folder / RACE, race.to_json()
    if file.exists():
        try:
            before = files.parsed(file.read_text(encoding="utf-8"))
            if not isinstance(before, dict) or not isinstance(before.get("contenders"), dict):
                raise ValueError("it names no contenders")
        except ValueError as error:
            raise ConfigError(f"{file} is damaged ({error}); choose another --out") from error
        wanted["contenders"] = {**before["contenders"], **wanted["contenders"]}
        same = {name: wanted["contenders"][name] for name in before["contenders"]}
        other = checkpoint.differences(before, {**wanted, "contenders": same})
        if other:
            raise ConfigError(f"{folder} holds another race ({other}); choose another --out, or ask for the same race")
        taken = {folder_of(name): name for name in before["contenders"]}
        for contender in race.contenders:
            if taken.get(contender.folder, contender.name) != contender.name:
                raise ConfigError(f"{taken[contender.folder]} has the folder of {contender.name}; choose another --out")
        if wanted == before:
            return
    elif is_foreign(folder):
        raise ConfigError(f"{folder} exists and holds no race; choose another --out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(wanted, indent=1))


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
        ConfigError: another process runs this race, a checkpoint is missing that is needed to go on, or the race was
            begun on another kind of card.
        WorkerError: a process died or hung, or a game did not end; what was finished is kept.
        RidgelineError: a contender cannot be trained or cannot play.
    """
    watcher = watcher or Watcher()
    with claimed(folder):
        _check_folder(race, folder)
        for name, point in _train(race, folder, threads):
            watcher.trained(name, point)
        games = _play(race, folder, processes, timeout, watcher.played)
        return _outcome(race, folder, games)


def read_outcome(race: Race, folder: Path) -> Outcome:
    """What a race's folder holds, though games may be missing that cannot be played any more.

    Checkpoints before the first one that played are left out, as if they were not in the grid.

    Raises:
        ConfigError: a later checkpoint has played none of its games.
        RidgelineError: the folder is damaged.
    """
    ledger, games = Ledger(folder / GAMES), []
    idle: dict[str, list[float]] = {}
    for contender in race.contenders:
        found: dict[float, list[Played]] = {}
        for job in _jobs(race, folder, contender):
            there = ledger.find(job.key, job.level, job.seeds)
            at = job.key["at"]
            found.setdefault(at, []).extend(Played(contender.name, at, result) for result in there.values())
        idle[contender.name] = [at for at, played in found.items() if not played]
        first = min((at for at, played in found.items() if played), default=0.0)
        for at in idle[contender.name]:
            if at > first:
                raise ConfigError(f"{contender.name} at {at:g} s has played no game; let it play, or leave it out")
        games += [game for played in found.values() for game in played]
    outcome = _outcome(race, folder, games)
    points = {name: [point for point in path if point.at not in idle[name]] for name, path in outcome.points.items()}
    return replace(outcome, points=points)


def _outcome(race: Race, folder: Path, games: Sequence[Played]) -> Outcome:
    """These games, in order, and what the folder says of the training."""
    places = {contender.name: folder / contender.folder for contender in race.contenders}
    return Outcome(
        points={name: read_points(place) for name, place in places.items()},
        machines={name: read_machines(place) for name, place in places.items()},
        failures={name: reason for name, place in places.items() if (reason := read_failure(place))},
        games=sorted(games, key=lambda game: (game.contender, game.at, game.result.seed)),
    )


def _check_folder(race: Race, folder: Path) -> None:
    """Tell before any training that what is wanted cannot go on from what the folder holds."""
    ledger = Ledger(folder / GAMES)
    for contender in race.contenders:
        place = folder / contender.folder
        points = {point.at: point for point in read_points(place)}
        cure = f"bring it here, or delete {place} to train {contender.name} anew"
        if points and _unfinished(race, folder, contender):
            last = list(points.values())[-1]
            _check_checkpoint(place, last, f"the training of {contender.name} goes on from", cure)
        for job in _jobs(race, folder, contender):
            if len(ledger.find(job.key, job.level, job.seeds)) < len(job.seeds):
                _check_checkpoint(
                    place, points[job.key["at"]], f"{job.name} has games left to play, for which it needs", cure
                )
    cards: dict[str, str] = {}
    for contender in race.contenders:
        for line in read_machines(folder / contender.folder):
            cards.setdefault(line["card"], contender.name)
        if _unfinished(race, folder, contender):
            cards.setdefault(card(contender.config), contender.name)
    if len(cards) > 1:
        told = ", ".join(f"{name} on {one}" for one, name in cards.items())
        raise ConfigError(
            f"seconds of one card are not those of another ({told}); let all of a race train on one kind of card, or "
            "choose another --out"
        )


def _check_checkpoint(place: Path, point: Point, why: str, cure: str) -> None:
    """Refuse to go on without the checkpoint of a point."""
    path = place / checkpoint_name(point.at)
    if not (path / checkpoint.HEADER).exists():
        raise ConfigError(f"{why} the checkpoint {path}, which is not there; {cure}")
    if checkpoint.digest(path) != point.checkpoint:
        raise ConfigError(f"{why} the checkpoint {path}, but what lies there is another one; {cure}")


def _unfinished(race: Race, folder: Path, contender: Contender) -> bool:
    """Whether a contender has still to train."""
    place = folder / contender.folder
    return len(read_points(place)) < len(race.grid) and read_failure(place) is None


def _train(race: Race, folder: Path, threads: int) -> Iterator[tuple[str, Point]]:
    """The points as they are reached, those of earlier calls first."""
    for contender in race.contenders:
        yield from ((contender.name, point) for point in read_points(folder / contender.folder))
    waiting = [contender for contender in race.contenders if _unfinished(race, folder, contender)]
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
    jobs = [job for contender in race.contenders for job in _jobs(race, folder, contender)]
    jobs.sort(key=lambda job: -job.key["at"])  # where games are cut off, the end of the race is whole
    played = []
    total = sum(len(job.seeds) for job in jobs)
    report(0, total)
    for index, result in play_jobs(jobs, processes=processes, timeout=timeout, ledger=Ledger(folder / GAMES)):
        played.append(Played(jobs[index].key["contender"], jobs[index].key["at"], result))
        report(len(played), total)
    return played


def _jobs(race: Race, folder: Path, contender: Contender) -> Iterator[Job]:
    """The games of a contender's points."""
    wanted, place = race.games, folder / contender.folder
    own = contender.config.device if wanted.device == AUTO else wanted.device
    spread = wanted.device == AUTO and race.gpus > 1
    for point in read_points(place)[1:]:  # untrained, a policy presses buttons at random
        # the checkpoint's checksum, so that games of an earlier training are not taken for those of this one
        key = {"contender": contender.name, "at": point.at, "checkpoint": point.checkpoint}
        name = f"{contender.name} at {point.at:g} s"
        for number, seeds in enumerate(groups(wanted.count, wanted.first_seed)):
            device = f"cuda:{number % race.gpus}" if spread else own
            load = partial(load_player, place / checkpoint_name(point.at), device, wanted.cache)
            yield Job(load, seeds, wanted.level, wanted.temperature, key, name)
