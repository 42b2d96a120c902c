"""From plain values, as JSON and TOML hold them, to config dataclasses: every key known, every value of its type."""

from __future__ import annotations

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ridgeline.errors import ConfigError, nearest

T = TypeVar("T")
NONE = "none"  # what stands for None where the format has no null


def read(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """The config dataclass of a whole dict.

    Args:
        kind: which; its annotations decide, nested configs, tuples and unions of configs included.
        values: setting → value; those with a default may be missing.
        path: what to call the dict in an error, with dots.

    Raises:
        ConfigError: it is no dict, a setting is unknown or missing, or a value cannot be.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'what is read'} must be a table of settings, got {reprlib.repr(values)}")
    kinds = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ConfigError(f"{nearest(key, fields, 'setting')}{f' (in {path})' if path else ''}")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in values and not optional:
            raise ConfigError(f"the setting {name!r} is missing{f' in {path}' if path else ''}; add it")
    return kind(**{key: convert(kinds[key], value, f"{path}.{key}" if path else key) for key, value in values.items()})


def convert(kind: Any, value: Any, path: str) -> Any:
    """`value`, as JSON or TOML gives it, as the annotated type `kind`.

    Raises:
        ConfigError: it cannot be; names it by `path`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, path)
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(value) != len(arguments):
            raise ConfigError(f"{path} must have {len(arguments)} entries, got {len(value)}")
        return tuple(convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(arguments, value, strict=True)))
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return read(kind, value, path)  # type: ignore[arg-type]
    if origin is typing.Literal:
        kind = str  # its own config says which words it takes
    if origin is dict:
        kind = dict
    if kind is float and type(value) is int:
        return float(value)
    if not (isinstance(kind, type) and isinstance(value, kind)) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {_describe(kind)}, got {value!r}")
    return value


def _convert_union(kinds: Sequence[Any], value: Any, path: str) -> Any:
    if type(None) in kinds:
        if value is None or value == NONE:
            return None
        kinds = [kind for kind in kinds if kind is not type(None)]
    configs = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if configs and isinstance(value, Mapping):  # the config whose settings the keys resemble most
        shared = [len(value.keys() & {f.name for f in dataclasses.fields(kind)}) for kind in configs]
        return convert(configs[shared.index(max(shared))], value, path)
    return convert(kinds[0], value, path)


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    return names.get(kind, "a list" if typing.get_origin(kind) is tuple else "a table")
