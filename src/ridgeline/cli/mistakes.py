"""What is wrong with a command line, in one sentence; the parser's own words fill a box."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tyro.conf import FlagCreatePairsOff, Positional

from ridgeline.cli.flags import UNSET

KINDS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Option:
    """An option or a positional argument.

    Attributes:
        name: as the user writes it, such as --model.decoder.width.
        kinds: of its values, in their order.
        many: whether it takes any number of values of its one kind.
        optional: whether it may be unset, by a word for nothing.
        flag: whether it stands for true or false and takes no value.
        blank: whether its value may be empty: it is by itself.
    """

    name: str
    kinds: tuple[Any, ...]
    many: bool = False
    optional: bool = False
    flag: bool = False
    blank: bool = False


class Place(typing.NamedTuple):
    """A positional argument: its name, whether it must be there, and whether any number of them may be."""

    name: str
    required: bool
    many: bool


def find_mistake(kind: type, arguments: Sequence[str], verb: str, fixed: Mapping[str, str]) -> str | None:
    """The first mistake in the arguments of a verb, or None.

    Args:
        kind: the dataclass that the arguments fill.
        arguments: of the verb.
        verb: as the user writes it.
        fixed: names of options that do not exist, and why; those that begin with `NAME.` are meant as well.
    """
    options, positionals = _describe(kind, "")
    help_ = f"see ridgeline {verb} --help"
    rest, given = list(arguments), 0
    while rest:
        word = rest.pop(0)
        if not _names_option(word):
            given += 1
            if given > len(positionals) and not (positionals and positionals[-1].many):
                return f"unexpected argument {word!r}; leave it out or name its option, {help_}"
            if not word:
                return f"{positionals[min(given, len(positionals)) - 1].name} is empty; {help_}"
            continue
        name, equals, value = word.partition("=")
        option = options.get(name.replace("_", "-"))
        if option is None:
            return _unknown(name, options, fixed, help_)
        mistake = _check(option, [value] if equals else _take(option, rest), attached=bool(equals))
        if mistake:
            return mistake
    missing = [place.name for place in positionals[given:] if place.required]
    return f"{missing[0]} is missing; give it first: ridgeline {verb} {' '.join(missing)}" if missing else None


def _describe(kind: type, prefix: str) -> tuple[dict[str, Option], list[Place]]:
    """The options of a dataclass by name, short ones included, and its positional arguments."""
    options: dict[str, Option] = {}
    positionals: list[Place] = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        notes: tuple[Any, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, notes = hint.__origin__, hint.__metadata__
        name = f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(hint):
            flat = any(getattr(note, "name", None) == "" for note in notes)
            options |= _describe(hint, prefix if flat else f"{name}.")[0]  # type: ignore[arg-type]
        elif Positional in notes:
            many = typing.get_origin(hint) is tuple
            positionals.append(Place(field.name.upper(), field.default is dataclasses.MISSING, many))
        else:
            shorts = [short for note in notes for short in getattr(note, "aliases", None) or ()]
            blank = field.default == ""
            options |= {spelling: _option(spelling, hint, blank) for spelling in (f"--{name}", *shorts)}
            if hint is bool and FlagCreatePairsOff not in notes:
                negated = f"--{prefix}no-{field.name}".replace("_", "-")
                options[negated] = _option(negated, bool)
    return options, positionals


def _option(name: str, hint: Any, blank: bool = False) -> Option:
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint, optional = kinds[0], len(kinds) < len(typing.get_args(hint))
    if hint is bool:
        return Option(name, (), flag=True)
    if typing.get_origin(hint) is tuple:
        kinds = list(typing.get_args(hint))
        many = kinds[-1] is Ellipsis
        return Option(name, tuple(kinds[:1] if many else kinds), many=many)
    return Option(name, (hint,), optional=optional, blank=blank)


def _names_option(word: str) -> bool:
    """Whether a word is an option; a negative number is a value."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _take(option: Option, rest: list[str]) -> list[str]:
    """The values of an option, taken from the words that follow it."""
    taken: list[str] = []
    while rest and (option.many or len(taken) < len(option.kinds)) and not _names_option(rest[0]):
        taken.append(rest.pop(0))
    return taken


def _check(option: Option, values: list[str], *, attached: bool) -> str | None:
    if option.flag:
        return f"{option.name} takes no value; leave it out" if attached else None
    if option.many:
        kinds: Sequence[Any] = option.kinds * len(values)
    else:
        kinds = option.kinds
        if len(values) < len(kinds):
            wanted = _words(kinds[0]) if len(kinds) == 1 else f"{len(kinds)} values"
            return f"{option.name} needs {wanted} after it, got {' '.join(values) or 'nothing'}"
    for kind, value in zip(kinds, values, strict=True):
        if kind is str and not value and not option.blank:
            return f"{option.name} needs a value after it, got an empty one"
        if not (option.optional and value in UNSET) and not _fits(kind, value):
            return f"{option.name} must be {_words(kind)}, got {value!r}"
    return None


def _fits(kind: Any, value: str) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind in KINDS:
        try:
            kind(value)
        except ValueError:
            return False
    return True


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    return KINDS.get(kind, "a value")


def _unknown(name: str, options: Mapping[str, Option], fixed: Mapping[str, str], help_: str) -> str:
    plain = name.replace("_", "-")
    for known, reason in fixed.items():
        if plain == known or plain.startswith(f"{known}."):
            return f"{known} {reason}"
    bare = {option.removeprefix("--"): option for option in options}  # the dashes are alike in all
    close = [bare[near] for near in difflib.get_close_matches(plain.lstrip("-"), bare, n=3, cutoff=0.6)]
    # a setting may be known by its last name alone: --lr for --optimizer.lr
    close = close or [option for option in options if option.endswith(f".{plain.lstrip('-')}")][:3]
    return f"unknown option {name}; " + (f"did you mean {' or '.join(close)}?" if close else help_)
