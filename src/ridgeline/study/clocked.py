"""Training on a clock: one contender trains for so many seconds and leaves a checkpoint at each time of a grid.

The clock counts training alone. It stands still while the step is prepared (one lane measured against two, compilation
and capture, whose seconds are noted apart), during validation, and while a checkpoint is written. The learning rate
follows the clock, so a contender ends its schedule with the race however many steps it took.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline import checkpoint, files
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Batches, Validation
from ridgeline.data.resident import ResidentBatches, fits
from ridgeline.engine import TrainStep
from ridgeline.errors import DivergedError, RidgelineError, enough_memory
from ridgeline.models.reader import read
from ridgeline.ops._triton.support import triton_missing
from ridgeline.optim import learning_rate
from ridgeline.study.circumstances import machine
from ridgeline.study.contenders import device_of
from ridgeline.study.folder import claimed, write_whole
from ridgeline.train import state
from ridgeline.train.config import TrainConfig, engine_called
from ridgeline.train.engines import build_model, make_step
from ridgeline.train.guards import writing
from ridgeline.train.lanes import settle_lanes
from ridgeline.train.settings import from_dict
from ridgeline.train.validate import Evaluation

POINTS = "points.jsonl"
MACHINES = "machines.jsonl"
FAILURE = "failure.txt"
AHEAD = 4  # steps that the host may be ahead of the card
LOOK_SECONDS = 2.0  # between looks at the loss
WARM_UP = 2  # steps that are taken back: the first compiles and captures, the second finds all of it done
SIGN_SECONDS = 5.0
ORPHAN_SECONDS = 120.0  # that what is left of a killed study may take to notice, a slow step and its checkpoint


@dataclass(frozen=True, kw_only=True)
class Point:
    """A contender at a time of the grid.

    Attributes:
        at: the time of the grid, seconds of training.
        seconds: of training, as measured: the step that was under way at `at` is finished first.
        steps: optimisation steps.
        samples: windows learned from.
        tokens: positions learned from.
        train_loss: of the last step, nats; None before the first.
        val_loss: over the held-out games, nats.
        setup_s: seconds until the first step could be taken: imports not counted, compilation, capture and the
            measurement of lanes counted.
        checkpoint: checksum of the checkpoint's tensors.
    """

    at: float
    seconds: float
    steps: int
    samples: int
    tokens: int
    train_loss: float | None
    val_loss: float
    setup_s: float
    checkpoint: str


class Task(NamedTuple):
    """What a process needs to train a contender.

    Attributes:
        settings: its config as a dict.
        folder: its own.
        grid: times of the checkpoints in seconds of training, ascending; the last one ends the training.
        threads: to compute with on the CPU.
    """

    settings: dict[str, Any]
    folder: str
    grid: tuple[float, ...]
    threads: int


def train_on_clock(task: Task, ready: Callable[[], object] = lambda: None) -> Generator[Point | None, None, None]:
    """Train a contender, from its last checkpoint on if there is one, and yield each point as its checkpoint is there.

    None now and then is a sign of life. A training that comes to numbers that are not finite ends there, and its reason
    is noted (`read_failure`): that is a result of the race.

    Args:
        task: what is trained.
        ready: called when the step is prepared; the clock starts when it returns.

    Raises:
        RidgelineError: it cannot be trained; points that were reached are kept.
    """
    torch.set_num_threads(task.threads)
    folder = Path(task.folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with claimed(folder, ORPHAN_SECONDS), enough_memory("lower the contender's batch"):
        done = read_points(folder)
        begin = folder / checkpoint_name(done[-1].at if done else 0.0)
        config = from_dict(task.settings)
        run = _Clocked(_as_begun(config, begin) if done else config, folder)
        if not done:
            state.write_config(folder, run.config)
            yield run.leave(0.0)
        run.prepare(begin)
        told = {"from": round(run.progress.seconds, 3), "lanes": run.lanes, **machine(run.config)}
        _append(folder / MACHINES, json.dumps(told))
        ready()
        try:
            for at in task.grid[len(done) or 1 :]:
                while run.progress.seconds < at:
                    run.advance(at, 60 * (run.config.minutes or 0.0))
                    yield None
                yield run.leave(at)
        except DivergedError as error:
            write_whole(folder / FAILURE, f"{error}\n")


def _as_begun(config: TrainConfig, begin: Path) -> TrainConfig:
    """A config with the number of lanes that the training of a checkpoint began with."""
    lanes = state.config_of(checkpoint.load(begin)).lanes
    return config if config.lanes else dataclasses.replace(config, lanes=lanes or engine_called(config.engine).lanes)


def checkpoint_name(at: float) -> str:
    """Name of the folder of a checkpoint at a time of the grid, which no other time has."""
    short = f"at-{at:08.1f}s"
    return short if float(f"{at:.1f}") == at else f"at-{at!r}s"


def read_failure(folder: Path) -> str | None:
    """Why a contender's training ended before its time; None where it did not."""
    file = folder / FAILURE
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def read_points(folder: Path) -> list[Point]:
    """The points that a contender has reached, in order.

    Raises:
        RidgelineError: the file is damaged.
    """
    file = folder / POINTS
    try:
        return [read(Point, values) for values in _lines(file)]
    except ValueError as error:
        raise _damaged(file, error) from error


