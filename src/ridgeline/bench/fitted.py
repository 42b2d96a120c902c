"""Tables that fit the terminal: one too narrow for a table loses whole columns, never part of a name or a figure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

ANY_WIDTH = 1000  # columns of a terminal that has room for everything


@dataclass(frozen=True, kw_only=True)
class FittedTable:
    """Names on the left, figures on the right.

    Attributes:
        headers: of the columns, that of the names first.
        rows: cells, and whether they are a heading of those that follow.
        spare: headers of the columns that a narrow terminal goes without, the first to go first.
        words: headers of columns that hold words and not figures, besides the names.
        wrap: columns to which names may be wrapped before another column goes; None where they may not.
        title: above the table.
    """

    headers: Sequence[str]
    rows: Sequence[tuple[Sequence[str], bool]]
    spare: Sequence[str]
    words: Collection[str] = ()
    wrap: int | None = None
    title: str | None = None

    def _table(self, missing: Collection[str], wrap: int | None) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            title=self.title,
            title_justify="left",
        )
        kept = [index for index, header in enumerate(self.headers) if header not in missing]
        for index in kept:
            header = self.headers[index]
            left = index == 0 or header in self.words
            table.add_column(
                header,
                justify="left" if left else "right",
                overflow="fold",
                no_wrap=index > 0,
                max_width=wrap if index == 0 else None,
            )
        for cells, heading in self.rows:
            table.add_row(*(Text(cells[index]) for index in kept), style="bold" if heading else None)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The widest form that there is room for, and what it went without."""
        wide = options.update(max_width=ANY_WIDTH)

        def width(table: Table) -> int:
            return Measurement.get(console, wide, table).maximum

        forms = [((), None), *((self.spare[:count], self.wrap) for count in range(len(self.spare) + 1))]
        for missing, wrap in forms:
            table = self._table(missing, wrap)
            if width(table) <= options.max_width:
                break
        yield table
        if missing:
            most = width(self._table((), self.wrap))
            lost = ", ".join(header.replace("\n", " ") for header in missing)
            yield Text(f"no room for {lost}: {most} columns would do", style="dim")


def notes(lines: Sequence[str], label: int) -> Table:
    """Lines that begin with a label of `label` characters, which stays alone on the left where they are wrapped."""
    grid = Table.grid()
    grid.add_column(width=label)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(Text(line[:label]), Text(line[label:]))
    return grid
