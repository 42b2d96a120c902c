"""Sections of a record that is no benchmark: rooflines, losses and strength over training, single ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.bench.kernel_map import EITHER
from ridgeline.errors import ConfigError
from ridgeline.hardware import CARDS, DeviceSpec, by_driver_name
from ridgeline.records import Record
from ridgeline.report.draw import Dot, Line, lines, lines_beneath, roofline
from ridgeline.report.names import told_apart
from ridgeline.report.sections import Section, contender_table, explained, slug, workload_name
from ridgeline.report.table import Table, anything, number, words

CURVES = {
    "loss": (
        "Loss",
        "Held-out loss in nats; a band is the range over seeds, a dashed line what counting letters gives."
        " Beneath, where all were looked at after the same steps: what each has above the first.",
    ),
    "strength": ("Strength", "Games played at checkpoints of a run; a band is the 95 % interval."),
    "training": (
        "Training loss and gradient norm",
        "Loss in nats, a mean over neighbouring steps; below it the largest of their gradient norms before clipping.",
    ),
    "margin": ("Margin", "Points dealt minus points taken, a game; a band is the 95 % interval of the mean."),
}
AXES = {  # other axes of a loss: a curve's key → label, what the title says, and what one is drawn as
    "seconds": ("seconds of training", " over time", 1.0),
    "tokens": ("million positions learned from", " over positions", 1e-6),
}
SHORT = 8  # numbers of a list that a table of anything has columns for
PHASES = ("forward", "backward", "optimizer")


def _card(record: Record) -> DeviceSpec | None:
    return by_driver_name(record.card) or next((c for c in CARDS.values() if c.name == record.card), None)


def short(name: str) -> str:
    """The name of an op, or one for ops that share their kernels: what they have in common, else the first of them."""
    first, *others = name.split(EITHER)
    family = first.split(".")[0]
    if not others:
        return first
    return family if any(other.split(".")[0] == family for other in others) else f"{first} …"


def roofline_section(record: Record, index: int) -> Section | None:
    """Each op of an explained step under the card's roof; None where nothing was measured or the card is unknown."""
    spec, info = _card(record), record.workload
    ops = [op for op in record.ops if op.us and op.tflops and op.tb_per_s and op.shape in PHASES]
    if spec is None or info is None or not ops or info.precision not in spec.tflops:
        return None
    total = sum(op.us or 0.0 for op in record.ops)
    dots = [
        Dot(
            label=short(op.name),
            intensity=(op.tflops or 0.0) / (op.tb_per_s or 1.0),
            flops_per_s=(op.tflops or 0.0) * 1e12,
            role=op.shape,
            share=(op.us or 0.0) / total,
        )
        for op in ops
    ]
    rows = [
        [
            words(op.name), words(op.shape), number(op.us, ".0f"), number((op.us or 0.0) / total, ".1%"),
            number(op.tflops, ".3g"), number(op.tb_per_s, ".3g"), number(op.floor_share, ".0%"),
        ]
        for op in record.ops
    ]  # fmt: skip
    return Section(
        key=f"roofline-{index}",
        title=f"Roofline: {workload_name(record)}, {', '.join(c.name for c in record.contenders)}",
        lead=f"Each op by its FLOPs a byte and the rate it reached; the line is what {spec.name} can do at most. The "
        "area of a dot is its share of the step.",
        chart=roofline(dots, spec.peak(info.precision), spec.bandwidth),  # type: ignore[arg-type]
        table=Table(headers=("op", "phase", "µs", "share", "TFLOP/s", "TB/s", "of the floor"), rows=rows),
        notes=("Bytes are those that the op must move at least; what stays in the cache can lie above the line.",),
        source=index,
    )


def _line(curve: dict[str, Any], record: Record, x_key: str = "x") -> Line:
    y = curve.get("y")
    x = curve.get(x_key, list(range(len(y))) if isinstance(y, list) else None)
    bands = [curve[name] for name in ("low", "high") if curve.get(name) is not None]
    lists = all(
        isinstance(row, list) and row and all(isinstance(v, int | float) for v in row) for row in (x, y, *bands)
    )
    if not lists or len({len(row) for row in (x, y, *bands)}) > 1:  # type: ignore[arg-type]
        raise ConfigError(
            f"a curve of the {record.kind} record of {record.date} cannot be drawn: x, y, low and high must be lists "
            "of numbers of one length"
        )
    return Line(
        label=str(curve.get("name", "?")), x=x, y=y,  # type: ignore[arg-type]
        low=curve.get("low"), high=curve.get("high"), mark=curve.get("line") is True,
    )  # fmt: skip


def curve_sections(record: Record, index: int) -> Iterator[Section]:
    """Loss and strength, from a record's curves: {"name", "figure", "x", "y", "low", "high", "x_label", "y_label"};
    with "line" a level to compare with, with "seconds" or "tokens" a loss is drawn over them too, with "below" and
    "below_label" another figure of the same run beneath; "rows" is a table.

    Raises:
        ConfigError: a curve that cannot be drawn.
    """
    given = record.curves if isinstance(record.curves, list) else [record.curves] if record.curves else []
    for figure in CURVES:
        mine = [curve for curve in given if curve.get("figure", "loss") == figure]
        runs = [curve for curve in mine if not curve.get("line")]
        if mine:
            yield _curves(record, index, figure, mine, "x", str(mine[0].get("x_label", "step")))
        for key, (label, _, scale) in AXES.items():
            if runs and all(key in curve for curve in runs):
                drawn = [{**curve, key: _scaled(curve[key], scale)} for curve in runs]
                last = max((value for curve in drawn for value in _numbers(curve[key])), default=0)
                levels = [{**curve, key: [0, last]} for curve in mine if curve.get("line")]
                yield _curves(record, index, figure, [*drawn, *levels], key, label)
    for curve in given:
        if isinstance(curve.get("rows"), list) and curve["rows"]:
            yield _rows(record, index, curve)


