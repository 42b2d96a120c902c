"""Training: config, loop, exact resume, metrics and guards."""

from ridgeline.errors import DivergedError
from ridgeline.train.config import TrainConfig
from ridgeline.train.loop import TrainResult, resume, train

__all__ = ["DivergedError", "TrainConfig", "TrainResult", "resume", "train"]
