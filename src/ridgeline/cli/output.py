"""What verbs share: parsing, and the two forms of output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


def parse(kind: type[T], arguments: Sequence[str], verb: str, about: str | None = None) -> T:
    """The arguments of a verb as a dataclass; prints help or a mistake with its nearest cure, and exits.

    Args:
        kind: the dataclass; its documentation explains the options.
        arguments: of the verb.
        verb: as the user writes it.
        about: what the help begins with; None for the dataclass's own documentation.
    """
    return tyro.cli(kind, args=list(arguments), prog=f"ridgeline {verb}", description=about)


def emit(values: Mapping[str, Any], *, as_json: bool, title: str) -> None:
    """Print a verb's result on standard output: as one line of JSON, or as a table."""
    if as_json:
        print(json.dumps(values), flush=True)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _readable(value))
    Console().print(table)


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)
