"""The learning rate as a function of how far a run is."""

from __future__ import annotations

import math

from ridgeline.optim.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, progress: float) -> float:
    """The learning rate of a step.

    The cosine runs from `lr` at progress `stable` to `floor` at progress 1; the warm-up scales it by
    (step + 1) / warmup, so that the first step already moves and step `warmup` is the first at the full rate.

    Args:
        config: peak, floor, warm-up and stable phase.
        step: optimisation steps already done.
        progress: share of the run already done, in [0, 1]; beyond 1 the floor holds.
    """
    share = min(max((progress - config.stable) / (1.0 - config.stable), 0.0), 1.0)
    rate = config.floor + (config.lr - config.floor) * 0.5 * (1.0 + math.cos(math.pi * share))
    return rate * min(1.0, (step + 1) / config.warmup) if config.warmup else rate
