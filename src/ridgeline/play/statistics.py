"""Intervals of 95 %: Wilson's for a rate, the bootstrap's for a mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Interval of a rate (Wilson 1927): never beyond [0, 1], and wider than a point at 0 and at 1."""
    rate, weight = successes / trials, Z**2 / trials
    centre = (rate + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * (rate * (1 - rate) / trials + weight / (4 * trials)) ** 0.5
    # at 0 and at 1 the bound is exact, which rounding would miss
    return centre - half if successes else 0.0, centre + half if successes < trials else 1.0


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Interval of a mean: percentiles of the means of RESAMPLES resamples, always the same ones."""
    sample = np.asarray(values, np.float64)
    picks = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.percentile(sample[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
