"""A search for the model that does the job soonest on this machine: Optuna over sizes, context, batch and rate.

Every trial trains by the clock for the same time, with its schedule over that time, and is validated on a grid of ten
points. A candidate that could not take enough steps in that time even at its floor, or that does not fit the card, is
never trained. Without a value the target is the lowest loss, or the highest knockout rate, at the end of a trial; with
one it is the time until it is held over two points in a row, and a trial that misses counts as the whole time and the
share by which it missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.errors import ConfigError, RidgelineError, require
from ridgeline.games.parallel import count_processes
from ridgeline.play import evaluate
from ridgeline.study.clocked import Point, Task, checkpoint_name, read_points, train_on_clock
from ridgeline.study.floors import Machine, this_machine
from ridgeline.study.folder import LOCK, claimed, is_foreign
from ridgeline.study.space import Range, Space, configure
from ridgeline.study.storage import opened, requeue, storage_errors, where
from ridgeline.study.trials import Goal, Trial, best_of, trials_of
from ridgeline.train.config import TrainConfig, engine_called
from ridgeline.train.guards import writing
from ridgeline.train.settings import to_dict

if TYPE_CHECKING:
    import optuna

POINTS = 10
LEAST_STEPS = 100
GAMES, FIRST_SEED = 30, 5_000  # of a knockout rate: seeds that are neither demonstrations nor evaluations
FIRST_GAMES = 16  # after which a rate that can no longer reach the target is not played out
MISSED = 10.0  # a miss of the target counts at most as so many whole trials
DATABASE = "search.db"
SEEDS = 2**32
REFUSALS = 20  # in a row after which nothing more in the space is taken to be possible
CANDIDATES = 20_000  # of a space that are looked at for one that is possible
REASONS = 3  # that an error gives
GRACE_SECONDS = 30.0  # that a trial under way may end behind the budget, beside the seconds of its training


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched.

    Attributes:
        base: the run that candidates vary, with device, precision and engine decided.
        space: what they may choose.
        goal: what they are judged by.
        budget_s: wall-clock seconds of the whole search, over all its processes' own time. A trial that would go beyond
            it is not begun, but for the first; none goes on that would end more than `trial_s` and 30 s behind it.
        trial_s: training seconds of a trial.
        storage: an SQLAlchemy URL of the database; None for a file in the folder.
        least_steps: a candidate that cannot take so many in a trial is never trained.
        seed: of the sampler.
    """

    base: TrainConfig
    space: Space
    goal: Goal
    budget_s: float
    trial_s: float
    storage: str | None = None
    least_steps: int = LEAST_STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.trial_s < math.inf and 0 < self.budget_s < math.inf):
            raise ConfigError("budget and trial must be positive times, such as 10m and 60s")
        if self.budget_s < self.trial_s:
            raise ConfigError(
                f"the budget of {self.budget_s:g} s is shorter than one trial of {self.trial_s:g} s; "
                "raise --budget or lower --trial"
            )
        if not 0 <= self.seed < SEEDS:
            raise ConfigError(f"the seed of a search must be from 0 to {SEEDS - 1}, got {self.seed}")
        if self.least_steps < 1:
            raise ConfigError(f"least_steps must be at least 1, got {self.least_steps}")

    @property
    def grid(self) -> tuple[float, ...]:
        """Training seconds at which a trial is judged."""
        return (0.0, *(self.trial_s * (n + 1) / POINTS for n in range(POINTS)))

    def plan(self) -> dict[str, Any]:
        """What must be alike for two processes to search together."""
        base = {key: value for key, value in to_dict(self.base).items() if key not in ("out", "device")}
        space = {name: list(values) for name, values in sorted(self.space.items())}
        goal = [self.goal.kind, self.goal.value]
        return json.loads(json.dumps({"base": base, "space": space, "goal": goal, "trial_s": self.trial_s}))  # type: ignore[no-any-return]


class RefusedError(Exception):
    """A candidate that is never trained, and why."""


