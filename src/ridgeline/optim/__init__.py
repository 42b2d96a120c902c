"""Optimisers, schedules and decay groups."""

from ridgeline.optim.adamw import (
    build_adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    set_learning_rate,
)
from ridgeline.optim.config import OptimizerConfig
from ridgeline.optim.muon import hidden_matrices, orthogonalise
from ridgeline.optim.schedule import learning_rate

__all__ = [
    "OptimizerConfig",
    "build_adamw",
    "hidden_matrices",
    "learning_rate",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "orthogonalise",
    "parameter_groups",
    "set_learning_rate",
]
