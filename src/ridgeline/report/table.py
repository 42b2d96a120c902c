"""Tables and numbers as the page shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.bench.explain_view import amount

NONE = "–"
LONG = 32  # letters that a name has on one line


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        text: what it says.
        share: length of the bar behind it, from 0 to 1; None for no bar.
        number: aligned to the right.
        wide: a sentence, which may take the rest of the row.
    """

    text: str
    share: float | None = None
    number: bool = True
    wide: bool = False

    @property
    def long(self) -> bool:
        """Whether it takes several lines, so that what stands beside it can be seen."""
        return not self.number and not self.wide and len(self.text) > LONG

    @property
    def parts(self) -> list[str]:
        """A long name's, each of which stays on one line if it can: the changes of a preset begin with a "+"."""
        return re.split(r"(?<=.)(?=\+)", self.text)


def words(text: str, *, wide: bool = False) -> Cell:
    """A cell of words."""
    return Cell(text=text, number=False, wide=wide)


def number(value: float | None, form: str = ".3g", *, scale: float = 1, share: float | None = None) -> Cell:
    """A cell with a number, or a dash where there is none."""
    return Cell(text=NONE if value is None else format(value * scale, form), share=share)


def quantity(value: float | None) -> Cell:
    """A cell with three digits and a decimal prefix."""
    return Cell(text=NONE if value is None else amount(value))


def anything(value: str | float | bool | None) -> Cell:
    """A cell for a value of which nothing more is known."""
    if isinstance(value, bool):
        return words("yes" if value else "no")
    if isinstance(value, str):
        return words(value)
    return quantity(value) if value is not None and abs(value) >= 1e4 else number(value, ".4g")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headers and rows; a row may end early with a wide cell."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def without_empty(self) -> Table:
        """The table without columns that hold nothing but dashes."""
        full = [row for row in self.rows if len(row) == len(self.headers)]
        kept = [i for i in range(len(self.headers)) if not full or any(row[i].text != NONE for row in full)]
        return Table(
            headers=[self.headers[i] for i in kept],
            rows=[[row[i] for i in kept] if len(row) == len(self.headers) else row for row in self.rows],
        )

    def markdown(self) -> str:
        """The table for a document in Markdown."""
        full = [row for row in self.rows if len(row) == len(self.headers)] or self.rows
        right = [all(row[i].number for row in full if len(row) > i) for i in range(len(self.headers))]
        lines = [
            f"| {' | '.join(self.headers)} |",
            f"|{'|'.join('--:' if numeric else '---' for numeric in right)}|",
        ]
        for row in self.rows:
            cells = [cell.text.replace("|", "\\|") for cell in row]
            cells += [""] * (len(self.headers) - len(cells))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)
