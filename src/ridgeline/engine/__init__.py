"""The step engine: a model, a loss and an optimiser run as one program.

Flat fp32 master weights with copies in the precision of computation, gradients in one flat buffer, and the whole
step in one CUDA graph with its schedule, counters and seeds on the device.
"""

from ridgeline.engine.distributed import Replicas
from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.lanes import choose_lanes
from ridgeline.engine.precision import PRECISIONS, Precision, find_precision
from ridgeline.engine.slots import matrices_decay
from ridgeline.engine.step import TrainStep
from ridgeline.engine.update import LossScale, StepMetrics, Update

__all__ = [
    "PRECISIONS",
    "FlatParameters",
    "LossScale",
    "Precision",
    "Replicas",
    "StepMetrics",
    "TrainStep",
    "Update",
    "choose_lanes",
    "find_precision",
    "matrices_decay",
]
