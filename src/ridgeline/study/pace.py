"""How long a step of a run takes with nothing else at work: what a study puts on its axis of seconds."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from ridgeline import files
from ridgeline.bench.timing import time_steps, warm_up
from ridgeline.data.api import load_dataset
from ridgeline.engine import TrainStep
from ridgeline.study.contenders import device_of
from ridgeline.study.folder import write_whole
from ridgeline.train.config import TrainConfig
from ridgeline.train.engines import build_model, make_step
from ridgeline.train.stages import Course, stages_of

WARM_SECONDS = 2.0
TURN_SECONDS = 0.3
LEAST_STEPS = 5


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, timed alone, in each stage of a run: (step at which the stage ends, seconds)."""

    stages: tuple[tuple[int, float], ...]

    def seconds(self, steps: int) -> float:
        """Training seconds of the first `steps` steps."""
        total, done = 0.0, 0
        for end, step_s in self.stages:
            taken = max(0, min(steps, end) - done)
            total, done = total + taken * step_s, done + taken
        return total

    @property
    def step_s(self) -> float:
        """Seconds of a step in the last stage."""
        return self.stages[-1][1]


def pace_of(config: TrainConfig, file: Path) -> Pace:
    """Median seconds of a step, batches included, set-up and validations not; kept in `file` and timed once.

    Args:
        config: the run, with device, precision and engine decided.
        file: in a folder that exists.
    """
    stages = stages_of(config)
    kept = _read(file)
    if kept is None or len(kept) != len(stages):
        kept = Stopwatch(config).time()
        keep_pace(kept, file)
    return Pace(tuple((stage.end, step_s) for stage, step_s in zip(stages, kept, strict=True)))


def keep_pace(step_s: list[float], file: Path) -> None:
    """Write the seconds of a step of each stage to where `pace_of` looks for them."""
    write_whole(file, json.dumps({"step_s": step_s}))


def _read(file: Path) -> list[float] | None:
    try:
        return [float(value) for value in files.parsed(file.read_text(encoding="utf-8"))["step_s"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, or damaged: it is only a measurement, and is made again


class Stopwatch:
    """A run's steps, ready to be timed; to make ready takes longer than to time.

    Args:
        config: the run, with device, precision and engine decided.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._device = device_of(config)
        self._step = make_step(build_model(config), config)
        self._course = Course(config, load_dataset(config.data))
        self._course.settle(config, self._step, 0)

    def time(self) -> list[float]:
        """Median seconds of a step of each stage; once."""
        found, begins = [], 0
        for stage in self._course.stages:
            self._course.enter(begins)
            warm_up(self._learn, self._device, limit_s=WARM_SECONDS)
            first = statistics.median(time_steps(self._learn, LEAST_STEPS, self._device))
            count = max(LEAST_STEPS, int(1e3 * TURN_SECONDS / first))
            found.append(statistics.median(time_steps(self._learn, count, self._device)) / 1e3)
            begins = stage.end
        return found

    def _learn(self) -> None:
        if self._course.resident is not None and isinstance(self._step, TrainStep):
            self._step(self._course.resident)
        else:
            self._step(self._course.batches.next())
