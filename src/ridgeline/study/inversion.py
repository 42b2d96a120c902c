"""The eager inversion: does a model that is cheap by design, run eagerly, beat another that is compiled?

Each model is run in each way by a process of its own; all are built first and then take turns in one run, forwards in
even rounds and backwards in odd ones, so that a machine that warms up or slows down favours none. A step that waits
for the host varies from one to the next by more than two models differ; so they are compared round by round, and a
difference counts where the 95 % interval over rounds (Student's t) excludes equal times.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.bench.nvml import Clocks, course, monitor
from ridgeline.bench.plan import Plan
from ridgeline.bench.processes import Team, close_all
from ridgeline.bench.run import blank_record, settle, take_turn
from ridgeline.bench.timing import summarise
from ridgeline.bench.workloads import Workload
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import ContenderResult, Record
from ridgeline.study.interval import mean_interval

EAGER, COMPILED = "eager", ("compile", "compile+graph")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One model eagerly against the other compiled.

    Attributes:
        eager: the model that is run eagerly. compiled: the other. way: how the other is compiled.
        ratio: how many times as fast the first is, a geometric mean over rounds. low, high: its 95 % interval.
    """

    eager: str
    compiled: str
    way: str
    ratio: float
    low: float
    high: float

    @property
    def inverted(self) -> bool | None:
        """Whether the eager model is the faster; None where the rounds do not tell."""
        return self.ratio > 1 if self.low > 1 or self.high < 1 else None


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """What the two models reach.

    Attributes:
        record: contenders named MODEL:WAY; times and spreads in milliseconds and shares; the answers, and the median
            of each turn.
        answers: the first model eagerly against the second compiled, then the second against the first; each without
            a CUDA graph and, on a card, with one.
    """

    record: Record
    answers: tuple[Answer, ...]


def inversion(a: Workload, b: Workload, device: torch.device, plan: Plan, told: Callable[[str], None]) -> Inversion:
    """Time both models in every way, in turns.

    Args:
        a, b: the models, at one batch, context and precision.
        device: a card, or the CPU.
        plan: how many turns, and how long; its contenders are always built beside each other.
        told: called with what goes on.

    Raises:
        ConfigError: they are one, or batch or context differ, so that tokens a second could not be compared.
        RidgelineError: one of them could not be timed in one of the ways; says why.
    """
    if a.name == b.name:
        raise ConfigError(f"the eager inversion compares two models, got {a.name} twice; name another")
    if (a.batch, a.context, a.precision) != (b.batch, b.context, b.precision):
        raise ConfigError("the eager inversion compares two models at one batch, context and precision; set them alike")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    watch, load = monitor(device), list[Clocks]()
    compiled = COMPILED if device.type == "cuda" else COMPILED[:1]
    cases = {f"{case.name}:{way}": (case, way) for case in (a, b) for way in (EAGER, *compiled)}
    blank = dataclasses.replace(blank_record(a, device, 1, watch), kind="study")
    before = watch.read() if watch else None
    teams: dict[str, Team] = {}
    plan = dataclasses.replace(plan, together=True)
    try:
        told(f"building {', '.join(cases)}")
        for name, (case, way) in cases.items():
            teams[name] = Team(case, way, device, plan, 1)
        began = time.monotonic()
        _built(teams, plan)
        told(f"built in {time.monotonic() - began:.0f} s")
        turns = _turns(teams, lambda team: take_turn(team, plan, watch, load), plan.rounds, told)
    finally:
        close_all(teams.values())
    answers = tuple(answer(one.name, other.name, way, turns) for one, other in ((a, b), (b, a)) for way in compiled)
    rows = [dataclasses.asdict(found) | {"inverted": found.inverted} for found in answers]
    curves: list[dict[str, Any]] = [
        {"figure": "inversion", "name": "inversion", "rows": rows},
        {"figure": "turns", "name": "turns", "rows": [{"contender": name, "ms": turns[name]} for name in turns]},
    ]
    return Inversion(
        record=dataclasses.replace(
            blank,
            clocks=course(before, load, watch.read()) if before is not None and watch is not None else None,
            contenders=[_result(name, team, a) for name, team in teams.items()],
            curves=curves,
        ),
        answers=answers,
    )


def answer(eager: str, compiled: str, way: str, turns: Mapping[str, Sequence[float]]) -> Answer:
    """Compares one model eagerly with another compiled, by the milliseconds of MODEL:WAY in each round."""
    pairs = zip(turns[f"{compiled}:{way}"], turns[f"{eager}:{EAGER}"], strict=True)
    mean, low, high = mean_interval([math.log(theirs / ours) for theirs, ours in pairs])
    assert low is not None
    assert high is not None
    return Answer(eager=eager, compiled=compiled, way=way, ratio=math.exp(mean), low=math.exp(low), high=math.exp(high))


def _built(teams: Mapping[str, Team], plan: Plan) -> None:
    """Waits until all are built, then lets each take a few steps alone."""
    end = time.monotonic() + plan.build_s
    for name, team in teams.items():
        team.wait(max(0.0, end - time.monotonic()))
        _check(name, team)
    for name, team in teams.items():
        settle(team, plan)
        _check(name, team)


def _turns(
    teams: Mapping[str, Team], take: Callable[[Team], Sequence[float]], rounds: int, told: Callable[[str], None]
) -> dict[str, list[float]]:
    """By contender the median milliseconds of its turn in each round."""
    found: dict[str, list[float]] = {name: [] for name in teams}
    for number in range(rounds):
        told(f"round {number + 1} of {rounds}")
        for name in list(teams)[:: 1 if number % 2 == 0 else -1]:
            times = take(teams[name])
            _check(name, teams[name])
            found[name].append(statistics.median(times))
    return found


def _check(name: str, team: Team) -> None:
    """Says which contender has failed, and why."""
    if team.error:
        model, _, way = name.rpartition(":")
        raise RidgelineError(f"{model} under {way} was not timed: {team.error}")


def _result(name: str, team: Team, case: Workload) -> ContenderResult:
    timing = summarise(team.times_ms)
    return ContenderResult(
        name=name,
        step_ms=timing.median_ms,
        spread=timing.spread,
        tokens_per_s=case.tokens / timing.median_ms * 1e3,
        windows_per_s=case.batch / timing.median_ms * 1e3,
        peak_memory_bytes=team.peak,
    )
