"""Configs by name, where a study, a benchmark or an account of costs asks for a model.

gpt2-c256                        a preset
mine.toml                        a file of settings, as `train --config` takes it
gpt2-c256+norm=rmsnorm+bias=false  with settings changed: of the model's decoder by their plain names, others
                                 by dotted path (optimizer.lr=2e-3)
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline import files
from ridgeline.errors import ConfigError, nearest
from ridgeline.models import DecoderConfig
from ridgeline.presets.boxing import boxing, boxing_fast
from ridgeline.presets.hal import hal_5m, hal_20m
from ridgeline.presets.language import fast_c256, gpt2_124m, gpt2_c256, shakespeare_fast
from ridgeline.train.config import TrainConfig
from ridgeline.train.settings import merge, override, read_toml

PRESETS: Mapping[str, Callable[[], TrainConfig]] = {
    "gpt2-c256": gpt2_c256,
    "fast-c256": fast_c256,
    "shakespeare-fast": shakespeare_fast,
    "gpt2-124m": gpt2_124m,
    "hal-20m": hal_20m,
    "hal-5m": hal_5m,
    "boxing": boxing,
    "boxing-fast": boxing_fast,
}
DECODER = tuple(field.name for field in dataclasses.fields(DecoderConfig))


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


def find_config(name: str) -> TrainConfig:
    """The config that `name` stands for: a preset or a file of settings, with changes behind it.

    Raises:
        ConfigError: there is no such preset or file, or a change that cannot be.
    """
    base, *changes = name.split("+")
    if base.endswith(".toml"):
        written = read_toml(base)
        if "preset" not in written:
            raise ConfigError(f'{base} names no preset to build on; add a line such as preset = "gpt2-c256"')
        config = override(preset(written.pop("preset")), written)
    else:
        config = preset(base)
    values: dict[str, Any] = {}
    for change in changes:  # all at once: a shorter context and its shorter window go together
        values = merge(values, _nested(change, name))
    return override(config, values)


def _nested(change: str, name: str) -> dict[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key or not text:
        raise ConfigError(f"{change!r} in {name} is no change; write it as +setting=value, such as +norm=rmsnorm")
    path = f"model.decoder.{key}" if key in DECODER else key
    try:
        value: Any = files.parsed(f"value = {text}", tomllib.loads)["value"]
    except ValueError:
        value = text  # a word
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]
