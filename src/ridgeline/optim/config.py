"""Settings of the optimiser and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.errors import ConfigError, nearest

ALGORITHMS = ("adamw", "muon")


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
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum must be in [0, 1), got {self.momentum}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"optimizer.lr must be positive and finite, got {self.lr}")
        if not 0 <= self.floor <= self.lr:
            raise ConfigError(f"optimizer.floor must be between 0 and lr={self.lr}, got {self.floor}")
        if self.warmup < 0:
            raise ConfigError(f"optimizer.warmup must be 0 or more steps, got {self.warmup}")
        if not 0 <= self.stable < 1:
            raise ConfigError(f"optimizer.stable must be in [0, 1), got {self.stable}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"optimizer.eps must be positive and finite, got {self.eps}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay must be 0 or more and finite, got {self.weight_decay}")
        if not self.clip >= 0:
            raise ConfigError(f"optimizer.clip must be 0 or more, got {self.clip}")

    def at_rate(self, lr: float) -> OptimizerConfig:
        """The same settings with another peak learning rate and the floor in proportion."""
        return replace(self, lr=lr, floor=self.floor * lr / self.lr)
