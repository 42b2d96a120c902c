"""Presets: functions that return whole training configs."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.errors import ConfigError, nearest
from ridgeline.presets.boxing import boxing
from ridgeline.presets.hal import hal_5m, hal_20m
from ridgeline.presets.language import fast_c256, gpt2_124m, gpt2_c256
from ridgeline.train.config import TrainConfig

PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "gpt2-c256": gpt2_c256,
    "fast-c256": fast_c256,
    "gpt2-124m": gpt2_124m,
    "hal-20m": hal_20m,
    "hal-5m": hal_5m,
    "boxing": boxing,
}


def preset(name: str) -> TrainConfig:
    """The config of the preset called `name`.

    Raises:
        ConfigError: there is none; says which are near.
    """
    if not isinstance(name, str):  # a file of settings can hold anything
        raise ConfigError(f'preset must be a name in quotes, such as "{next(iter(PRESETS))}", got {name!r}')
    if name not in PRESETS:
        raise ConfigError(nearest(name, PRESETS, "preset"))
    return PRESETS[name]()


__all__ = ["PRESETS", "boxing", "fast_c256", "gpt2_124m", "gpt2_c256", "hal_5m", "hal_20m", "preset"]
