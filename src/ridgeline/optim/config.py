"""Settings of the optimiser and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.errors import ConfigError, nearest

ALGORITHMS = ("adamw", "muon")


def _demand(name: str, value: Any, holds: Callable[[Any], bool], what: str) -> None:
    try:
        good = holds(value)
    except (TypeError, ValueError, OverflowError):  # no number at all, or an endless one of steps
        good = False
    if not good:
        raise ConfigError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, linear warm-up, a stable phase, cosine decay and clipping of the global gradient norm.

    Attributes:
        algorithm: adamw; or muon for the matrices of the blocks, and AdamW with the same settings for the rest.
        lr: peak learning rate, reached at the end of the warm-up.
        floor: learning rate at the end of the run.
        warmup: optimisation steps from learning rate 0 to `lr`; 0 for none.
        stable: share of the run, warm-up included, before the decay begins; 0 for a plain cosine, about 0.8 for what is
            called warm-up, stable, decay.
        betas: decay rates of the first and second moment, each per step.
        eps: added to the root of the second moment.
        momentum: decay rate of Muon's momentum per step.
        weight_decay: decoupled decay of every tensor with two or more dimensions; others do not decay.
        clip: largest global gradient norm; 0 for no clipping.
    """

    algorithm: str = "adamw"
    lr: float = 1e-3
    floor: float = 0.0
    warmup: int = 0
    stable: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(nearest(self.algorithm, ALGORITHMS, "optimizer.algorithm"))
        for name, holds, what in (
            ("momentum", lambda x: 0 <= x < 1, "in [0, 1)"),
            ("lr", lambda x: 0 < x < math.inf, "positive and finite"),
            ("floor", lambda x: 0 <= x <= self.lr, f"between 0 and lr={self.lr}"),
            ("warmup", lambda x: x >= 0 and x == int(x), "0 or more steps"),
            ("stable", lambda x: 0 <= x < 1, "in [0, 1)"),
            ("betas", lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "two numbers in [0, 1)"),
            ("eps", lambda x: 0 < x < math.inf, "positive and finite"),
            ("weight_decay", lambda x: 0 <= x < math.inf, "0 or more and finite"),
            ("clip", lambda x: x >= 0, "0 or more"),
        ):
            _demand(f"optimizer.{name}", getattr(self, name), holds, what)

    def at_rate(self, lr: float) -> OptimizerConfig:
        """The same settings with another peak learning rate and the floor in proportion."""
        return replace(self, lr=lr, floor=self.floor * lr / self.lr)
