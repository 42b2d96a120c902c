"""A contender in a process of its own: builds its step, keeps it warm, and times some steps whenever it is told.

The parent writes one JSON object a line on standard input and reads one a line from the file descriptor given as
the argument; standard output stays free for whatever libraries print.

    {"build": {workload, contender, device, …}}  → {"first_step_s", "warm_steps"}
    {"time": K, "at_least_s": S}              → {"times_ms": [...], "peak_memory_bytes"}
    {"phases": K}                             → {"phases_ms": {...}}
    {"profile": K}                            → {"overlap", "groups_ms_per_layer"}; the last command of a contender
    anything that fails                       → {"error"}, and the process ends

Several processes that torchrun's environment joins are told the same; the first one's clock counts for all, so that
each takes as many steps as the others.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.contenders import Step, build_step, find_contender
from ridgeline.bench.layers import kernel_groups
from ridgeline.bench.timing import time_steps, warm_up
from ridgeline.bench.trace import occupation, profile, read_trace
from ridgeline.bench.workloads import Workload, random_batch, workload
from ridgeline.engine import Replicas
from ridgeline.engine.distributed import together

SETTLE = 3  # untimed steps of a turn, where they are short: clocks and caches come back after the others' turns
SHORT_MS = 100.0


class Worker:
    """What lives between two commands."""

    def __init__(self) -> None:
        self.step: Callable[[], object] | None = None
        self.train: Step | None = None
        self.case: Workload | None = None
        self.contender = ""
        self.batch: dict[str, Tensor] = {}
        self.device = torch.device("cpu")
        self.replicas = Replicas()
        self.joined = contextlib.ExitStack()

    def build(
        self, *, workload_args: dict[str, Any], contender: str, device: str, warm_s: float, alone: bool
    ) -> dict[str, Any]:
        """Builds and warms the step up; the first step counts from the start of building it."""
        self.device, self.contender = torch.device(device), contender
        self.case = case = workload(**workload_args)
        self.replicas = self.joined.enter_context(together(self.device.type))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # the context is not the contender's cost
        chosen = find_contender(contender)
        place = torch.device("cpu") if "host" in chosen.variants else self.device
        self.batch = random_batch(case, place, seed=self.replicas.rank)
        self.replicas.exchange(False, 0.0)
        start = time.perf_counter()
        self._take(build_step(chosen, case, self.device, alone=alone))
        self._wait()
        first = time.perf_counter() - start
        return {"first_step_s": first, "warm_steps": warm_up(self._run, self.device, limit_s=warm_s, agree=self._agree)}

    def _take(self, train: Step) -> None:
        """Makes `train` the step to run, and runs it once."""
        self.train = train
        self.step = lambda: train(self.batch)
        self.step()

    def _run(self) -> object:
        assert self.step is not None
        return self.step()

    def _agree(self, number: float) -> float:
        """The first process' number."""
        return number if self.replicas.world == 1 else self.replicas.exchange(False, number)[1]

    def time(self, count: int, at_least_s: float) -> dict[str, Any]:
        """Times `count` steps, or as many as fill `at_least_s`, after a few that do not count.

        Afterwards memory that is not used between steps goes back to the card.
        """
        settled_ms = time_steps(self._run, 1, self.device)[0]
        if self._agree(settled_ms) < SHORT_MS:
            settled_ms = min(time_steps(self._run, SETTLE - 1, self.device))
        count = int(self._agree(max(count, int(1e3 * at_least_s / settled_ms))))
        times = time_steps(self._run, count, self.device)
        peak = None
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.empty_cache()
        return {"times_ms": times, "peak_memory_bytes": peak}

    def phases(self, count: int) -> dict[str, Any]:
        """Measures the phases of a step over `count` steps."""
        assert self.train is not None
        return {"phases_ms": self.train.phases(self.batch, count)}

    def profile(self, count: int) -> dict[str, Any]:
        """Profiles `count` steps as they are run, for their overlap, then call by call, to tell kernels apart."""
        assert self.case is not None
        overlap = occupation(read_trace(profile(self._run, count))).overlap
        chosen = find_contender(self.contender)
        if chosen.settings.capture:
            self._forget()
            self._take(build_step(chosen, self.case, self.device, capture=False))
            self._run()
        kernels = read_trace(profile(self._run, count))
        groups = kernel_groups(kernels, self.case.model, self.case.batch, self.case.context, count)
        return {"overlap": overlap, "groups_ms_per_layer": groups}

    def _forget(self) -> None:
        """Gives the step's memory back."""
        self.train = self.step = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Does what a command says."""
        if "build" in command:
            return self.build(**command["build"])
        if "phases" in command:
            return self.phases(command["phases"])
        if "profile" in command:
            return self.profile(command["profile"])
        return self.time(command["time"], command["at_least_s"])

    def close(self) -> None:
        """Takes leave of the other processes."""
        self._forget()
        self.joined.close()

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
                os._exit(0)  # the others of a team may never come, and to take leave of them would wait for them
    worker.close()


if __name__ == "__main__":
    main()
