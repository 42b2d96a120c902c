"""One lane or two: what is faster is measured on the spot, and then stays for the run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.engine.feed import tensors_of
from ridgeline.engine.step import TrainStep
from ridgeline.errors import OutOfMemoryError, UnsupportedError

STEPS = 10  # timed steps of a candidate, after as many that are not


def _milliseconds(step: TrainStep, batch: Any) -> float:
    times = []
    for _ in range(2 * STEPS):
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
        start = time.perf_counter()
        step(batch)
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[STEPS:])


def choose_lanes(make: Callable[[int], TrainStep], batch: Any, candidates: Sequence[int] = (1, 2)) -> dict[int, float]:
    """Milliseconds a step on `batch` takes with each number of lanes; the smallest is the one to choose.

    Each candidate trains for a few steps; `make` builds it on weights that may be changed. Another number of lanes
    rounds sums differently, so a run keeps the choice it began with: store it with the run's settings.

    Args:
        make: make(lanes) → a step with that many lanes.
        batch: a batch of the run's shape.
        candidates: numbers to try; those that do not divide the batch are left out, and so are those after the first
            for which the card has too little memory, or which a model cannot be trained with that writes to buffers.
    """
    found: dict[int, float] = {}
    leaves, _ = tensors_of(batch)
    for lanes in candidates:
        step = make(lanes)
        try:
            if len(leaves[0]) % step.cut.pieces == 0:
                found[lanes] = _milliseconds(step, batch)
        except (OutOfMemoryError, UnsupportedError):
            if not found:
                raise
        del step
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found
