"""Configs as nested dicts and TOML, and changes to a config by key.

TOML has no null: a setting that is None is written as the string "none", so that a file says everything.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ridgeline import files
from ridgeline.errors import ConfigError, nearest, reason
from ridgeline.models.reader import NONE, convert, read
from ridgeline.train.config import STOPS, TrainConfig

T = TypeVar("T")


def to_dict(config: object) -> dict[str, Any]:
    """A config as nested dicts and lists that JSON and TOML can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # type: ignore[call-overload]


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The TrainConfig of a whole dict (`to_dict`'s).

    Raises:
        ConfigError: a key is unknown or missing, or a value cannot be.
    """
    return read(TrainConfig, values)


def override(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The config with some values replaced; naming one of steps, tokens and minutes unsets the other two.

    Raises:
        ConfigError: a key is unknown, or a value cannot be.
    """
    if any(values.get(stop) not in (None, NONE) for stop in STOPS):
        values = {**dict.fromkeys(STOPS), **values}
    return _override(config, values, "", config)


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts joined; where both name a value the second's holds."""
    joined = dict(first)
    for key, value in second.items():
        nested = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
        joined[key] = merge(joined[key], value) if nested else value
    return joined


def read_toml(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return files.parsed(Path(file).read_text(encoding="utf-8"), tomllib.loads)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings {file} cannot be read ({reason(error)}); give a readable TOML file") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def to_toml(config: object) -> str:
    """A config as TOML, every setting named."""
    return "\n".join(_table(to_dict(config), "")).lstrip("\n") + "\n"


def _table(values: Mapping[str, Any], path: str) -> list[str]:
    plain = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    lines = [*(["", f"[{path}]"] if path else []), *plain]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _table(value, f"{path}.{key}" if path else key)
    return lines


def _literal(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_literal(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # numbers, booleans and strings are written alike in both


def _override(config: T, values: Mapping[str, Any], path: str, whole: TrainConfig) -> T:
    kinds = typing.get_type_hints(type(config))
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    changes = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{_unknown(key, known, whole)}{f' (in {path})' if path else ''}")
        current, where = getattr(config, key), f"{path}.{key}" if path else key
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            changes[key] = _override(current, value, where, whole)
        else:
            changes[key] = convert(kinds[key], value, where)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def _paths(config: object, path: str = "") -> Iterator[str]:
    """Every setting of a config as a dotted path."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}"


def _unknown(key: str, known: list[str], whole: TrainConfig) -> str:
    """The sentence for a setting that is not there, which may be one of another place: lr is optimizer.lr."""
    names = {path.rpartition(".")[2]: path for path in _paths(whole)} | {name: name for name in known}
    close = [key] if key in names else difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    if not close:
        return nearest(key, known, "setting")
    return f"unknown setting {key!r}; did you mean {' or '.join(names[name] for name in close)}?"
