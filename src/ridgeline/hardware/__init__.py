"""Cards: what they can do by their papers, by their driver, and by measurement on the spot."""

from ridgeline.hardware.cards import CARDS, by_driver_name, card
from ridgeline.hardware.ceilings import Ceilings, load_ceilings, measure_ceilings, save_ceilings
from ridgeline.hardware.driver import DriverReading, present, read_driver, resolve
from ridgeline.hardware.spec import (
    PRECISIONS,
    Accumulate,
    DeviceSpec,
    NumberFormat,
    Precision,
    check_precision,
    default_precision,
)

__all__ = [
    "CARDS",
    "PRECISIONS",
    "Accumulate",
    "Ceilings",
    "DeviceSpec",
    "DriverReading",
    "NumberFormat",
    "Precision",
    "by_driver_name",
    "card",
    "check_precision",
    "default_precision",
    "load_ceilings",
    "measure_ceilings",
    "present",
    "read_driver",
    "resolve",
    "save_ceilings",
]
