"""Training runs of a study: each in a folder of its own, taken up where a study was stopped, read as points."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline import checkpoint, files
from ridgeline.errors import DivergedError, RidgelineError
from ridgeline.study.folder import write_whole
from ridgeline.train import TrainConfig, resume, train
from ridgeline.train.metrics import FILE as METRICS
from ridgeline.train.metrics import read_metrics
from ridgeline.train.state import LAST

RESULT = "result.json"


class StoppedError(RidgelineError):
    """The user stopped a study (SIGINT); what was done is kept."""


@dataclass(frozen=True)
class Point:
    """One validation: steps and tokens trained on, training seconds, held-out loss in nats."""

    step: int
    tokens: int
    seconds: float
    val_loss: float


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        points: its validations, in order.
        error: how it diverged; None for a run that went to its end.
    """

    points: tuple[Point, ...]
    error: str | None = None

    @property
    def final(self) -> float:
        """Held-out loss at the end."""
        return self.points[-1].val_loss

    @property
    def best(self) -> float:
        """Lowest held-out loss."""
        return min(point.val_loss for point in self.points)

    def first_held(self, target: float) -> Point | None:
        """The first of two validations in a row at or below `target`; None where there are none."""
        for point, following in zip(self.points, self.points[1:], strict=False):
            if point.val_loss <= target and following.val_loss <= target:
                return point
        return None


def run_once(config: TrainConfig, folder: Path, console: Console) -> Run:
    """Train a run to its end in `folder`, going on where it was stopped; a finished one is read and not repeated.

    A finished run keeps its settings, metrics and result; its checkpoints are removed, a study has too many.

    Raises:
        StoppedError: SIGINT ended the run.
        RidgelineError: the run could not begin, or not go on; it is no result, and called again it goes on.
    """
    file = folder / RESULT
    if file.exists():
        return _read(file)
    error = None
    try:
        _train(config, folder, console)
    except DivergedError as failure:  # that is a result; a full disk or too little memory is none
        error = str(failure)
    run = Run(_points(folder), error)
    if error is None and not run.points:
        raise RidgelineError(f"{folder} holds no validation; remove it and run again")
    write_whole(file, json.dumps(dataclasses.asdict(run)))
    for weights in (folder / LAST, folder / "best"):
        shutil.rmtree(weights, ignore_errors=True)
    return run


def _train(config: TrainConfig, folder: Path, console: Console) -> None:
    """Train a run to its end, from wherever it was stopped or killed."""
    metrics = folder / METRICS
    if metrics.exists() and any(point.step == config.total_steps for point in _points(folder)):
        return  # killed between its last validation and its result
    # a folder without a whole checkpoint was stopped before the first: it holds nothing to go on with
    if (folder / LAST / checkpoint.HEADER).exists():
        result = resume(folder, console=console)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        result = train(dataclasses.replace(config, out=str(folder)), console=console)
    if result.interrupted:
        raise StoppedError("stopped; the same command goes on from here")


def _points(folder: Path) -> tuple[Point, ...]:
    kept = [entry for entry in read_metrics(folder) if entry.get("val_loss") is not None]
    return tuple(Point(*(entry[key] for key in ("step", "tokens", "seconds", "val_loss"))) for entry in kept)


def _read(file: Path) -> Run:
    try:
        values: dict[str, Any] = files.parsed(file.read_text(encoding="utf-8"))
        return Run(tuple(Point(**point) for point in values["points"]), values["error"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RidgelineError(f"{file} is no result of a run ({error}); remove its folder and run again") from error
