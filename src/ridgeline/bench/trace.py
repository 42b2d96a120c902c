"""What ran on the card: the kernels of a profiler trace, how much they overlapped, and the time between them.

Reads the Chrome trace that torch.profiler writes. A GPU event names its launch by a "correlation"; whose launch that
was is told by the innermost operator that was running on the launching thread at that instant. PyTorch marks its own
phases: autograd's nodes run inside `autograd::engine::evaluate_function`, an update inside `Optimizer.step`.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.cost import Phase
from ridgeline.ops.scope import PREFIX

GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = {"cpu_op", "user_annotation"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
BACKWARD = "autograd::engine::evaluate_function"
UPDATE = "Optimizer.step"
STEP = "ProfilerStep"

Shape = tuple[int, ...]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill.

    Attributes:
        name: as the profiler gives it.
        kind: "kernel", "gpu_memcpy" or "gpu_memset".
        start, duration: microseconds on the trace's clock.
        stream: CUDA stream.
        operator: the operator that launched it; empty where the trace does not say.
        shapes: that operator's input shapes.
        phase: of the step; None where the launch is not in the trace or launched a whole graph.
        update: launched inside the optimiser's own step.
        scope: the op that the code says it works for (ops/scope.py); empty where it says nothing.
    """

    name: str
    kind: str
    start: float
    duration: float
    stream: int
    operator: str = ""
    shapes: tuple[Shape, ...] = ()
    phase: Phase | None = None
    update: bool = False
    scope: str = ""

    @property
    def end(self) -> float:
        """Microseconds at which it ended."""
        return self.start + self.duration


class Spans:
    """Stretches of time, asked whether an instant lies in one of them."""

    def __init__(self, spans: Iterable[Interval]) -> None:
        self._merged = merge(spans)
        self._starts = [start for start, _ in self._merged]

    def __contains__(self, instant: float) -> bool:
        index = bisect.bisect_right(self._starts, instant) - 1
        return index >= 0 and instant <= self._merged[index][1]

    @property
    def ends(self) -> list[float]:
        """Where each stretch ends, in order."""
        return [end for _, end in self._merged]


def merge(spans: Iterable[Interval]) -> list[Interval]:
    """Intervals in order, overlapping and touching ones joined."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _span(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event.get("dur", 0)


def _shapes(event: dict[str, Any]) -> tuple[Shape, ...]:
    dims = event.get("args", {}).get("Input Dims", [])
    return tuple(tuple(dim) for dim in dims if dim and all(isinstance(size, int) for size in dim))


class _Phases:
    """Which phase of its step an instant on a host thread belongs to."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        backward, updates, steps = defaultdict(list), [], []
        for event in events:
            name = event.get("name", "")
            if event.get("cat") not in HOST:  # annotations appear on the card's timeline too, at another time
                continue
            if name.startswith(BACKWARD):
                backward[event["tid"]].append(_span(event))
            elif name.startswith(UPDATE):
                updates.append(_span(event))
            elif name.startswith(STEP):
                steps.append(_span(event))
        self.backward = {tid: Spans(spans) for tid, spans in backward.items()}
        self.updates = Spans(updates)
        self.steps = sorted(steps)
        self._step_starts = [start for start, _ in self.steps]
        ends = sorted(end for spans in self.backward.values() for end in spans.ends)
        self._last_backward = [self._last(ends, step) for step in self.steps]

    @staticmethod
    def _last(ends: list[float], step: Interval) -> float | None:
        index = bisect.bisect_right(ends, step[1]) - 1
        return ends[index] if index >= 0 and ends[index] >= step[0] else None

    def of(self, instant: float, tid: Any) -> Phase:
        """Backward inside an autograd node, optimizer after the step's last, else forward."""
        if instant in self.updates:
            return "optimizer"
        if instant in self.backward.get(tid, ()):
            return "backward"
        index = bisect.bisect_right(self._step_starts, instant) - 1
        last = self._last_backward[index] if index >= 0 else None
        return "optimizer" if last is not None and instant > last else "forward"


