"""`explain --measure` for a terminal: measured beside floor."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.bench.explain_view import amount, micros
from ridgeline.bench.fitted import FittedTable, notes
from ridgeline.bench.kernel_map import EITHER
from ridgeline.bench.measure import LISTED, MeasureResult
from ridgeline.hardware.spec import GIB

LABEL = 9  # width of what each note begins with
BEYOND = "> 100%"


def _share(floor: float | None, seconds: float) -> str:
    """Floor over measured; above 1 that is no share, and is not given as one."""
    if not floor or not seconds:
        return "–"
    return f"{floor / seconds:.0%}" if floor <= seconds else BEYOND


def _rows(result: MeasureResult) -> FittedTable:
    rows: list[tuple[Sequence[str], bool]] = []
    total = sum(row.seconds for row in result.rows)
    phase: str | None = ""
    for row in result.rows:
        if row.phase != phase:
            phase = row.phase
            mine = [r for r in result.rows if r.phase == phase]
            seconds, floor = sum(r.seconds for r in mine), sum(r.floor_s or 0 for r in mine)
            share, kernels = f"{seconds / total:.0%}", f"{sum(r.kernels for r in mine):.0f}"
            title = phase or "phase not told"
            rows.append(((title, micros(seconds), share, micros(floor), _share(floor, seconds), kernels), True))
        name = f"  {row.name}".replace(EITHER, f"\n{EITHER}")  # ops that share a row, each on its line
        floor_us = "–" if row.floor_s is None else micros(row.floor_s)
        if row.seconds == 0:  # its work rides in another op's kernels
            rows.append(((name, "–", "–", floor_us, "–", "–"), False))
            continue
        share, kernels = f"{row.seconds / total:.1%}", f"{row.kernels:.0f}"
        cells = (name, micros(row.seconds), share, floor_us, _share(row.floor_s, row.seconds), kernels)
        rows.append((cells, False))
    return FittedTable(
        headers=("op", "measured µs", "share", "floor µs", "floor /\nmeasured", "kernels"),
        rows=rows,
        spare=("kernels", "share", "floor /\nmeasured", "floor µs"),
    )


def render_measured(result: MeasureResult) -> RenderableType:
    """The measurement for a terminal."""
    case, spec, used, steps = result.explained.case, result.explained.spec, result.occupation, result.steps
    seconds, floor = result.seconds, result.explained.floor_s
    share = result.utilisation
    known = f", MFU {share.mfu:.1%}" if share else ""
    memory = f" ({share.bandwidth:.0%} of the bandwidth)" if share and share.bandwidth else ""
    heading = Text(
        f"{case.name}, batch {case.batch} × {case.context}, {case.precision}, engine {result.engine}, on {spec.name}",
        style="bold",
    )
    lines = [
        f"step     {micros(seconds)} µs (spread {result.timing.spread:.1%}): {amount(case.tokens / seconds)} tokens/s"
        f"{known}, {amount(result.bytes_per_s, 'B/s')}{memory}; its floor is {micros(floor)} µs, "
        f"{floor / seconds:.0%} of it; memory {result.peak_bytes / GIB:.2f} GiB",
        f"profile  {micros(used.elapsed / steps / 1e6)} µs a step, of which {micros(used.idle / steps / 1e6)} µs "
        f"between kernels (longest gap {used.gaps[0] if used.gaps else 0:.0f} µs); {used.kernels / steps:.0f} kernels "
        f"of {micros(used.kernel_sum / steps / 1e6)} µs; {used.overlap:.1%} of the busy time overlapped",
    ]
    lost = sum(seconds for _, seconds in result.unmapped)
    if result.unmapped:
        lines.append(f"unmapped {micros(lost)} µs a step:")
        lines += [f"         {micros(seconds)} µs  {name[:100]}" for name, seconds in result.unmapped[:LISTED]]
    table = _rows(result)
    if any(BEYOND in cells for cells, _ in table.rows):
        lines.append(
            f"{BEYOND}   part of that op's work is in another op's kernels, or its tensors stayed in the cache"
        )
    return Group(heading, Text(""), table, Text(""), notes(lines, LABEL))
