"""A contender in a process of its own: builds its step, keeps it warm, and times some steps whenever it is told.

The parent writes one JSON object a line on standard input and reads one a line from the file descriptor given as
the argument; standard output stays free for whatever libraries print.

    {"build": {workload, contender, device}}  → {"first_step_s", "warm_steps"}
    {"time": K, "at_least_s": S}              → {"times_ms": [...], "peak_memory_bytes"}
    {"phases": K}                             → {"phases_ms": {...}}
    anything that fails                       → {"error"}, and the process ends
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.contenders import TorchStep, build_step, find_contender
from ridgeline.bench.timing import time_steps, warm_up
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import TrainStep

SETTLE = 3  # untimed steps of a turn: clocks and caches come back after the others' turns


class Worker:
    """What lives between two commands."""

    def __init__(self) -> None:
        self.step: Callable[[], object] | None = None
        self.train: TorchStep | TrainStep | None = None
        self.batch: dict[str, Tensor] = {}
        self.device = torch.device("cpu")

    def build(self, *, workload_args: dict[str, Any], contender: str, device: str, warm_s: float) -> dict[str, Any]:
        """Builds and warms the step up; the first step counts from the start of building it."""
        self.device = torch.device(device)
        case = workload(**workload_args)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # the context is not the contender's cost
        self.batch = batch = random_batch(case, self.device)
        start = time.perf_counter()
        self.train = train = build_step(find_contender(contender), case, self.device)
        self.step = lambda: train(batch)
        self.step()
        self._wait()
        first = time.perf_counter() - start
        return {"first_step_s": first, "warm_steps": warm_up(self.step, self.device, limit_s=warm_s)}

    def time(self, count: int, at_least_s: float) -> dict[str, Any]:
        """Times `count` steps, or as many as fill `at_least_s`, after a few that do not count.

        Afterwards memory that is not used between steps goes back to the card.
        """
        assert self.step is not None
        settled_ms = min(time_steps(self.step, SETTLE, self.device))
        count = max(count, int(1e3 * at_least_s / settled_ms))
        times = time_steps(self.step, count, self.device)
        peak = None
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
        return {"times_ms": times, "peak_memory_bytes": peak}

    def phases(self, count: int) -> dict[str, Any]:
        """Measures the phases of a step over `count` steps."""
        assert self.train is not None
        return {"phases_ms": self.train.phases(self.batch, count)}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Does what a command says."""
        if "build" in command:
            return self.build(**command["build"])
        return (
            self.phases(command["phases"]) if "phases" in command else self.time(command["time"], command["at_least_s"])
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    """Serves commands until standard input ends."""
    worker = Worker()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = worker.answer(command)
            except Exception as error:
                text = str(error).strip()
                answer = {"error": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:500]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if "error" in answer:
                return


if __name__ == "__main__":
    main()
