"""Presets: functions that return whole training configs, and configs by name."""

from __future__ import annotations

from ridgeline.presets.boxing import boxing, boxing_fast
from ridgeline.presets.hal import hal_5m, hal_20m
from ridgeline.presets.language import fast_c256, gpt2_124m, gpt2_c256, shakespeare_fast
from ridgeline.presets.named import DECODER, PRESETS, find_config, preset

__all__ = [
    "DECODER",
    "PRESETS",
    "boxing",
    "boxing_fast",
    "fast_c256",
    "find_config",
    "gpt2_124m",
    "gpt2_c256",
    "hal_5m",
    "hal_20m",
    "preset",
    "shakespeare_fast",
]
