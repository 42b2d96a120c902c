"""A comparison of models that means something: one recipe, the learning rate tuned alike, several seeds, held-out loss.

Every contender is trained with the first one's data, windows, batch, optimiser, schedule and length; only the model
differs. For each, the learning rate is chosen among the same rates by one run each with a seed that the comparison
itself does not use, and rates are added while the best lies at an end of the list. Then every seed is trained once.
Where whole recipes are compared, all but the data and the windows is each contender's own, and nothing is chosen.
Runs with the same seed see the same windows in the same order, so differences are taken seed by seed.

Contenders may be trained beside each other, which does not change what they learn. So a comparison never counts the
seconds of its runs: at the end a step of each contender is timed alone, and seconds are steps of that length.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ridgeline import files
from ridgeline.data.api import load_dataset
from ridgeline.data.text import TextData
from ridgeline.errors import ConfigError
from ridgeline.games.parallel import run_parallel
from ridgeline.models.accounting import parameters
from ridgeline.study.contenders import device_of
from ridgeline.study.folder import claimed, is_foreign, write_whole
from ridgeline.study.interval import mean_interval
from ridgeline.study.ngram import ngram_losses
from ridgeline.study.pace import Pace, pace_of
from ridgeline.study.runs import Point, Run, StoppedError, run_once
from ridgeline.train.config import TrainConfig
from ridgeline.train.guards import writing
from ridgeline.train.settings import to_dict

TUNING_SEED = 1000  # above the seeds that a comparison counts
EXTENSIONS = 2  # how often a rate is added at an end of the list
PLAN, PACE = "plan.json", "pace.json"
SILENCE_SECONDS = 7 * 24 * 3600.0  # that all runs of a contender may take in a process of their own


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        configs: contender → its run with nothing left open, alike in all but the model.
        rates: learning rates that every contender is tried with; one alone is not tuned; none, and each keeps its own.
        seeds: how many seeds each is trained with, from 0.
        target: held-out loss whose time is taken; None for none.
    """

    configs: Mapping[str, TrainConfig]
    rates: tuple[float, ...]
    seeds: int = 3
    target: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seeds < TUNING_SEED:
            raise ConfigError(f"seeds must be from 1 to {TUNING_SEED - 1}, got {self.seeds}")
        if any(not (math.isfinite(rate) and rate > 0) for rate in self.rates):
            raise ConfigError(f"rates must be positive learning rates, got {list(self.rates)}")
        if len(set(self.rates)) < len(self.rates):
            raise ConfigError(f"rates must differ, got {list(self.rates)}")
        if self.target is not None and not 0 < self.target < math.inf:
            raise ConfigError(f"the target must be a finite loss above 0, got {self.target:g}")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contender's result.

    Attributes:
        name: the contender.
        parameters: of its model, trained.
        rate: the learning rate it was given.
        tried: held-out loss at the end by learning rate tried; None where the run diverged.
        runs: by seed.
        pace: seconds of a step, timed alone.
    """

    name: str
    parameters: int
    rate: float
    tried: Mapping[float, float | None]
    runs: tuple[Run, ...]
    pace: Pace

    @property
    def finals(self) -> list[float]:
        """Held-out losses at the end, by seed."""
        return [run.final for run in self.runs]

    @property
    def bests(self) -> list[float]:
        """Lowest held-out losses, by seed."""
        return [run.best for run in self.runs]

    def seconds(self, point: Point) -> float:
        """Training seconds until a point of a run."""
        return self.pace.seconds(point.step)

    def held(self, target: float) -> list[Point | None]:
        """By seed, the point from which on a loss was first held; None where it never was."""
        return [run.first_held(target) for run in self.runs]

    @property
    def tokens_per_s(self) -> float:
        """Positions learned from in a second of training."""
        last = self.runs[0].points[-1]
        return last.tokens / self.seconds(last)

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond those tried might be better still."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of `name` minus that of `against`, a mean over seeds; with one seed there is no interval."""

    name: str
    against: str
    mean: float
    low: float | None
    high: float | None

    @property
    def beyond(self) -> bool | None:
        """Whether it is larger than the spread between seeds explains (95 %); None where one seed cannot say."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out: standings in the order asked for, differences to the first, n-gram lines by order in nats."""

    plan: Plan
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]
    ngrams: Mapping[int, float]