def _numbers(values: Any) -> list[float]:
    return [v for v in values if isinstance(v, int | float)] if isinstance(values, list) else []


def _scaled(values: Any, scale: float) -> Any:
    """Numbers in another unit; what is no list of numbers stays, to be told of when it is drawn."""
    numbers = _numbers(values)
    return [scale * value for value in numbers] if numbers and len(numbers) == len(values) else values


def _grid(record: Record) -> list[float] | None:
    """The times of a race's checkpoints, which are chosen by their ratio: most lie at its beginning."""
    if record.kind != "race" or not isinstance(record.curves, list):
        return None
    grids = [curve.get("grid", ()) for curve in record.curves if curve.get("figure") == "setting"]
    return [float(at) for grid in grids for at in grid if at > 0] or None


def _curves(record: Record, index: int, figure: str, curves: list[dict[str, Any]], x_key: str, x_label: str) -> Section:
    drawn = [_line(curve, record, x_key) for curve in curves]
    names, shared = told_apart([line.label for line in drawn if not line.mark])
    y_label = str(curves[0].get("y_label", figure))
    rows = [
        [words(names.get(line.label, line.label)), number(len(line.x), "d"), number(line.x[-1], ".4g"),
         number(line.y[-1], ".4g"), number(min(line.y), ".4g"), number(max(line.y), ".4g")]
        for line in drawn
    ]  # fmt: skip
    chart = lines(drawn, x_label, y_label, ticks=_grid(record))
    if all("below" in curve for curve in curves):
        beneath = [_line({**curve, "y": curve["below"], "low": None, "high": None}, record, x_key) for curve in curves]
        chart = lines_beneath(drawn, beneath, x_label, (y_label, str(curves[0].get("below_label", ""))))
    elif figure == "loss" and x_key == "x" and (apart := _from_the_first(drawn)):
        chart = lines_beneath(drawn, apart, x_label, (y_label, "above the first (nats)"), log=False)
    title, lead = CURVES[figure]
    _, over, _ = AXES.get(x_key, ("", "", 1.0))
    return Section(
        key=f"{figure}-{index}{f'-{x_key}' if over else ''}",
        title=f"{title}{over}" if record.workload is None else f"{title}{over}: {record.workload.name}",
        lead=lead,
        chart=chart,
        table=Table(headers=("run", "points", f"last {x_label}", f"last {y_label}", "lowest", "highest"), rows=rows),
        notes=(f"All with {', '.join(shared)}.",) if shared else (),
        source=index,
    )


def _from_the_first(drawn: Sequence[Line]) -> list[Line]:
    """What each run has above the first, where all were looked at after the same steps: else curves hide each other."""
    first, *others = [line for line in drawn if not line.mark]
    if not others or any(list(line.x) != list(first.x) for line in others):
        return []
    return [
        replace(line, y=[y - base for y, base in zip(line.y, first.y, strict=True)], low=None, high=None)
        for line in (first, *others)
    ]


def _rows(record: Record, index: int, curve: dict[str, Any]) -> Section:
    """A table of a record as it is; of what is no word or number it has short lists of numbers, a column each."""
    rows = [_flat(row) for row in curve["rows"] if isinstance(row, dict)]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[anything(row.get(name)) for name in names] for row in rows]
    title = str(curve.get("name", "rows"))
    return Section(
        key=f"{slug(title)}-{index}", title=title.capitalize(), lead="As the record has it.", chart=None,
        table=Table(headers=[name.replace("_", " ") for name in names], rows=cells), source=index,
    )  # fmt: skip


def _flat(row: dict[str, Any]) -> dict[str, str | float | None]:
    found: dict[str, str | float | None] = {}
    for name, value in row.items():
        if value is None or isinstance(value, str | int | float):
            found[name] = value
        elif isinstance(value, list) and len(value) <= SHORT and all(isinstance(v, int | float) for v in value):
            found |= {f"{name} {place}": v for place, v in enumerate(value, 1)}
    return found


def op_section(record: Record, index: int) -> Section:
    """A table of single ops."""
    rows = [
        [words(op.name), words(op.shape), words(op.impl), words(op.error, wide=True)]
        if op.error
        else [
            words(op.name), words(op.shape), words(op.impl), number(op.us, ".4g"), number(op.tflops, ".3g"),
            number(op.tb_per_s, ".3g"), number(op.floor_share, ".0%"), number(op.vs_pytorch, ".2f"),
        ]
        for op in record.ops
    ]  # fmt: skip
    headers = ("op", "shape", "implementation", "µs", "TFLOP/s", "TB/s", "of the floor", "× PyTorch")
    return Section(
        key=f"ops-{index}", title="Single ops", lead="Each kernel alone.", chart=None,
        table=Table(headers=headers, rows=rows), source=index,
    )  # fmt: skip


def plain_section(record: Record, index: int) -> Section:
    """The contenders of any other record as a table."""
    table = contender_table(record)
    return Section(
        key=f"results-{index}",
        title=f"Results: {workload_name(record)}",
        lead=f"What the {record.kind} record holds.",
        chart=None,
        table=table,
        notes=explained(table),
        source=index,
    )
