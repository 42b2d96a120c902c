"""Optimisers, schedules and decay groups."""

from ridgeline.optim.adamw import (
    build_adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    set_learning_rate,
)
from ridgeline.optim.config import OptimizerConfig
from ridgeline.optim.schedule import learning_rate

__all__ = [
    "OptimizerConfig",
    "build_adamw",
    "learning_rate",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "parameter_groups",
    "set_learning_rate",
]
