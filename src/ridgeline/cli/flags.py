"""Flags for any config: a mirror of it without its checks, so that mistakes meet the config's own words.

And how the parser reads and shows an option that may be left unset.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

SPECS = ConstructorRegistry()
UNSET = ("none", "None")


@SPECS.primitive_rule
def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """An option that may be unset shows the kind of its value and nothing of the union's alternatives."""
    if info.type_origin not in (types.UnionType, typing.Union):
        return None
    kinds = [kind for kind in typing.get_args(info.type) if kind is not types.NoneType]
    if len(kinds) != 1:
        return None
    plain = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if not isinstance(plain, PrimitiveConstructorSpec):
        return None
    return dataclasses.replace(
        plain,
        instance_from_str=lambda words: None if words[0] in UNSET else plain.instance_from_str(words),
        is_instance=lambda value: value is None or plain.is_instance(value),
        str_from_instance=lambda value: [UNSET[0]] if value is None else plain.str_from_instance(value),
        choices=plain.choices and (*plain.choices, *UNSET),
    )


def mirror(config: Any, *, hidden: Collection[str] = (), unset: Collection[str] = ()) -> Any:
    """An instance of a dataclass with the same fields, documentation and values as `config`, and no checks.

    Args:
        config: a dataclass instance; nested ones are mirrored too.
        hidden: dotted names of fields to leave out.
        unset: names of fields that are None until the user sets them; the help names their value in `config`.
    """
    kinds = typing.get_type_hints(type(config))
    specification: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in hidden:
            continue
        if dataclasses.is_dataclass(value):
            inner = [name.removeprefix(f"{field.name}.") for name in hidden if name.startswith(f"{field.name}.")]
            value = mirror(value, hidden=inner)
            kind: Any = type(value)
        else:
            kind = kinds[field.name]
            hint = f"(default: {UNSET[0] if value in (None, ()) else value})"
            if field.name in unset or value == ():
                kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=hint)]
            value = None if field.name in unset else value
        specification.append((field.name, kind, dataclasses.field(default=value)))
    made = dataclasses.make_dataclass(type(config).__name__, specification, kw_only=True, frozen=True)
    made.__doc__ = type(config).__doc__
    return made()


def changes(before: Any, after: Any) -> dict[str, Any]:
    """What differs between two mirrors of one config, as nested dicts."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(old):
            inner = changes(old, new)
            if inner:
                found[field.name] = inner
        elif old != new:
            found[field.name] = list(new) if isinstance(new, tuple) else new
    return found
