"""A benchmark record as text."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.bench.explain_view import amount
from ridgeline.bench.ratios import SUBJECT, baselines, over_pytorch, ratio
from ridgeline.records import ContenderResult, Record

REFERENCE = "compile+graph"
NONE = "–"


def _reference(record: Record, group: int) -> str | None:
    """What the others of a group are compared with: `compile+graph`, or without it the fastest PyTorch contender."""
    found = [other.name for other in baselines(record, group)]
    return REFERENCE if REFERENCE in found else next(iter(found), None)


def against(result: ContenderResult, record: Record) -> str:
    """Speed against the reference of the same group: "1.84×", or "≈" where the spread swallows the difference."""
    over = _reference(record, result.group)
    found = None if over is None else ratio(record, result.name, over, result.group)
    return "" if found is None else str(found)


def _cell(value: float | None, scale: float, form: str) -> str:
    return NONE if value is None else format(value * scale, form)


def _amount(value: float | None) -> str:
    return NONE if value is None else amount(value)


COLUMNS: tuple[tuple[str, Callable[[ContenderResult], str]], ...] = (
    ("ms", lambda r: _cell(r.step_ms, 1, ".3f")),
    ("± %", lambda r: _cell(r.spread, 100, ".1f")),
    ("tokens/s", lambda r: _amount(r.tokens_per_s)),
    ("windows/s", lambda r: _amount(r.windows_per_s)),
    ("MFU %", lambda r: _cell(r.mfu, 100, ".1f")),
    ("TB/s", lambda r: _cell(r.bytes_per_s, 1e-12, ".2f")),
    ("mem %", lambda r: _cell(r.bandwidth, 100, ".1f")),
    ("floor %", lambda r: _cell(r.floor_share, 100, ".1f")),
    ("GiB", lambda r: _cell(r.peak_memory_bytes, 2**-30, ".1f")),
    ("first s", lambda r: _cell(r.first_step_s, 1, ".1f")),
)
"""What a timed contender's line says; a column that nobody has something for is left out."""


def _rows(record: Record) -> list[list[str]]:
    """Headers, then a line a contender; one that failed ends with its reason."""
    several = any(result.gpus is not None for result in record.contenders)
    timed = [result for result in record.contenders if result.error is None]
    compared = any(against(result, record) for result in timed)
    shown = [(title, cell) for title, cell in COLUMNS if any(cell(result) != NONE for result in timed)]
    titles = [*(["cards"] if several else []), *(title for title, _ in shown), *(["× ref"] if compared else [])]
    rows = [["contender", "group", *titles]]
    for result in record.contenders:
        place = [result.name, str(result.group), *([str(result.gpus)] if several else [])]
        if result.error is None:
            ratios = [against(result, record)] if compared else []
            rows.append([*place, *(cell(result) for _, cell in shown), *ratios])
        else:
            rows.append([*place, result.error])
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    """Names to the left, numbers to the right, the reason of a failure as long as it is."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in whole) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=False))]
        lines.append("  ".join([*cells[: len(row) - 1], row[-1] if row not in whole else cells[-1]]).rstrip())
    return lines


def table(record: Record) -> str:
    """What was run, where, and one line a contender."""
    info, clocks = record.workload, record.clocks or {}
    title = "" if info is None else f"{info.name}  batch {info.batch}  context {info.context}  {info.precision}"
    where = f"{record.card}  torch {record.versions.get('torch', '?')}  {record.date}  {(record.git or '')[:9]}"
    lines = [title, where]
    during = clocks.get("during")
    if during:
        lines.append(f"clock {_range(during['sm_mhz'])} MHz  power {_range(during['power_w'])} W  "
                     f"throttled by: {', '.join(during['throttle']) or 'nothing'}")  # fmt: skip
    lines += _aligned(_rows(record))
    references = {_reference(record, result.group) for result in record.contenders if against(result, record)}
    lines += [f"× ref: over {name} of the same group" for name in sorted(map(str, references))]
    over = over_pytorch(record)
    if over is not None:
        lines.append(f"{SUBJECT} against PyTorch's best: {over} over {over.over} (group {over.group})")
    return "\n".join(lines)


def _range(values: list[float] | None) -> str:
    return "?" if values is None else f"{values[0]:.0f}–{values[1]:.0f}"
