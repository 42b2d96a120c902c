"""A contender's processes as the benchmark sees them: one a card, told the same, heard one after another."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ridgeline.bench.nvml import Clocks, Monitor
from ridgeline.bench.plan import Plan
from ridgeline.bench.workloads import Workload

POLL_S = 0.1
GRACE_S = 10.0  # seconds a worker has to end by itself
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RIDGELINE_CACHE", "CUDA_CACHE_PATH")
"""Everything that keeps what was compiled: each contender has its own, empty ones, so that no order can matter."""


class WorkerProcess:
    """One process: commands go to its standard input, answers come back through a pipe of their own."""

    def __init__(self, extra: Mapping[str, str], caches: Path | None) -> None:
        self.error = ""
        self._folder = tempfile.mkdtemp(prefix="ridgeline-bench-")
        self._log: IO[bytes] = open(Path(self._folder) / "log", "w+b")  # noqa: SIM115
        read, write = os.pipe()
        environment = {**os.environ, **extra}
        if caches is not None:
            environment |= {variable: str(caches / variable.lower()) for variable in CACHES}
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

    def send(self, command: Mapping[str, Any]) -> None:
        """Gives a command; the answer is taken with `wait`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.error = self.error or self._death()

    @property
    def answers(self) -> IO[str]:
        """What can be waited for."""
        return self._answers

    def read(self) -> dict[str, Any]:
        """The answer, once there is one or the process is gone; an empty one with `error` set if it failed."""
        line = "" if self.error else self._answers.readline()
        if not line:
            self.error = self.error or self._death()
            return {}
        answer = json.loads(line)
        self.error = answer.get("error", "")
        return {} if self.error else answer

    def _death(self) -> str:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "the process closed its answers and went on"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with {self._process.returncode}: {lines[-1][:300] if lines else 'no output'}"

    def dismiss(self) -> None:
        """Tells the process that nothing more comes, upon which it ends by itself; `close` waits for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, and took an unread command with it
            self._process.stdin.close()

    def close(self, *, kill: bool = False) -> None:
        """Ends the process.

        Args:
            kill: do not wait for it to end by itself.
        """
        self.dismiss()
        try:
            self._process.wait(0 if kill else GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Team:
    """A contender: its processes, one a card, and what they have said so far.

    Attributes:
        name: the contender.
        error: why it has no result; empty while it has.
        first_step_s: seconds of its first step, where nobody else ran.
        times_ms: of every timed step.
        peak: most bytes that tensors held on the first card.
        phases_ms, groups_ms_per_layer, overlap: as in a record.
    """

    def __init__(self, case: Workload, contender: str, device: torch.device, plan: Plan, gpus: int) -> None:
        self.name, self.error = contender, ""
        self.first_step_s: float | None = None
        self.times_ms: list[float] = []
        self.peak: int | None = None
        self.phases_ms: dict[str, float] | None = None
        self.groups_ms_per_layer: dict[str, float] | None = None
        self.overlap: float | None = None
        self._caches = Path(tempfile.mkdtemp(prefix="ridgeline-caches-"))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(gpus)}
        self._workers: list[WorkerProcess] = []
        for rank in range(gpus):
            ranks = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if gpus > 1 else {}
            self._workers.append(WorkerProcess(ranks, None if plan.together else self._caches))
        sizes = {"name": case.name, "batch": case.batch, "context": case.context, "precision": case.precision}
        for rank, worker in enumerate(self._workers):
            place = f"cuda:{rank}" if gpus > 1 and device.type == "cuda" else str(device)
            told = {"workload_args": sizes, "contender": contender, "device": place, "warm_s": plan.warm_s}
            worker.send({"build": {**told, "alone": not plan.together}})

    def send(self, command: Mapping[str, Any]) -> None:
        """Gives all processes a command."""
        for worker in self._workers:
            worker.send(command)

    def wait(self, limit_s: float, watch: Monitor | None = None, seen: list[Clocks] | None = None) -> dict[str, Any]:
        """The first process' answer once all have answered; an empty one with `error` set as soon as one has failed.

        Args:
            limit_s: longest time.
            watch, seen: a card that is read meanwhile, and where to.
        """
        end, answers = time.monotonic() + limit_s, dict[WorkerProcess, dict[str, Any]]()
        self.error = self.error or next((worker.error for worker in self._workers if worker.error), "")
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
            while selector.get_map() and not self.error:
                ready = selector.select(POLL_S)
                for key, _ in ready:
                    answers[key.data] = key.data.read()
                    self.error = self.error or key.data.error
                    selector.unregister(key.fileobj)
                if not ready and watch is not None and seen is not None:
                    seen.append(watch.read())
                if not ready and time.monotonic() > end:
                    self.error = f"no answer within {limit_s:.0f} s"
                    self._stop()  # what it still does would be on the card under the others' turns
        return {} if self.error else answers[self._workers[0]]

    def _stop(self) -> None:
        for worker in self._workers:
            worker.close(kill=True)

    def dismiss(self) -> None:
        """Tells the processes that nothing more comes."""
        for worker in self._workers:
            worker.dismiss()

    def close(self) -> None:
        """Ends the processes and removes their caches."""
        for worker in self._workers:
            worker.close(kill=bool(self.error) and len(self._workers) > 1)
        shutil.rmtree(self._caches, ignore_errors=True)

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed for want of device memory."""
        return "out of memory" in self.error.lower()


def close_all(teams: Collection[Team]) -> None:
    """Ends several teams beside each other: a process takes seconds to let go of a card and of its compilers."""
    for team in teams:
        team.dismiss()
    for team in teams:
        team.close()
