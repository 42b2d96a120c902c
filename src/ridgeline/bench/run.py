"""Runs contenders against each other: each in its own process, taking turns on the device in one run.

A round gives every contender one turn, forwards in even rounds and backwards in odd ones, so that a card that warms
up or slows down does so under all of them alike. A contender that fails leaves its reason and the others go on. One
that finds no memory beside the others is moved to a further group, which holds the anchors again; ratios are taken
within a group.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

import ridgeline
from ridgeline.bench.contenders import find_contender
from ridgeline.bench.nvml import Clocks, Monitor, extremes, monitor
from ridgeline.bench.timing import summarise
from ridgeline.bench.workloads import Workload
from ridgeline.cost import floor_of, step_utilisation, table_rates
from ridgeline.errors import ConfigError
from ridgeline.hardware import check_precision, present
from ridgeline.models.accounting import step_cost
from ridgeline.records import ContenderResult, Record

ANCHORS = ("best", "compile+graph")  # in every group
POLL_S = 0.1
GRACE_S = 10.0  # seconds a worker has to end by itself


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run takes.

    Attributes:
        rounds: turns of each contender; even, so that each order occurs equally often.
        steps: timed steps of a turn, at least.
        turn_s: shortest turn, in seconds: quick steps are timed until it is full.
        warm_s: longest warm-up of a contender, in seconds.
        build_s: longest time until a contender is ready, in seconds, compilation included.
        phases: steps over which phases are measured, in a program of its own after the turns; 0 to leave them out.
        together: start all contenders at once. Quicker, but first-step times are then not measured.
    """

    rounds: int = 6
    steps: int = 20
    turn_s: float = 0.4
    warm_s: float = 10.0
    build_s: float = 300.0
    phases: int = 10
    together: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 2 or self.rounds % 2 or self.steps < 2:
            raise ConfigError(f"a run needs an even number of rounds and ≥ 2 steps, got {self.rounds} and {self.steps}")


CPU_PLAN = Plan(rounds=4, steps=5, turn_s=0.0, warm_s=5.0, phases=3)


