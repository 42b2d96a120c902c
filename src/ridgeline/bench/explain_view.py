"""`explain` as an engineer reads it: tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.bench.explain import ExplainResult
from ridgeline.bench.fitted import FittedTable, notes
from ridgeline.hardware.spec import GIB, MIB, TERA
from ridgeline.models.accounting import parameters

LABEL = 7  # width of what each note begins with
POWER_LIMITED_W = 75  # what a slot without a power connector gives
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 271 G, 4.30 TB."""
    size, prefix = next(((size, prefix) for size, prefix in _UNITS if abs(value) >= size), (1, ""))
    digits = max(0, 2 - len(str(int(abs(value) / size))) + 1)
    return f"{value / size:.{digits}f} {prefix}{unit}".strip()


def micros(seconds: float) -> str:
    """Seconds as microseconds, to a tenth below a hundred of them."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _ops(result: ExplainResult) -> FittedTable:
    rows: list[tuple[Sequence[str], bool]] = []
    phase = None
    for row in result.rows:
        if row.phase != phase:
            phase = row.phase
            total = sum(r.floor.seconds for r in result.rows if r.phase == phase)
            rows.append(((phase, "", "", "", "", micros(total), f"{total / result.floor_s:.0%}"), True))
        flops = amount(row.executed_flops) if row.executed_flops else f"({amount(row.vector_flops)})"
        cells = (
            f"  {row.name}",
            flops if row.executed_flops or row.vector_flops else "–",
            amount(row.bytes, "B") if row.bytes else "–",
            f"{row.intensity:.0f}",
            row.floor.bound.removesuffix(" units"),
            micros(row.floor.seconds),
            f"{row.share:.1%}",
        )
        rows.append((cells, False))
    return FittedTable(
        headers=("op", "FLOPs", "bytes", "FLOP/B", "bound", "floor µs", "share"),
        rows=rows,
        spare=("FLOP/B", "FLOPs", "bytes", "share", "bound"),
        words=("bound",),
    )


def _step(result: ExplainResult) -> list[str]:
    cost, case, floor = result.cost, result.case, result.floor_s
    lines = [
        f"step   {amount(cost.flops, 'FLOP')} that the model needs ({amount(cost.dense_flops)} with attention's whole "
        f"square, {amount(cost.executed_flops)} done here), {amount(cost.bytes, 'B')}, ≥ {cost.launches} kernels",
        f"floor  {micros(floor)} µs one op after another: {amount(case.tokens / floor)} tokens/s, "
        f"{amount(case.batch / floor)} windows/s; {micros(result.overlapped.seconds)} µs if all overlapped "
        f"({result.overlapped.bound})",
    ]
    if result.measured is not None and result.measured_floor_s is not None and result.ceilings is not None:
        measured = result.measured_floor_s
        lines.append(
            f"       {micros(measured)} µs at what this card reached ({result.measured.matrix / TERA:.0f} TFLOP/s, "
            f"{result.measured.bandwidth / TERA:.2f} TB/s, {result.ceilings.date[:10]}): "
            f"{amount(case.tokens / measured)} tokens/s"
        )
    if result.launch_s is not None:
        lines.append(f"       {micros(result.launch_s)} µs to launch its kernels inside a CUDA graph")
    if result.cached:
        runs = sum(op.count for op in cost.ops)
        lines.append(
            f"       {result.cached} of {runs} op runs work on less than the level-2 cache and may beat their floor"
        )
    if case.algorithm != "adamw":
        lines.append(
            f"update AdamW's, as in bench; {case.name} trains by {case.algorithm}, whose products are not counted"
        )
    if result.rates.vector is None:
        lines.append("       arithmetic outside products is not counted: the card's fp32 rate could not be verified")
    if result.spec.power_w is not None and result.spec.power_w <= POWER_LIMITED_W:
        lines.append(
            f"       a card of {result.spec.power_w} W does not hold its boost clock: expect less than its peaks"
        )
    return lines


def _memory(result: ExplainResult) -> list[str]:
    memory = result.memory
    unit, name_of_it = _unit(memory.peak)
    parts = (
        f"weights {_held(memory.weights, unit)}, optimizer {_held(memory.optimizer, unit)}, "
        f"activations {_held(memory.activations, unit)}, workspace {_held(memory.workspace, unit)}"
    )
    share = memory.peak / result.spec.memory_bytes
    of_card = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    saved = ", ".join(f"{name} {_held(size, unit)}" for name, size in list(memory.saved.items())[:6])
    return [
        f"memory {_held(memory.peak, unit)} {name_of_it} ({of_card} of the card): {parts}",
        f"       kept for the backward pass: {saved}",
    ]


def _unit(size: int) -> tuple[int, str]:
    """Bytes of the unit in which memory of about this size is read well, and its name."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def _held(size: int, unit: int) -> str:
    """An amount of memory in three digits."""
    value = size / unit
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _changes(result: ExplainResult) -> FittedTable:
    unit, name_of_it = _unit(result.memory.peak)
    rows = [
        (
            (
                change.name,
                micros(change.floor_s),
                f"{change.saved:.1%}",
                amount(change.tokens_per_s),
                amount(change.windows_per_s),
                amount(change.parameters),
                _held(change.memory_bytes, unit),
            ),
            False,
        )
        for change in result.changes
    ]
    return FittedTable(
        headers=("change", "floor µs", "saved a\nwindow", "tokens/s", "windows/s", "parameters", f"peak\n{name_of_it}"),
        rows=rows,
        spare=("windows/s", "parameters", "tokens/s", "floor µs"),
        wrap=21,
        title="what would help",
    )


def render(result: ExplainResult) -> RenderableType:
    """The whole explanation for a terminal."""
    case = result.case
    parts = f" in {case.accumulation} parts" if case.accumulation > 1 else ""
    heading = Text(
        f"{case.name} ({amount(parameters(case.model))} parameters), batch {case.batch}{parts} × {case.context}, "
        f"{case.precision}, plan {case.plan.name}, on {result.spec.name} ({result.rates.source})",
        style="bold",
    )
    told = notes((*_step(result), *_memory(result)), LABEL)
    shown: list[RenderableType] = [heading, Text(""), _ops(result), Text(""), told]
    if result.changes:
        shown += [
            Text(""),
            _changes(result),
            Text(""),
            Text("These are floors; what a change does to the model, a study tells."),
        ]
    return Group(*shown)
