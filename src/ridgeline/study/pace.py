"""How long a step of a run takes with nothing else at work: what a study puts on its axis of seconds."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import torch

from ridgeline.bench.timing import time_steps, warm_up
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Batches
from ridgeline.engine import TrainStep
from ridgeline.study.folder import write_whole
from ridgeline.train.config import TrainConfig
from ridgeline.train.engines import build_model, make_step, resident_batches

WARM_SECONDS = 2.0
TURN_SECONDS = 0.5
LEAST_STEPS = 5


def step_seconds(config: TrainConfig, file: Path) -> float:
    """Median seconds of a step, batches included, set-up and validations not; kept in `file` and timed once.

    Args:
        config: the run, with device, precision and engine decided.
        file: in a folder that exists.
    """
    try:
        kept = float(json.loads(file.read_text(encoding="utf-8"))["step_s"])
        if math.isfinite(kept) and kept > 0:
            return kept
    except (OSError, ValueError, TypeError, KeyError):
        pass  # not there, or damaged: it is only a measurement, and is made again
    found = _measure(config)
    write_whole(file, json.dumps({"step_s": found}))
    return found


def _measure(config: TrainConfig) -> float:
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    step = make_step(build_model(config), config)
    batches = Batches(load_dataset(config.data), config.window, batch=config.batch, seed=config.seed)
    resident = resident_batches(config, step, batches)

    def learn() -> None:
        if resident is not None and isinstance(step, TrainStep):
            step(resident)
        else:
            step(batches.next())

    warm_up(learn, device, limit_s=WARM_SECONDS)
    first = statistics.median(time_steps(learn, LEAST_STEPS, device))
    return statistics.median(time_steps(learn, max(LEAST_STEPS, int(1e3 * TURN_SECONDS / first)), device)) / 1e3
