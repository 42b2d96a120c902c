"""What verbs share: parsing, and the two forms of output."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from ridgeline.cli.flags import SPECS
from ridgeline.cli.mistakes import find_mistake
from ridgeline.errors import ConfigError

T = TypeVar("T")
HELP = {"-h", "--help"}
NARROWEST = 40  # columns of a help; in a few columns the parser's layout would never end
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


def parse(
    kind: type[T],
    arguments: Sequence[str],
    verb: str,
    about: str | None = None,
    fixed: Mapping[str, str] | None = None,
) -> T:
    """The arguments of a verb as a dataclass; help is printed, and ends the process.

    Args:
        kind: the dataclass; its documentation explains the options.
        arguments: of the verb.
        verb: as the user writes it.
        about: what the help begins with; None for the dataclass's own documentation.
        fixed: names of options that do not exist, and why.

    Raises:
        ConfigError: a mistake, with its nearest cure.
    """
    if not HELP & set(arguments):
        mistake = find_mistake(kind, arguments, verb, fixed or {})
        if mistake:
            raise ConfigError(mistake)
    about = _paragraphs(about or (inspect.getdoc(kind) or "").partition("\nAttributes:")[0])
    help_, said = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(help_), redirect_stderr(said), SPECS, _columns(_width()):
            return tyro.cli(kind, args=list(arguments), prog=f"ridgeline {verb}", description=about)
    except SystemExit as leaving:
        if leaving.code in (0, None):
            print(_wrapped(help_.getvalue()))
            raise
        words = " ".join("".join(c for c in said.getvalue() if not "\u2500" <= c <= "\u257f").split())
        raise ConfigError(f"{words}; see ridgeline {verb} --help") from leaving


def _width() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


@contextmanager
def _columns(width: int) -> Iterator[None]:
    """A terminal of so many columns, for whoever asks inside the `with` block."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _paragraphs(text: str) -> str:
    """Documentation with each paragraph and each item of a list on one line, for `_wrapped` to break anew."""
    return re.sub(r"(?<=[^\n])\n(?!\n|- ) *", " ", text.strip())


def _wrapped(text: str) -> str:
    """The parser's help as wide as the terminal: it breaks the lines of its boxes itself, but not those above them."""
    width = _width()
    text = re.sub(r" *\(default:\s*\)", "", re.sub(r"\n{3,}", "\n\n", text.rstrip()))
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        boxed = "\u2500" <= line[:1] <= "\u257f"
        lines.append(line if boxed else textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines)


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
