"""A benchmark record as text."""

from __future__ import annotations

from ridgeline.bench.ratios import baselines, ratio
from ridgeline.records import ContenderResult, Record

REFERENCE = "compile+graph"


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
    return "–" if value is None else format(value * scale, form)


def _line(result: ContenderResult, record: Record) -> str:
    cards = "" if result.gpus is None else f"{result.gpus:>7}"
    if result.error is not None:
        return f"{result.name:<30}{result.group:>5}{cards}  {result.error}"
    return (
        f"{result.name:<30}{result.group:>5}{cards}"
        f"{_cell(result.step_ms, 1, '.3f'):>10}{_cell(result.spread, 100, '.1f'):>7}"
        f"{_cell(result.tokens_per_s, 1e-3, ',.0f'):>11}{_cell(result.windows_per_s, 1, ',.0f'):>11}"
        f"{_cell(result.mfu, 100, '.1f'):>7}{_cell(result.bytes_per_s, 1e-12, '.2f'):>6}"
        f"{_cell(result.bandwidth, 100, '.1f'):>7}{_cell(result.floor_share, 100, '.1f'):>7}"
        f"{_cell(result.peak_memory_bytes, 2**-30, '.1f'):>8}{_cell(result.first_step_s, 1, '.1f'):>9}"
        f"{against(result, record):>8}"
    )


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
    cards = "" if all(result.gpus is None for result in record.contenders) else f"{'cards':>7}"
    lines.append(
        f"{'contender':<30}{'group':>5}{cards}{'ms':>10}{'± %':>7}{'K tok/s':>11}{'windows/s':>11}{'MFU %':>7}"
        f"{'TB/s':>6}{'mem %':>7}{'floor':>7}{'GiB':>8}{'first s':>9}{'× ref':>8}"
    )
    lines += [_line(result, record) for result in record.contenders]
    references = {_reference(record, result.group) for result in record.contenders} - {None}
    return "\n".join([*lines, *(f"× ref: over {name} of the same group" for name in sorted(map(str, references)))])


def _range(values: list[float] | None) -> str:
    return "?" if values is None else f"{values[0]:.0f}–{values[1]:.0f}"