class WorkerProcess:
    """A contender's process as the parent sees it."""

    def __init__(self, case: Workload, contender: str, device: torch.device, plan: Plan) -> None:
        self.name, self.error = contender, ""
        self.first_step_s: float | None = None
        self.times_ms: list[float] = []
        self.peak: int | None = None
        self.phases_ms: dict[str, float] | None = None
        self._folder = tempfile.mkdtemp(prefix="ridgeline-bench-")
        self._log: IO[bytes] = open(Path(self._folder) / "log", "w+b")  # noqa: SIM115
        read, write = os.pipe()
        environment = os.environ.copy()
        if not plan.together:  # an empty cache each, so that the order of contenders cannot matter
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                environment[variable] = str(Path(self._folder) / variable.lower())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.bench.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            env=environment,
        )
        os.close(write)
        self._answers = os.fdopen(read, "r")
        sizes = {"name": case.name, "batch": case.batch, "context": case.context, "precision": case.precision}
        self.send(
            {"build": {"workload_args": sizes, "contender": contender, "device": str(device), "warm_s": plan.warm_s}}
        )

    def send(self, command: dict[str, Any]) -> None:
        """Gives a command; the answer is taken with `wait`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.error = self.error or self._death()

    def wait(self, limit_s: float, watch: Monitor | None = None, seen: list[Clocks] | None = None) -> dict[str, Any]:
        """The answer, or an empty one with `error` set; the card is read meanwhile."""
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not self.error and not selector.select(POLL_S):
                if watch is not None and seen is not None:
                    seen.append(watch.read())
                if time.monotonic() > end:
                    self.error = f"no answer within {limit_s:.0f} s"
        line = "" if self.error else self._answers.readline()
        if not line:
            self.error = self.error or self._death()
            return {}
        answer = json.loads(line)
        self.error = answer.get("error", "")
        return answer

    def _death(self) -> str:
        self._process.wait(GRACE_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with {self._process.returncode}: {lines[-1][:300] if lines else 'no output'}"

    def close(self) -> None:
        """Ends the process and removes its caches."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, and took an unread command with it
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed for want of device memory."""
        return "out of memory" in self.error.lower()


def git_revision() -> str | None:
    """Revision of the code that runs, with "+" if files were changed; None outside a repository.

    A copy of the files without their repository says which revision they are by RIDGELINE_REVISION.
    """
    if os.environ.get("RIDGELINE_REVISION"):
        return os.environ["RIDGELINE_REVISION"]
    folder = Path(ridgeline.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions(watch: Monitor | None) -> dict[str, str]:
    """Versions of everything that a time depends on."""
    found = {"ridgeline": ridgeline.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    try:
        from triton import __version__ as triton_version

        found["triton"] = triton_version
    except ImportError:
        pass
    if watch is not None:
        found["driver"] = watch.driver()
    return found


@dataclass
class _Bench:
    """One run in progress."""

    case: Workload
    device: torch.device
    plan: Plan
    watch: Monitor | None
    load: list[Clocks] = field(default_factory=list)
    results: list[ContenderResult] = field(default_factory=list)

    def group(self, names: Sequence[str], number: int) -> list[str]:
        """Measures one group; returns the contenders that found no memory and may run in another."""
        workers = self._start(names)
        try:
            self._turns([worker for worker in workers if not worker.error])
            self._phases(workers)
            crowded = []
            for worker in workers:
                if worker.out_of_memory and len(workers) > 1 and worker.name not in ANCHORS:
                    crowded.append(worker.name)
                else:
                    self.results.append(self._result(worker, number))
            return crowded
        finally:
            for worker in workers:
                worker.close()

    def _start(self, names: Sequence[str]) -> list[WorkerProcess]:
        workers = []
        for name in names:
            workers.append(WorkerProcess(self.case, name, self.device, self.plan))
            if not self.plan.together:
                workers[-1].first_step_s = workers[-1].wait(self.plan.build_s).get("first_step_s")
                self._release(workers[-1])
        if self.plan.together:
            for worker in workers:
                worker.wait(self.plan.build_s)
            for worker in workers:
                self._release(worker)
        return workers

    def _release(self, worker: WorkerProcess) -> None:
        """A short turn that nobody looks at; it ends with unused memory given back."""
        if not worker.error:
            worker.send({"time": 2, "at_least_s": 0.0})
            worker.wait(self.plan.build_s)

    def _turns(self, workers: list[WorkerProcess]) -> None:
        for number in range(self.plan.rounds):
            for worker in workers if number % 2 == 0 else reversed(workers):
                if worker.error:
                    continue
                worker.send({"time": self.plan.steps, "at_least_s": self.plan.turn_s})
                answer = worker.wait(self.plan.build_s, self.watch, self.load)
                worker.times_ms += answer.get("times_ms", [])
                worker.peak = answer.get("peak_memory_bytes")

    def _phases(self, workers: list[WorkerProcess]) -> None:
        """Phases of each contender, after all turns: a measurement that fails costs no result."""
        for worker in workers:
            if self.plan.phases and not worker.error:
                worker.send({"phases": self.plan.phases})
                worker.phases_ms = worker.wait(self.plan.build_s).get("phases_ms")
                worker.error = "" if worker.times_ms else worker.error

    def _shares(self, seconds: float) -> tuple[float | None, float | None]:
        """MFU and share of the floor of a step; None where the card's peaks are not known.

        Raises:
            ConfigError: above 100 %, with the input that is wrong.
        """
        spec = present(self.device.index or 0) if self.device.type == "cuda" else None
        if spec is None or self.case.precision not in spec.tflops:
            return None, None
        precision = check_precision(spec, self.case.precision)
        cost = step_cost(self.case.model, batch=self.case.batch, context=self.case.context, precision=precision)
        floor_s = floor_of(cost.ops, table_rates(spec, precision)).seconds
        if floor_s > seconds:
            raise ConfigError(
                f"a step of {seconds * 1e3:.4g} ms is shorter than its floor of {floor_s * 1e3:.4g} ms: what it moves "
                "stayed in the cache, or not all of the step was timed"
            )
        used = step_utilisation(cost, seconds, spec, precision)
        return used.mfu, floor_s / seconds

    def _result(self, worker: WorkerProcess, group: int) -> ContenderResult:
        if worker.error:
            return ContenderResult(name=worker.name, group=group, error=worker.error)
        timing = summarise(worker.times_ms)
        try:
            mfu, floor_share = self._shares(timing.median_ms / 1e3)
        except ConfigError as error:
            return ContenderResult(name=worker.name, group=group, error=str(error))
        return ContenderResult(
            name=worker.name,
            group=group,
            tokens_per_s=self.case.tokens / timing.median_ms * 1e3,
            windows_per_s=self.case.batch / timing.median_ms * 1e3,
            step_ms=timing.median_ms,
            spread=timing.spread,
            mfu=mfu,
            floor_share=floor_share,
            peak_memory_bytes=worker.peak,
            phases_ms=worker.phases_ms,
            first_step_s=worker.first_step_s,
        )


def run_bench(case: Workload, contenders: Sequence[str], device: torch.device, plan: Plan | None = None) -> Record:
    """Measures `contenders` on `case` and returns the record.

    Raises:
        ConfigError: an unknown or repeated contender; none at all.
    """
    names = [find_contender(name).name for name in contenders]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"name one or more different contenders, got {', '.join(names) or 'none'}")
    watch = monitor(device)
    bench = _Bench(case, device, plan or (Plan() if device.type == "cuda" else CPU_PLAN), watch)
    before = watch.read() if watch else None
    anchors = [name for name in ANCHORS if name in names]
    others = [name for name in names if name not in anchors]
    groups, number = [[*anchors, *others]], 0  # anchors first, while there is memory
    while groups:
        members = groups.pop(0)
        crowded = bench.group(members, number)
        number += 1
        if crowded and len(crowded) < len(members) - len(anchors):
            groups.append([*anchors, *crowded])
        elif len(crowded) > 1:  # none but anchors fitted: one at a time
            groups += [[*anchors, name] for name in crowded]
        elif crowded:
            groups.append(crowded)
    after = watch.read() if watch else None
    clocks = None
    if before and after:
        clocks = {"before": before.to_json(), "during": extremes(bench.load), "after": after.to_json()}
    cuda = device.type == "cuda"
    return Record(
        kind="bench",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        card=torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        gpus=1 if cuda else 0,
        versions=versions(watch),
        clocks=clocks,
        workload=replace(case.info()),
        contenders=bench.results,
    )
