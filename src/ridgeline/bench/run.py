"""Runs contenders against each other: each in its own process, taking turns on the device in one run.

A round gives every contender one turn, forwards in even rounds and backwards in odd ones, so that a card that warms
up or slows down does so under all of them alike. A contender that fails leaves its reason and the others go on. One
that finds no memory beside the others, or no time, is moved to a further group, which holds the anchors again; ratios
are taken within a group. Each number of cards has groups of its own.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from ridgeline.bench.circumstances import git_revision, versions
from ridgeline.bench.contenders import find_contender
from ridgeline.bench.nvml import Clocks, Monitor, course, merged, monitor
from ridgeline.bench.plan import CPU_PLAN, Plan
from ridgeline.bench.processes import Team, close_all
from ridgeline.bench.timing import summarise
from ridgeline.bench.workloads import Workload, floor_s
from ridgeline.cost import Utilisation, step_utilisation
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import check_precision, present
from ridgeline.models.accounting import step_cost
from ridgeline.records import ContenderResult, Record, WorkloadInfo

ANCHORS = ("best", "compile+graph")  # in every group
Say = Callable[[str], None]


@dataclass
class _Bench:
    """One run in progress."""

    case: Workload
    device: torch.device
    plan: Plan
    watch: Monitor | None
    gpus: int = 1
    several: bool = False  # numbers of cards, so that results say theirs
    say: Say = lambda text: None
    load: list[Clocks] = field(default_factory=list)
    results: list[ContenderResult] = field(default_factory=list)

    def group(self, names: Sequence[str], number: int, keep: Callable[[], None]) -> list[str]:
        """Measures one group; returns the contenders that found no memory or time and may run in another.

        Args:
            names: its contenders.
            number: of the group.
            keep: called when all are timed and again when all were looked into, with `results` up to date.
        """
        teams: list[Team] = []
        try:
            late = self._start(names, teams)
            self._turns([team for team in teams if not team.error])
            crowded = [t for t in teams if t.out_of_memory and len(teams) > 1 and t.name not in ANCHORS]
            measured, before = [team for team in teams if team not in crowded], self.results
            for look in (lambda: None, lambda: self._look_inside(measured)):
                look()
                self.results = before + [self._result(team, number) for team in measured]
                keep()
            return [*(team.name for team in crowded), *late]
        finally:
            close_all(teams)

    def _start(self, names: Sequence[str], teams: list[Team]) -> list[str]:
        """Starts the contenders, into `teams`, and says which of them the group has no time for."""
        if self.plan.together:
            self.say(f"starting {', '.join(names)}")
            teams += [Team(self.case, name, self.device, self.plan, self.gpus) for name in names]
            end = time.monotonic() + self.plan.build_s
            for team in teams:
                team.wait(max(0.0, end - time.monotonic()))
            for team in teams:
                settle(team, self.plan)
            return []
        began, needs = time.monotonic(), [0.0]
        for place, name in enumerate(names):
            expected = time.monotonic() - began + sum(needs) + 2 * max(needs)
            if expected > self.plan.group_s and not set(names[:place]) <= set(ANCHORS):
                return list(names[place:])
            self.say(f"starting {name} ({place + 1} of {len(names)})")
            start = time.monotonic()
            team = Team(self.case, name, self.device, self.plan, self.gpus)
            teams.append(team)
            team.first_step_s = team.wait(self.plan.build_s).get("first_step_s")
            turn = settle(team, self.plan)
            # its turns, and as long again as it took to start for what is looked at afterwards
            needs.append(self.plan.rounds * turn + time.monotonic() - start)
        return []

    def _turns(self, teams: list[Team]) -> None:
        for number in range(self.plan.rounds):
            self.say(f"round {number + 1} of {self.plan.rounds}")
            for team in teams if number % 2 == 0 else reversed(teams):
                if not team.error:
                    take_turn(team, self.plan, self.watch, self.load)

    def _look_inside(self, teams: list[Team]) -> None:
        """Phases and kernels of each contender, after all turns: a measurement that fails costs no result."""
        for team in teams:
            if team.error or not team.times_ms:
                continue
            if self.plan.phases:
                self.say(f"phases of {team.name}")
                team.send({"phases": self.plan.phases})
                team.phases_ms = team.wait(self.plan.build_s).get("phases_ms")
            if self.plan.profile and not team.error:
                self.say(f"kernels of {team.name}")
                team.send({"profile": self.plan.profile})
                answer = team.wait(self.plan.build_s)
                team.overlap, team.groups_ms_per_layer = answer.get("overlap"), answer.get("groups_ms_per_layer")
            if team.error:
                self.say(f"{team.name} was timed, but not looked into: {team.error}")
                team.error = ""

    def _shares(self, seconds: float) -> tuple[Utilisation, float] | None:
        """Utilisation of the cards and share of the floor of a step; None where the card's peaks are not known.

        Raises:
            ConfigError: above 100 %, with the input that is wrong.
        """
        spec = present(self.device.index or 0) if self.device.type == "cuda" else None
        if spec is None or self.case.precision not in spec.tflops:
            return None
        precision = check_precision(spec, self.case.precision)
        cost = step_cost(self.case.model, batch=self.case.batch, context=self.case.context, precision=precision)
        least = floor_s(self.case, spec)
        if least > seconds:
            raise ConfigError(
                f"a step of {seconds * 1e3:.4g} ms is shorter than its floor of {least * 1e3:.4g} ms: what it moves "
                "stayed in the cache, or not all of the step was timed"
            )
        return step_utilisation(cost, seconds, spec, precision, gpus=self.gpus), least / seconds

    def _result(self, team: Team, group: int) -> ContenderResult:
        own = self.gpus if self.several else None
        if team.error or not team.times_ms:
            return ContenderResult(name=team.name, group=group, gpus=own, error=team.error or "no step was timed")
        timing = summarise(team.times_ms)
        try:
            shares = self._shares(timing.median_ms / 1e3)
        except ConfigError as error:
            return ContenderResult(name=team.name, group=group, gpus=own, error=str(error))
        used, floor_share = shares or (None, None)
        return ContenderResult(
            name=team.name,
            group=group,
            gpus=own,
            tokens_per_s=self.gpus * self.case.tokens / timing.median_ms * 1e3,
            windows_per_s=self.gpus * self.case.batch / timing.median_ms * 1e3,
            step_ms=timing.median_ms,
            spread=timing.spread,
            mfu=used.mfu if used else None,
            bytes_per_s=used.bytes_per_s if used else None,
            bandwidth=used.bandwidth if used else None,
            floor_share=floor_share,
            peak_memory_bytes=team.peak,
            phases_ms=team.phases_ms,
            groups_ms_per_layer=team.groups_ms_per_layer,
            overlap=team.overlap,
            first_step_s=team.first_step_s,
        )


def settle(team: Team, plan: Plan) -> float:
    """A short turn that nobody looks at; it ends with unused memory given back. Returns what a turn will take."""
    if team.error:
        return 0.0
    team.send({"time": 2, "at_least_s": 0.0})
    times = team.wait(plan.build_s).get("times_ms", [0.0])
    return max(plan.turn_s, min(times) * plan.steps / 1e3)


def take_turn(team: Team, plan: Plan, watch: Monitor | None, load: list[Clocks]) -> list[float]:
    """Times a turn of a contender; its milliseconds, which the team keeps too. None where it failed, which it says.

    Args:
        team: the contender, built.
        plan: how long a turn is.
        watch, load: a card that is read meanwhile, and where to.
    """
    team.send({"time": plan.steps, "at_least_s": plan.turn_s})
    answer = team.wait(plan.build_s, watch, load)
    times: list[float] = answer.get("times_ms", [])
    team.times_ms += times
    team.peak = answer.get("peak_memory_bytes")
    return times


def check_run(contenders: Sequence[str], device: torch.device, gpus: Sequence[int]) -> list[str]:
    """The names of contenders that can be measured together on each of these numbers of cards.

    Raises:
        ConfigError: an unknown or repeated contender or number; none at all.
        UnsupportedError: more cards than there are.
    """
    names = [find_contender(name).name for name in contenders]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"name one or more different contenders, got {', '.join(names) or 'none'}")
    if not gpus or len(set(gpus)) != len(gpus):
        raise ConfigError(f"name one or more different numbers of cards, got {', '.join(map(str, gpus)) or 'none'}")
    if min(gpus) < 1:
        raise ConfigError(f"a run needs at least one card, got {min(gpus)}")
    most = max(gpus)
    if most > 1 and device.type == "cuda" and most > torch.cuda.device_count():
        raise UnsupportedError(f"there are {torch.cuda.device_count()} CUDA cards here, and {most} were asked for")
    return names


def run_bench(
    case: Workload,
    contenders: Sequence[str],
    device: torch.device,
    plan: Plan | None = None,
    *,
    gpus: Sequence[int] = (1,),
    onto: Record | None = None,
    keep: Callable[[Record], None] = lambda record: None,
    say: Say = lambda text: None,
) -> Record:
    """Measures `contenders` on `case` and returns the record.

    Args:
        case: what is trained; its batch is that of one card.
        contenders: names.
        device: of one card, or the CPU.
        plan: how long; None for the usual one of the device.
        gpus: numbers of cards, or on the CPU processes, that train together; results say theirs if there are several.
        onto: a record of the same workload in the same circumstances, whose groups come first.
        keep: called with the record so far when a group is timed and when it was looked into, so that nothing is lost.
        say: called with what goes on.

    Raises:
        ConfigError: an unknown or repeated contender or number of cards; none at all; a record to go on with that is
            of something else.
        UnsupportedError: more cards than there are.
    """
    names = check_run(contenders, device, gpus)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    watch = monitor(device)
    plan = plan or (Plan() if device.type == "cuda" else CPU_PLAN)
    bench = _Bench(case, device, plan, watch, several=len(gpus) > 1, say=say)
    before = watch.read() if watch else None
    blank = blank_record(case, device, max(gpus), watch)
    if onto is not None:
        _check_alike(onto, blank)
        bench.results += onto.contenders

    def so_far() -> Record:
        return replace(blank, clocks=_clocks(onto, before, bench.load, watch), contenders=list(bench.results))

    for number in gpus:
        bench.gpus = number
        _groups(bench, names, lambda: keep(so_far()))
    return so_far()


def _groups(bench: _Bench, names: Sequence[str], keep: Callable[[], None]) -> None:
    """Measures all contenders on as many cards as `bench` has now, in as many groups as it takes."""
    anchors = [name for name in ANCHORS if name in names]
    others = [name for name in names if name not in anchors]
    groups = [[*anchors, *others]]  # anchors first, while there is memory
    number = 1 + max((result.group for result in bench.results), default=-1)
    while groups:
        members = groups.pop(0)
        crowded = bench.group(members, number, keep)
        number += 1
        if crowded and len(crowded) < len(members) - len(anchors):
            groups.append([*anchors, *crowded])
        elif len(crowded) > 1:  # none but anchors fitted: one at a time
            groups += [[*anchors, name] for name in crowded]
        elif crowded:
            groups.append(crowded)


def _clocks(onto: Record | None, before: Clocks | None, load: list[Clocks], watch: Monitor | None) -> dict | None:
    earlier = onto.clocks if onto is not None else None
    if before is None or watch is None:
        return earlier
    return merged(earlier, course(before, load, watch.read()))


def blank_record(case: Workload, device: torch.device, gpus: int, watch: Monitor | None) -> Record:
    """A record of kind "bench" without results, and without the clocks of `watch`, the card's monitor."""
    cuda = device.type == "cuda"
    return Record(
        kind="bench",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        card=torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        gpus=gpus if cuda else 0,
        versions=versions(watch),
        workload=case.info(),
    )


def _check_alike(onto: Record, blank: Record) -> None:
    for name in ("kind", "workload", "card", "gpus", "git", "versions"):
        theirs, mine = getattr(onto, name), getattr(blank, name)
        if theirs != mine:
            raise ConfigError(
                f"the record to go on with has {name} {_told(theirs)}, this run {_told(mine)}; "
                "write a record of its own"
            )


def _told(value: object) -> str:
    """What records must have in common, in words."""
    if isinstance(value, WorkloadInfo):
        return f"{value.name} {value.batch} × {value.context} {value.precision}"
    return ", ".join(f"{name} {what}" for name, what in value.items()) if isinstance(value, dict) else str(value)
