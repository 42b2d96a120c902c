"""The interval of a mean of few values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond them the normal's is near enough
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean, and the lower and upper end of its 95 % interval by Student's t; no ends for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    t = T95[len(values) - 2] if len(values) - 2 < len(T95) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