def _launchers(operators: Sequence[dict[str, Any]], launches: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The innermost operator around each launch, by the launch's correlation."""
    by_thread: dict[Any, list[tuple[float, int, float, dict[str, Any]]]] = defaultdict(list)
    for event in operators:
        start, end = _span(event)
        by_thread[event.get("tid")].append((start, 0, -end, event))
    for event in launches:
        by_thread[event.get("tid")].append((event["ts"], 1, 0.0, event))
    found = {}
    for entries in by_thread.values():
        running: list[dict[str, Any]] = []
        for instant, kind, _, event in sorted(entries, key=lambda entry: entry[:3]):
            while running and _span(running[-1])[1] < instant:
                running.pop()
            if kind == 0:
                running.append(event)
            elif running:
                found[event["args"]["correlation"]] = running[-1]
    return found


def read_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a Chrome trace in order of their start."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    operators = _launchers([event for event in events if event.get("cat") == "cpu_op"], list(launches.values()))
    named = [e for e in events if e.get("cat") == "user_annotation" and e.get("name", "").startswith(PREFIX)]
    scopes = _launchers(named, list(launches.values()))
    phases = _Phases(events)
    kernels = []
    for event in events:
        if event.get("cat") not in GPU:
            continue
        arguments = event.get("args", {})
        correlation = arguments.get("correlation", -1)
        launch = launches.get(correlation)
        if launch is not None and "GraphLaunch" in launch["name"]:
            launch = None  # it launched a whole graph, and says nothing of its kernels
        operator = operators.get(correlation, {}) if launch is not None else {}
        scope = scopes.get(correlation, {}) if launch is not None else {}
        kernels.append(
            Kernel(
                name=event["name"],
                kind=event["cat"],
                start=event["ts"],
                duration=event.get("dur", 0),
                stream=arguments.get("stream", 0),
                operator=operator.get("name", ""),
                shapes=_shapes(operator),
                phase=None if launch is None else phases.of(launch["ts"], launch.get("tid")),
                update=launch is not None and launch["ts"] in phases.updates,
                scope=scope.get("name", "").removeprefix(PREFIX),
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.start)


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """How a stretch of kernels filled its time; microseconds.

    Attributes:
        elapsed: from the first start to the last end.
        busy: time in which at least one kernel ran.
        overlapped: time in which more than one ran.
        kernel_sum: durations added up.
        gaps: times without a kernel, the longest first.
        kernels: how many.
    """

    elapsed: float
    busy: float
    overlapped: float
    kernel_sum: float
    gaps: tuple[float, ...]
    kernels: int

    @property
    def overlap(self) -> float:
        """Share of the busy time in which more than one kernel ran."""
        return self.overlapped / self.busy if self.busy else 0.0

    @property
    def idle(self) -> float:
        """Time between kernels."""
        return self.elapsed - self.busy


def occupation(kernels: Sequence[Kernel]) -> Occupation:
    """Sweep over starts and ends of kernels: how long none, one, or more than one ran."""
    edges = sorted(
        (instant, step)
        for kernel in kernels
        if kernel.duration > 0
        for instant, step in ((kernel.start, 1), (kernel.end, -1))
    )
    busy = overlapped = 0.0
    gaps: list[float] = []
    running, before = 0, edges[0][0] if edges else 0.0
    for instant, step in edges:  # at one instant ends (−1) sort before starts, so touching kernels do not overlap
        passed = instant - before
        if running == 0 and passed > 0:
            gaps.append(passed)
        busy += passed if running else 0.0
        overlapped += passed if running > 1 else 0.0
        running, before = running + step, instant
    return Occupation(
        elapsed=edges[-1][0] - edges[0][0] if edges else 0.0,
        busy=busy,
        overlapped=overlapped,
        kernel_sum=sum(kernel.duration for kernel in kernels),
        gaps=tuple(sorted(gaps, reverse=True)),
        kernels=len(kernels),
    )


def profile(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """The Chrome trace of `steps` steps; one more is run first, under the profiler, to set it up."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with tempfile.TemporaryDirectory(prefix="ridgeline-trace-") as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for number in range(1 + steps):
                step()
                if cuda and number in (0, steps):  # what the first step left running is not the others'
                    torch.cuda.synchronize()
                profiler.step()
        return json.loads(path.read_text(errors="replace"))
