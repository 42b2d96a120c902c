"""How long the phases of a step take, measured inside the step itself.

A step calls `mark(name)` where a phase begins. Normally that does nothing. To measure, a second program is made with
marks that record an event (inside a captured graph: an event node, so that the graph is timed as it runs) and read
the clock between them. No phase is ever a share of a total.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Mark = Callable[[str], None]
END = "end"


def no_mark(name: str) -> None:
    """The mark of a step that is not being measured."""


class Marks:
    """Marks of one step: the order of phases and when each began.

    Args:
        device: where the step runs.
        captured: the marks become nodes of a CUDA graph, made once and passed at every replay.
    """

    def __init__(self, device: torch.device, *, captured: bool) -> None:
        self.device, self.captured = device, captured
        self._names: list[str] = []
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def __call__(self, name: str) -> None:
        """Marks the beginning of phase `name`, or the end of the step."""
        self._names.append(name)
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True, external=self.captured)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def clear(self) -> None:
        """Forgets the marks of an uncaptured step, before the next one."""
        self._names, self._events, self._times = [], [], []

    def read(self) -> dict[str, float]:
        """Milliseconds by phase of the step that ran last; a phase that came several times is summed. Waits."""
        if self.device.type == "cuda":
            self._events[-1].synchronize()
            spans = [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        else:
            spans = [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]
        found: dict[str, float] = {}
        for name, span in zip(self._names, spans, strict=False):
            found[name] = found.get(name, 0.0) + span
        return found


def measure(run: Callable[[], None], marks: Marks, steps: int) -> dict[str, float]:
    """Median milliseconds of each phase over `steps` runs of a program that calls `marks`.

    Args:
        run: the program, or its replay.
        marks: what the program calls.
        steps: how often it is run; one more run comes first, unread.
    """
    found: list[dict[str, float]] = []
    for _ in range(steps + 1):
        if not marks.captured:
            marks.clear()
        run()
        found.append(marks.read())
    names = list(found[0])
    return {name: sorted(phases[name] for phases in found[1:])[steps // 2] for name in names}