def read_machines(folder: Path) -> list[dict[str, Any]]:
    """Where a contender was trained: a line each time that its training began or went on.

    Each has "from", the seconds of training before it, "lanes", their number and how it came about, and what
    `ridgeline.study.circumstances.machine` says.

    Raises:
        RidgelineError: the file is damaged.
    """
    file = folder / MACHINES
    try:
        found = list(_lines(file))
        if not all(isinstance(line, dict) and _tells_where(line) for line in found):
            raise ValueError("a line does not say where")
    except ValueError as error:
        raise _damaged(file, error) from error
    return found


def _tells_where(line: dict[str, Any]) -> bool:
    """Whether a line says when and on what a training began, in a form that a record can take."""
    kinds = {"date": str, "git": str | None, "card": str, "versions": dict}
    if not all(name in line and isinstance(line[name], kind) for name, kind in kinds.items()):
        return False
    return datetime.fromisoformat(line["date"]).tzinfo is not None


def _damaged(file: Path, error: Exception) -> RidgelineError:
    return RidgelineError(f"{file} is damaged ({error}); delete {file.parent} and train this contender anew")


def _lines(file: Path) -> Iterator[Any]:
    """What the whole lines of a file say; none where there is no file."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield files.parsed(line)


def _append(file: Path, line: str) -> None:
    """Add a line behind the last whole one: what an interruption left of another is written over."""
    with writing(file.parent), file.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(line.encode() + b"\n")


class _Clocked:
    """One contender in this process."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.folder, self.device = folder, device_of(config)
        self.data = load_dataset(config.data)
        self.batches = Batches(self.data, config.window, batch=config.batch, seed=config.seed)
        started = time.perf_counter()
        self.config, self.lanes = settle_lanes(config, self.batches)
        self.setup_s = time.perf_counter() - started
        torch.manual_seed(config.seed)
        self.model = build_model(self.config)
        self.step = make_step(self.model, self.config)
        self.resident = _resident(self.batches, self.device)
        self._seed_step = torch.zeros(2, dtype=torch.int64, device=self.device)  # for a step that does not count
        part, windows = config.batch // config.accumulation, config.eval_windows
        validation = Validation(self.data, config.window, batch=part, windows=windows)
        self.evaluation = Evaluation(self.step, validation, self.device)
        self.progress = state.Progress()
        self._looked = 0.0

    def prepare(self, begin: Path) -> None:
        """Compile and capture by steps that are taken back, to the state of the checkpoint `begin`."""
        started = time.perf_counter()
        for _ in range(WARM_UP):
            self._learn()
        self._wait()
        self.setup_s += time.perf_counter() - started
        self.progress = state.restore(checkpoint.load(begin), self.config, self.model, self.step, self.batches)

    def advance(self, until: float, total: float) -> None:
        """Train for a few seconds at most, and not beyond `until`."""
        progress, before = self.progress, self.progress.seconds
        under_way: deque[torch.cuda.Event] = deque()
        begun = time.perf_counter()
        until = min(until, before + SIGN_SECONDS)
        while progress.seconds < until:
            self.step.set_rate(learning_rate(self.config.optimizer, progress.step, progress.seconds / total))
            self._learn()
            progress.step += 1
            progress.tokens += self.config.step_tokens
            if self.device.type == "cuda":
                under_way.append(torch.cuda.Event())
                under_way[-1].record()
                if len(under_way) > AHEAD:
                    under_way.popleft().synchronize()
            progress.seconds = before + time.perf_counter() - begun
            if progress.seconds - self._looked > LOOK_SECONDS:
                self._looked = progress.seconds
                self.step.check()
        self._wait()
        progress.seconds = before + time.perf_counter() - begun

    def _learn(self) -> None:
        """A step on the next batch, which a card draws itself: so no engine waits for the host's loader."""
        if self.resident is None:
            self.step(self.batches.next())
            return
        if isinstance(self.step, TrainStep):
            self.step(self.resident)
        else:
            self._seed_step[1] = self.progress.step
            self.resident.draw(self._seed_step)
            self.step(dict(self.resident.tensors))
        self.batches.skip()

    def leave(self, at: float) -> Point:
        """Validate, write the checkpoint and the point; no clock runs."""
        progress = self.progress
        if progress.step:
            self.step.check()
            progress.train_loss = self.step.metrics(progress.step - 1)[-1].loss
        progress.val_loss = self.evaluation()
        if not math.isfinite(progress.val_loss):
            raise DivergedError(f"the held-out loss at step {progress.step} is {progress.val_loss}")
        path = self.folder / checkpoint_name(at)
        state.content(self.config, progress, self.model, self.step, self.batches, self.data).write(path)
        point = Point(
            at=at,
            seconds=round(progress.seconds, 3),
            steps=progress.step,
            samples=progress.step * self.config.batch,
            tokens=progress.tokens,
            train_loss=progress.train_loss,
            val_loss=progress.val_loss,
            setup_s=round(self.setup_s, 2),
            checkpoint=checkpoint.digest(path),
        )
        _append(self.folder / POINTS, json.dumps(asdict(point)))
        return point

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _resident(batches: Batches, device: torch.device) -> ResidentBatches | None:
    """The data on the card, where there is one that can hold it and gather from it."""
    usable = device.type == "cuda" and triton_missing(device) is None and fits(batches, device)
    return ResidentBatches(batches, device) if usable else None


def grid_until(total: float, times: Sequence[float]) -> tuple[float, ...]:
    """The times before `total`, ascending, 0 before them and `total` behind."""
    return (0.0, *sorted({float(at) for at in times if 0 < at < total}), float(total))