def compare(plan: Plan, folder: Path, console: Console, processes: int = 1) -> Comparison:
    """Run the plan in `folder`; a run that is there already is not repeated.

    Args:
        plan: what is compared.
        folder: new, empty or of the same comparison.
        console: where progress is told.
        processes: contenders that are trained at a time; more than one, each in a process of its own.

    Raises:
        ConfigError: the folder holds another comparison or another process is at work in it; every rate
            diverged for a contender; or fewer than one process.
        StoppedError: SIGINT; the same call goes on.
    """
    if processes < 1:
        raise ConfigError(f"processes must be 1 or more, got {processes}")
    keep_plan(folder, _describe(plan))
    with claimed(folder):
        trained = _trained_apart(plan, folder, processes) if processes > 1 else _trained(plan, folder, console)
        standings = tuple(
            Standing(
                name=name,
                parameters=parameters(config.model),
                **found._asdict(),
                pace=pace_of(config, pace_file(folder, name)),
            )
            for (name, config), found in zip(plan.configs.items(), trained, strict=True)
        )
    first = standings[0]
    return Comparison(
        plan=plan,
        standings=standings,
        differences=tuple(difference(other, first) for other in standings[1:]),
        ngrams=_lines(next(iter(plan.configs.values()))),
    )


class _Found(NamedTuple):
    """A contender's rate, what else was tried, and its runs; see Standing."""

    rate: float
    tried: Mapping[float, float | None]
    runs: tuple[Run, ...]


def _trained(plan: Plan, folder: Path, console: Console) -> list[_Found]:
    """All contenders, one after another."""
    return [_stand(name, config, plan, folder, console, console) for name, config in plan.configs.items()]


class _Task(NamedTuple):
    """What a process needs to train a contender."""

    name: str
    plan: Plan
    folder: Path


def _trained_apart(plan: Plan, folder: Path, processes: int) -> list[_Found]:
    """All contenders, so many at a time."""
    names = list(plan.configs)
    tasks = [_Task(name, plan, folder) for name in names]
    found: dict[int, _Found] = {}
    try:
        found |= run_parallel(_stand_apart, tasks, processes=processes, timeout=SILENCE_SECONDS, names=names)
    except KeyboardInterrupt as stop:
        raise StoppedError("stopped; the same command goes on from here") from stop
    return [found[index] for index in range(len(names))]


def _stand_apart(task: _Task) -> Iterator[_Found]:
    """One contender, in a process of its own, which says of each run that it begins and nothing of its steps."""
    config = task.plan.configs[task.name]
    device_of(config)
    yield _stand(task.name, config, task.plan, task.folder, Console(stderr=True), Console(quiet=True))


def difference(one: Standing, other: Standing) -> Difference:
    """Of the lowest held-out losses in nats, seed by seed, with the 95 % interval of Student's t."""
    return _paired(one, other, one.bests, other.bests)


def sooner(one: Standing, other: Standing, target: float) -> Difference | None:
    """Of the training seconds until a loss is held, in the same way; None where not every seed held it."""
    mine, theirs = one.held(target), other.held(target)
    if None in mine or None in theirs:
        return None
    return _paired(one, other, *([each.seconds(p) for p in each.held(target) if p] for each in (one, other)))


def _paired(one: Standing, other: Standing, mine: Sequence[float], theirs: Sequence[float]) -> Difference:
    mean, low, high = mean_interval([a - b for a, b in zip(mine, theirs, strict=True)])
    return Difference(name=one.name, against=other.name, mean=mean, low=low, high=high)