class SearchStoppedError(Exception):
    """A search that the user stopped, with the trials that have ended."""

    def __init__(self, trials: list[Trial]) -> None:
        super().__init__("stopped")
        self.trials = trials


def search(plan: Search, folder: Path, told: Callable[[Trial], None]) -> list[Trial]:
    """Run trials until the budget is spent; a search that exists is gone on with.

    Args:
        plan: what is searched.
        folder: where runs, and without a storage of its own the database, are kept.
        told: called with every trial that this process ends.

    Raises:
        SearchStoppedError: by the user, with the trials that have ended; asked again it goes on.
        MissingExtraError: Optuna is not installed.
        ConfigError: the storage holds another search, or the folder something else or another process; or nothing in
            the space is possible.
        RidgelineError: the storage cannot be used.
    """
    began = time.monotonic()
    optuna = require("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if is_foreign(folder) and not any((folder / name).exists() for name in (DATABASE, LOCK)):
        raise ConfigError(f"{folder} exists and holds no search; give a new folder with --out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder), storage_errors(plan.storage or folder / DATABASE):
        machine = this_machine(plan.base)
        possible = _possible(plan, machine)  # before anything is stored: the next attempt is of another space
        study = opened(plan.storage or f"sqlite:///{(folder / DATABASE).resolve()}", plan.plan())
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=POINTS // 3)
        requeue(study, folder)
        so_far = study.get_trials(deepcopy=False)
        seed = (plan.seed + len(so_far)) % SEEDS  # of its own for each call: with the first's it would draw the same
        study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=6)
        chance = random.Random(seed)
        spent = time.monotonic() - began + sum(float(t.user_attrs.get("wall_s", 0.0)) for t in so_far)
        refusals = 0
        while refusals < REFUSALS and _time_for_another(plan, trials_of(study), spent):
            begun = time.monotonic()
            try:
                done = _Attempt(plan, folder, machine, study.ask(), left=plan.budget_s - spent).run(study)
            except KeyboardInterrupt as stop:
                raise SearchStoppedError(trials_of(study)) from stop
            spent += time.monotonic() - begun
            refusals = refusals + 1 if done.state == "refused" else 0
            if refusals:  # the sampler does not know what is possible, and each guess of it takes time
                study.enqueue_trial(chance.choice(possible))
            told(done)
        return trials_of(study)


def _possible(plan: Search, machine: Machine) -> list[dict[str, Any]]:
    """What candidates that can be trained choose, but for ranges; of a very large space a part.

    Raises:
        ConfigError: there are none.
    """
    lists = {name: values for name, values in plan.space.items() if not isinstance(values, Range)}
    ends = {name: values.low for name, values in plan.space.items() if isinstance(values, Range)}
    found, reasons = [], dict[str, None]()
    for chosen in itertools.islice(itertools.product(*lists.values()), CANDIDATES):
        params = dict(zip(lists, chosen, strict=True))
        try:
            _candidate(plan, machine, params | ends)
            found.append(params)
        except RefusedError as refusal:
            reasons[str(refusal)] = None
    if found:
        return found
    said = "; ".join([*reasons][:REASONS])
    more = f"; and {len(reasons) - REASONS} more reasons" if len(reasons) > REASONS else ""
    raise ConfigError(
        f"nothing in the space can be trained ({said}{more}); give other candidates to --space, or a longer --trial "
        "and --budget"
    )


def _candidate(plan: Search, machine: Machine, params: Mapping[str, Any]) -> tuple[TrainConfig, float]:
    """The config of a candidate and the least seconds of its step.

    Raises:
        RefusedError: it is never trained.
    """
    try:
        config = configure(plan.base, params, plan.trial_s)
        if not machine.holds(config):
            raise RefusedError("does not fit the card's memory")
        floor = machine.floor_s(config)
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    if floor * plan.least_steps > plan.trial_s:
        steps = int(plan.trial_s / floor)
        raise RefusedError(f"takes at most {steps} steps in a trial even at its floor, fewer than {plan.least_steps}")
    return config, floor


def _time_for_another(plan: Search, ended: Sequence[Trial], spent: float) -> bool:
    """Whether a trial fits what is left of the budget, with what set-up and validations took in those before it."""
    if all(trial.state == "refused" for trial in ended):
        return True
    beside = [trial.wall_s - trial.path[-1][0] for trial in ended if trial.path and trial.wall_s is not None]
    return spent + plan.trial_s + statistics.median(beside or [0.0]) <= plan.budget_s


class _Attempt:
    """One trial in this process.

    Args:
        plan: the search.
        folder: of the search.
        machine: where it is trained.
        trial: what Optuna asks for.
        left: seconds of the budget.
    """

    def __init__(self, plan: Search, folder: Path, machine: Machine, trial: optuna.Trial, left: float) -> None:
        self.plan, self.machine, self.trial, self.left = plan, machine, trial, left
        self.home = folder
        self._begun = time.monotonic()
        self._judged: list[float] = []  # when
        self.path: list[tuple[float, float]] = []
        self.reached: float | None = None
        self.crossing: float | None = None
        self._start = None if plan.goal.kind == "loss" else 0.0  # quality before the first step
        self._point: Point | None = None

    def run(self, study: optuna.Study) -> Trial:
        """Train and judge the candidate, and tell the study."""
        import optuna

        begun, state, value = time.monotonic(), optuna.trial.TrialState.FAIL, None
        note = self.trial.set_user_attr
        note("where", where(self.home))
        try:
            config = self._choose()
            pruned = self._train(config)
            state = optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE
            value = None if pruned else self._value()
        except RefusedError as refusal:
            state = optuna.trial.TrialState.PRUNED
            note("refused", str(refusal))
        except RidgelineError as error:
            note("failed", str(error))
        except KeyboardInterrupt:
            study.enqueue_trial(dict(self.trial.params))
            note("failed", "stopped")
            raise
        finally:
            note("wall_s", round(time.monotonic() - begun, 3))
            self._keep()
            study.tell(self.trial, value, state)
        ended = trials_of(study)
        _tidy(ended, self.plan.goal)
        return next(trial for trial in ended if trial.number == self.trial.number)

    def _choose(self) -> TrainConfig:
        params: dict[str, Any] = {}
        for name, values in self.plan.space.items():
            if isinstance(values, Range):
                params[name] = self.trial.suggest_float(name, values.low, values.high, log=True)
            else:
                params[name] = self.trial.suggest_categorical(name, values)
        config, floor = _candidate(self.plan, self.machine, params)
        self.trial.set_user_attr("predicted", config.step_tokens / floor)
        return config

    def _train(self, config: TrainConfig) -> bool:
        """Whether the trial was left early because others do better."""
        # by its choices, so that a candidate that was cut off is gone on with and not begun again
        place = self.home / "trials" / hashlib.sha256(json.dumps(to_dict(config)).encode()).hexdigest()[:16]
        place.parent.mkdir(exist_ok=True)
        self.trial.set_user_attr("folder", str(place))
        if self.plan.goal.kind == "ko":
            shutil.rmtree(place, ignore_errors=True)  # the games of a trial that was cut off are not kept
        for old in read_points(place):  # those of a trial that was cut off, or of the same choices before
            if self._begins(old):
                continue
            if self._reaches(old, old.val_loss):
                return False
        lanes = config.lanes or engine_called(config.engine).lanes  # to measure them would cost every candidate seconds
        task = Task({**to_dict(config), "lanes": lanes}, str(place), self.plan.grid, torch.get_num_threads())
        with contextlib.closing(train_on_clock(task)) as points:
            for point in points:
                if point is not None and not self._begins(point) and self._judge(point, place):
                    return not self.reached
        return False

    def _begins(self, point: Point) -> bool:
        """Whether it is the point before the first step, whose loss is noted."""
        if point.steps == 0 and self.plan.goal.kind == "loss":
            self._start = point.val_loss
        return point.steps == 0

    def _judge(self, point: Point, place: Path) -> bool:
        """Whether the trial ends at this point."""
        goal = self.plan.goal
        for older in place.glob("at-*"):  # only the newest is needed to go on
            if older.name != checkpoint_name(point.at):
                shutil.rmtree(older)
        quality = point.val_loss if goal.kind == "loss" else _knockouts(place / checkpoint_name(point.at), goal)
        if self._reaches(point, quality):
            return True
        self.trial.report(quality if goal.kind == "loss" else -quality, len(self.path))
        self._check_time()
        if goal.value is not None and goal.short_of(quality) <= 0:
            return False  # whether it is held is told by the next point
        return bool(self.trial.should_prune())

    def _check_time(self) -> None:
        """End a trial that would go far beyond the budget, as where a validation takes longer than the training."""
        self._judged.append(time.monotonic())
        if len(self._judged) > 1:
            a_point = (self._judged[-1] - self._judged[0]) / (len(self._judged) - 1)
            whole = self._judged[-1] - self._begun + a_point * (POINTS - len(self.path))
            if whole > self.left + self.plan.trial_s + GRACE_SECONDS:
                beside = "validations" if self.plan.goal.kind == "loss" else f"{GAMES} games at each of {POINTS} points"
                raise RidgelineError(
                    f"would take {whole:.0f} s with its {beside}, {self.left:.0f} s of the budget were left"
                )

    def _reaches(self, point: Point, quality: float) -> bool:
        """Note what was reached at a point, and whether the target has now been held at two in a row."""
        goal, self._point = self.plan.goal, point
        self.path.append((point.seconds, quality))
        if goal.value is None or [goal.short_of(q) <= 0 for _, q in self.path[-2:]] != [True, True]:
            return False
        self.reached, quality = self.path[-2]
        before, worse = self.path[-3] if len(self.path) > 2 else (0.0, quality if self._start is None else self._start)
        miss, spare = goal.short_of(worse), -goal.short_of(quality)
        self.crossing = before + (self.reached - before) * miss / (miss + spare) if miss > 0 else self.reached
        return True

    def _value(self) -> float:
        goal, quality = self.plan.goal, self.path[-1][1]
        if goal.value is None:
            return quality if goal.kind == "loss" else -quality
        if self.crossing is not None:
            return self.crossing
        return self.plan.trial_s * (1 + min(MISSED, max(0.0, goal.short_of(quality))))

    def _keep(self) -> None:
        note = self.trial.set_user_attr
        note("path", self.path)
        note("reached", self.reached)
        note("crossing", self.crossing)
        if self._point is not None and self._point.seconds:
            note("measured", self._point.tokens / self._point.seconds)


def _knockouts(checkpoint: Path, goal: Goal) -> float:
    """The share of games won by knockout: of all, or of the first ones where these leave the target out of reach."""
    knockouts = played = 0
    for games in (FIRST_GAMES, GAMES - FIRST_GAMES):
        result = evaluate(checkpoint, games, first_seed=FIRST_SEED + played, processes=count_processes(None))
        knockouts, played = knockouts + result.summary()["ko"], played + games
        if goal.value is not None and knockouts + GAMES - played < goal.value * GAMES:
            break
    return knockouts / played


def _tidy(trials: list[Trial], goal: Goal) -> None:
    """Of the trials' folders only the best one's is kept; a search leaves too many."""
    best = best_of(trials, goal)
    for trial in trials:
        if trial.folder is not None and trial is not best and (best is None or trial.folder != best.folder):
            shutil.rmtree(trial.folder, ignore_errors=True)


def chosen_config(plan: Search, trial: Trial) -> TrainConfig:
    """The config of a trial, as `train` takes it."""
    config = configure(plan.base, trial.params, plan.trial_s)
    return dataclasses.replace(config, device="auto", precision="auto", engine="auto", out="auto")
