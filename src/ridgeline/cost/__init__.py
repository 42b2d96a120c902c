"""Cost: the vocabulary (FLOPs, bytes, floor), the roofline, and utilisation of a card."""

from ridgeline.cost.op import INSTRUCTION, PHASES, SPECIAL, OpCost, Phase, StepCost, Storage, storage
from ridgeline.cost.roofline import (
    Bound,
    Floor,
    Rates,
    floor,
    floor_of,
    measured_rates,
    overlapped_floor,
    table_rates,
    times,
)
from ridgeline.cost.utilisation import Utilisation, bandwidth_share, mfu, step_utilisation

__all__ = [
    "INSTRUCTION",
    "PHASES",
    "SPECIAL",
    "Bound",
    "Floor",
    "OpCost",
    "Phase",
    "Rates",
    "StepCost",
    "Storage",
    "Utilisation",
    "bandwidth_share",
    "floor",
    "floor_of",
    "measured_rates",
    "mfu",
    "overlapped_floor",
    "step_utilisation",
    "storage",
    "table_rates",
    "times",
]