def keep_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Write what a study is into its folder, or hold it against what is there.

    Raises:
        ConfigError: the folder holds another study, or something else.
    """
    file, wanted = folder / PLAN, json.loads(json.dumps(plan))  # as a file gives it back
    if file.exists():
        try:
            kept = files.parsed(file.read_text(encoding="utf-8"))
            if not isinstance(kept, dict):
                raise ValueError("it is no plan")
        except ValueError as error:
            raise ConfigError(f"{file} is damaged; give a new folder with --out") from error
        odd = sorted(_odd(kept, wanted))
        if odd:
            raise ConfigError(f"{folder} holds another study ({', '.join(odd)} differ); give a new folder with --out")
        return
    if is_foreign(folder):
        raise ConfigError(f"{folder} exists and holds no study; give a new folder with --out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(plan, indent=1))


def _odd(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> set[str]:
    """What differs between two plans: of equal contenders the settings, each once."""
    odd = {key for key in wanted.keys() | kept.keys() if kept.get(key) != wanted.get(key)}
    before, now = kept.get("contenders"), wanted.get("contenders")
    if (
        odd != {"contenders"}
        or not isinstance(before, dict)
        or not isinstance(now, dict)
        or before.keys() != now.keys()
    ):
        return odd
    pairs = [(before[name], now[name]) for name in now if isinstance(before[name], dict)]
    settings = {key for one, other in pairs for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    return settings or odd


def _describe(plan: Plan) -> dict[str, Any]:
    """What makes it the same comparison: a run's folder has its rate and seed, so more of them can be asked for later,
    and which card a contender is trained on does not count."""
    return {
        "kind": "compare",
        "contenders": {
            name: {key: value for key, value in to_dict(config).items() if key != "device"}
            for name, config in plan.configs.items()
        },
    }


def _home(folder: Path, name: str) -> Path:
    return folder / "runs" / name.replace("/", "_")


def pace_file(folder: Path, name: str) -> Path:
    """Where the pace of a contender is kept in a comparison's folder."""
    return _home(folder, name) / PACE


def _stand(name: str, config: TrainConfig, plan: Plan, folder: Path, console: Console, live: Console) -> _Found:
    """A contender's rate and runs; `console` is told of each run, `live` of its steps."""

    def one(rate: float, seed: int) -> Run:
        console.print(f"{name}, learning rate {rate:g}, seed {seed}", highlight=False, soft_wrap=True)
        place = _home(folder, name) / f"lr-{rate!r}-seed-{seed}"
        return run_once(dataclasses.replace(config, optimizer=config.optimizer.at_rate(rate), seed=seed), place, live)

    rate = plan.rates[0] if plan.rates else config.optimizer.lr
    tried: Mapping[float, float | None] = {}
    if len(plan.rates) > 1:
        rate, tried = tune(plan.rates, lambda rate: one(rate, TUNING_SEED))
    if not math.isfinite(rate):
        raise ConfigError(f"{name} diverged at every learning rate ({', '.join(map(str, tried))}); give lower --rates")
    runs = tuple(one(rate, seed) for seed in range(plan.seeds))
    broken = next((run.error for run in runs if run.error), None)
    if broken:
        raise ConfigError(f"{name} failed at learning rate {rate:g}: {broken}")
    return _Found(rate, tried, runs)


def tune(rates: Sequence[float], run: Callable[[float], Run]) -> tuple[float, dict[float, float | None]]:
    """The rate with the lowest loss at the end, and the losses of all that were tried; NaN where all diverged.

    While the best is the lowest or highest rate, one more is tried beyond it, at most `EXTENSIONS` times.
    """
    tried: dict[float, float | None] = {}

    def attempt(rate: float) -> None:
        result = run(rate)
        tried[rate] = result.final if result.error is None and math.isfinite(result.final) else None

    for rate in rates:
        attempt(rate)
    for _ in range(EXTENSIONS + 1):
        finished = {rate: loss for rate, loss in tried.items() if loss is not None}
        if not finished:
            return math.nan, tried
        best = min(finished, key=lambda rate: finished[rate])
        beyond = best / 2 if best == min(tried) else best * 2 if best == max(tried) else None
        if beyond is None or len(tried) == len(rates) + EXTENSIONS:
            break
        attempt(beyond)
    return best, tried


def _lines(config: TrainConfig) -> dict[int, float]:
    data = load_dataset(config.data)
    if not isinstance(data, TextData):
        return {}
    return ngram_losses(data.tokens[: data.train], data.tokens[data.train :], data.vocabulary.size)
