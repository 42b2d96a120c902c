"""`explain --measure` for a terminal: measured beside floor."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.bench.explain_view import amount, micros
from ridgeline.bench.measure import LISTED, MeasureResult
from ridgeline.hardware.spec import GIB


def _rows(result: MeasureResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("op")
    for header in ("measured µs", "share", "floor µs", "floor / measured", "kernels"):
        table.add_column(header, justify="right")
    total = sum(row.seconds for row in result.rows)
    phase: str | None = ""
    for row in result.rows:
        if row.phase != phase:
            phase = row.phase
            mine = [r for r in result.rows if r.phase == phase]
            seconds, floor = sum(r.seconds for r in mine), sum(r.floor_s or 0 for r in mine)
            kernels = sum(r.kernels for r in mine)
            ratio = f"{floor / seconds:.0%}" if seconds else "–"
            cells = (micros(seconds), f"{seconds / total:.0%}", micros(floor), ratio, f"{kernels:.0f}")
            table.add_row(phase or "phase not told", *cells, style="bold")
        if row.seconds == 0:  # its work rides in another op's kernels
            table.add_row(f"  {row.name}", "–", "–", micros(row.floor_s or 0), "–", "–")
            continue
        table.add_row(
            f"  {row.name}",
            micros(row.seconds),
            f"{row.seconds / total:.1%}",
            "–" if row.floor_s is None else micros(row.floor_s),
            "–" if row.floor_s is None else f"{row.floor_s / row.seconds:.0%}",
            f"{row.kernels:.0f}",
        )
    return table


def render_measured(result: MeasureResult) -> RenderableType:
    """The measurement for a terminal."""
    case, spec, used, steps = result.explained.case, result.explained.spec, result.occupation, result.steps
    seconds, floor = result.seconds, result.explained.floor_s
    known = f", MFU {result.mfu:.1%}" if spec.tflops else ""
    heading = Text(
        f"{case.name}, batch {case.batch} × {case.context}, {case.precision}, engine {result.engine}, on {spec.name}",
        style="bold",
    )
    lines = [
        f"step     {micros(seconds)} µs (spread {result.timing.spread:.1%}): {amount(case.tokens / seconds)} tokens/s"
        f"{known}; its floor is {micros(floor)} µs, {floor / seconds:.0%} of it; "
        f"memory {result.peak_bytes / GIB:.2f} GiB",
        f"profile  {micros(used.elapsed / steps / 1e6)} µs a step, of which {micros(used.idle / steps / 1e6)} µs "
        f"between kernels (longest gap {used.gaps[0] if used.gaps else 0:.0f} µs); {used.kernels / steps:.0f} kernels "
        f"of {micros(used.kernel_sum / steps / 1e6)} µs; {used.overlap:.1%} of the busy time overlapped",
    ]
    lost = sum(seconds for _, seconds in result.unmapped)
    if result.unmapped:
        lines.append(f"unmapped {micros(lost)} µs a step:")
        lines += [f"         {micros(seconds)} µs  {name[:100]}" for name, seconds in result.unmapped[:LISTED]]
    return Group(heading, _rows(result), *(Text(line) for line in lines))
