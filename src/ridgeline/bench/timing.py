"""Step times that mean something: device events, warm-up until stable, median and spread."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

STABLE = 0.02  # two windows whose medians differ by less than this share are taken as warm
WINDOW = 5  # steps of a warm-up window


@dataclass(frozen=True)
class Timing:
    """Median and spread of step times.

    Attributes:
        median_ms: median milliseconds of a step.
        spread: distance from the 10th to the 90th percentile as a share of the median.
        steps: how many were timed.
    """

    median_ms: float
    spread: float
    steps: int


def summarise(times_ms: Sequence[float]) -> Timing:
    """Median and spread of a list of step times in milliseconds.

    Raises:
        ValueError: fewer than two times.
    """
    if len(times_ms) < 2:
        raise ValueError(f"a spread needs at least two times, got {len(times_ms)}")
    median = statistics.median(times_ms)
    deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
    return Timing(median, (deciles[-1] - deciles[0]) / median, len(times_ms))


def time_steps(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `count` steps run back to back: CUDA events between them, or the clock on a CPU."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def warm_up(
    step: Callable[[], object],
    device: torch.device,
    *,
    limit_s: float = 20.0,
    agree: Callable[[float], float] = float,
) -> int:
    """Runs steps until two windows in a row agree, or for `limit_s` seconds. Returns how many it ran.

    Args:
        step: what to run.
        device: where it runs.
        limit_s: longest time.
        agree: what all processes that train together make of a number; one of them decides whether to go on.
    """
    ran, previous, start, going = 0, 0.0, time.perf_counter(), limit_s > 0
    while going:
        median = statistics.median(time_steps(step, WINDOW, device))
        ran += WINDOW
        stable = previous > 0 and abs(median - previous) <= STABLE * previous
        previous = median
        going = agree(float(not stable and time.perf_counter() - start < limit_s)) > 0
    return ran


def distinct(a: Timing, b: Timing) -> bool:
    """Whether two medians differ by more than half their spreads together, so that their ratio says something."""
    return abs(a.median_ms - b.median_ms) > 0.5 * (a.spread * a.median_ms + b.spread * b.median_ms)
