"""The kinds of chart, each from plain data; what is drawn, and why, `sections` decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.report.names import broken, told_apart
from ridgeline.report.palette import Palette
from ridgeline.report.svg import NARROW_IN, WIDE_IN, Chart, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ROW_IN = 0.27
LINES = 6  # colours for lines
LABELLED = 7  # dots of a roofline that are named
LETTER_IN, LEGEND_IN, LINE_IN = 0.065, 0.6, 0.2  # a letter of a legend, a line's sample with its gaps; a line's height
CROWDED = (1.0, 0.18)  # decades of x and y within which two names would lie on each other


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A horizontal bar.

    Attributes:
        label: in front of it.
        value: its length.
        role: its colour.
        text: behind it.
        spread: half-width of its whisker, in units of `value`.
    """

    label: str
    value: float
    role: str
    text: str
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve; `low` and `high` are a band around it. A mark is a level to compare with, and no run of its own."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    mark: bool = False


@dataclass(frozen=True, kw_only=True)
class Dot:
    """An op under a roofline: FLOPs a byte, FLOP/s, phase, and its share of the time."""

    label: str
    intensity: float
    flops_per_s: float
    role: str
    share: float


def _dress(axes: Axes, palette: Palette, *, grid: str) -> None:
    for spine in axes.spines.values():
        spine.set_color(palette["grid"])
    axes.tick_params(colors=palette["muted"], labelcolor=palette["muted"])
    axes.grid(axis=grid, color=palette["grid"], linewidth=0.7)  # type: ignore[arg-type]
    axes.xaxis.label.set_color(palette["muted"])
    axes.yaxis.label.set_color(palette["muted"])


def _plain(axis: Axis) -> None:
    """Marks of a logarithmic axis as plain numbers: powers of ten, and on one that is shorter those between as well."""

    def between(value: float, place: float) -> str:
        low, high = axis.get_view_interval()
        return f"{value:g}" if high < 10 * low else ""

    axis.set_major_formatter(lambda value, place: f"{value:g}")
    axis.set_minor_formatter(between)


def _rows(axes: Axes, labels: Sequence[str], palette: Palette) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.spines["bottom"].set_visible(False)
    _dress(axes, palette, grid="x")
    axes.tick_params(axis="y", labelcolor=palette["ink"])


def _draw_bars(axes: Axes, bars: Sequence[Bar], palette: Palette, unit: str, room: float) -> None:
    """Bars with their texts behind them; `room` is the axis' length in that of the longest bar. A whisker ends where
    a tenth more than the longest bar does: the spread itself is in the table."""
    longest = max(bar.value for bar in bars) or 1.0
    for row, bar in enumerate(bars):
        axes.barh(row, bar.value, height=0.66, color=palette[bar.role])
        end = min(bar.value + bar.spread, 1.1 * longest)
        if bar.spread:
            below, above = min(bar.spread, bar.value), end - bar.value
            axes.errorbar(bar.value, row, xerr=[[below], [above]], color=palette["ink"], linewidth=0.9, capsize=1.5)
        axes.text(end + 0.012 * longest, row, bar.text, va="center", color=palette["ink"], fontsize=8)
    _rows(axes, [bar.label for bar in bars], palette)
    axes.set_xlim(0, room * longest)
    axes.set_xlabel(unit)


def bars(found: Sequence[Bar], unit: str) -> Chart:
    """Horizontal bars with their values behind them."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        figure = new_figure(ROW_IN * len(found) + 0.55, narrow=narrow)
        axes = figure.subplots()
        _draw_bars(axes, found, palette, unit, 1.75 if narrow else 1.3)
        return figure

    return draw


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A step of a ladder: how many times faster here and in the article; None where it cannot be said."""

    label: str
    ours: float | None
    article: float


def ladder(found: Sequence[Bar], steps: Sequence[Gain], unit: str, theirs: str) -> Chart:
    """Bars of the rungs, and beside them (on a phone below) each step's gain here and in the article."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        rows = (ROW_IN * len(found) + 0.55, 0.36 * len(steps) + 1.0)
        height = sum(rows) + 0.2 if narrow else max(rows)
        figure = new_figure(height, narrow=narrow)
        if narrow:
            left, right = figure.subplots(2, 1, height_ratios=rows)
        else:
            left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
        _draw_bars(left, found, palette, unit, 1.5)
        left.set_title("speed", color=palette["ink"])
        _draw_gains(right, steps, palette, theirs)
        figure.legend(loc="outside lower right", ncols=2, labelcolor=palette["ink"], fontsize=8, handletextpad=0.1)
        return figure

    return draw


def _draw_gains(axes: Axes, steps: Sequence[Gain], palette: Palette, theirs: str) -> None:
    first = next((row for row, step in enumerate(steps) if step.ours is not None), None)
    for row, step in enumerate(steps):
        ends = [value for value in (step.ours, step.article) if value is not None]
        axes.plot([min(ends), max(ends)], [row, row], color=palette["grid"], linewidth=3, solid_capstyle="round")
        axes.plot(step.article, row, "o", markersize=6.5, markerfacecolor="none", markeredgecolor=palette["article"],
                  markeredgewidth=1.6, label=theirs if row == 0 else "_")  # fmt: skip
        if step.ours is not None:
            axes.plot(step.ours, row, "o", markersize=6.5, color=palette["rung"], label="here" if row == first else "_")
    _rows(axes, [step.label for step in steps], palette)
    axes.set_xlim(left=min([1.0, *(s.ours for s in steps if s.ours is not None)]) - 0.12)
    axes.axvline(1, color=palette["muted"], linewidth=0.8)
    axes.set_xlabel("times as fast as the rung before")
    axes.set_title("what each step bought", color=palette["ink"])


def ratios(labels: Sequence[str], values: Sequence[float], texts: Sequence[str], unit: str) -> Chart:
    """Ratios as lines that begin at 1, to the right where faster and to the left where slower; on a phone a label is
    broken behind its first comma."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        figure = new_figure((1.4 if narrow else 1) * ROW_IN * len(labels) + 0.55, narrow=narrow)
        axes = figure.subplots()
        for row, (value, text) in enumerate(zip(values, texts, strict=True)):
            colour = palette["ours" if value >= 1 else "pytorch"]
            axes.plot([1, value], [row, row], color=colour, linewidth=4, solid_capstyle="butt")
            axes.plot(value, row, "o", markersize=7, color=colour)
            axes.annotate(text, (max(value, 1), row), xytext=(8, 0), textcoords="offset points", va="center",
                          fontsize=8, color=palette["ink"])  # fmt: skip
        _rows(axes, [label.replace(", ", ",\n", 1) if narrow else label for label in labels], palette)
        axes.set_xlim(min(0.0, *values), max(1.0, *values) * (1.4 if narrow else 1.15))
        axes.axvline(1, color=palette["muted"], linewidth=0.9)
        axes.set_xlabel(unit, loc="right" if narrow else "center")
        return figure

    return draw


def stacked(labels: Sequence[str], parts: Sequence[dict[str, float]], unit: str) -> Chart:
    """Horizontal bars made of named parts; a part's name is its colour's role, else one of the lines'."""
    names = list(dict.fromkeys(name for part in parts for name in part))

    def role(name: str) -> str:
        known = {"forward": "forward", "backward": "backward", "optimizer": "optimizer"}
        known["forward and backward"] = "line1"  # of lanes, whose passes overlap
        return known.get(name, f"line{names.index(name) % LINES}")

    def draw(palette: Palette, narrow: bool) -> Figure:
        columns = 2 if narrow and len(names) > 3 else len(names)
        figure = new_figure(ROW_IN * len(labels) + 0.6 + 0.2 * math.ceil(len(names) / columns), narrow=narrow)
        axes = figure.subplots()
        for row, part in enumerate(parts):
            start = 0.0
            for name in names:
                axes.barh(row, part.get(name, 0.0), left=start, height=0.66, color=palette[role(name)],
                          label=name if row == 0 else "_")  # fmt: skip
                start += part.get(name, 0.0)
            axes.text(start, row, f" {start:.3g}", va="center", color=palette["ink"], fontsize=8)
        _rows(axes, labels, palette)
        axes.set_xlim(0, max(sum(part.values()) for part in parts) * 1.12)
        axes.set_xlabel(unit)
        figure.legend(loc="outside upper left", ncols=columns, labelcolor=palette["ink"], fontsize=8)
        return figure

    return draw


def _draw_lines(axes: Axes, found: Sequence[Line], palette: Palette, marker: str) -> None:
    curves = [line for line in found if not line.mark]
    for index, line in enumerate(curves):
        colour = palette[f"line{index % LINES}"]
        axes.plot(line.x, line.y, marker=marker, markersize=3.5, color=colour, linewidth=1.6, label=line.label)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    for line in found:
        if line.mark:
            axes.plot(line.x, line.y, color=palette["muted"], linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(line.label, (line.x[-1], line.y[-1]), xytext=(0, 2), textcoords="offset points", ha="right",
                          fontsize=7.5, color=palette["muted"])  # fmt: skip


def lines(
    found: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    ticks: Sequence[float] | None = None,
    form: Callable[[float], str] | None = None,
    from_zero: bool = False,
) -> Chart:
    """Curves over one axis; `ticks` makes it logarithmic to base 2 with just these marks."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        legend = _legend_of(found, narrow=narrow)
        figure = new_figure(2.7 + legend.height, narrow=narrow)
        axes = figure.subplots()
        _draw_lines(axes, found, palette, "o" if ticks or len(found[0].x) < 30 else "")
        if ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_formatter("")
        if form is not None:
            axes.yaxis.set_major_formatter(lambda value, _: form(value))
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _dress(axes, palette, grid="both")
        legend.draw(figure, axes, palette)
        return figure

    return draw


@dataclass(frozen=True, kw_only=True)
class _Legend:
    """Names of lines, in as many columns as there is room for; `height` in inches."""

    labels: Sequence[str]
    columns: int

    @property
    def height(self) -> float:
        rows = math.ceil(len(self.labels) / max(1, self.columns))
        return LINE_IN * rows * max((label.count("\n") + 1 for label in self.labels), default=0)

    def draw(self, figure: Figure, axes: Axes, palette: Palette) -> None:
        handles, _ = axes.get_legend_handles_labels()
        if self.labels:
            figure.legend(handles, self.labels, loc="outside upper left", ncols=self.columns, labelcolor=palette["ink"],
                          fontsize=8)  # fmt: skip


def _legend_of(found: Sequence[Line], *, narrow: bool) -> _Legend:
    """What all names share is left out; a change of the first line's model is named alone; long names are broken."""
    named = [line.label for line in found if line.label and not line.mark]
    short, _ = told_apart(named)
    first = next(iter(short.values()), "")
    labels = [
        name.removeprefix(first) if name.startswith(f"{first}+") else name for name in map(short.__getitem__, named)
    ]
    width = NARROW_IN if narrow else WIDE_IN
    labels = [broken(label, int((width - LEGEND_IN) / LETTER_IN)) for label in labels]
    longest = max((len(part) for label in labels for part in label.split("\n")), default=0)
    room = int(width / (LEGEND_IN + LETTER_IN * longest))
    return _Legend(labels=labels, columns=max(1, min(room, 2 if narrow else 4)))


def lines_beneath(
    upper: Sequence[Line], lower: Sequence[Line], x_label: str, y_labels: tuple[str, str], *, log: bool = True
) -> Chart:
    """Two figures of the same runs over one axis, the lower one logarithmic unless told otherwise."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        legend = _legend_of(upper, narrow=narrow)
        figure = new_figure(4.2 + legend.height, narrow=narrow)
        parts = figure.subplots(2, 1, sharex=True)
        for axes, found, y_label in zip(parts, (upper, lower), y_labels, strict=True):
            _draw_lines(axes, found, palette, "o" if len(found[0].x) < 30 else "")
            axes.set_ylabel(y_label)
            _dress(axes, palette, grid="both")
        if log:
            parts[1].set_yscale("log")
            _plain(parts[1].yaxis)
        parts[1].set_xlabel(x_label)
        legend.draw(figure, parts[0], palette)
        return figure

    return draw


def _apart(dots: Sequence[Dot]) -> list[Dot]:
    """The dots that can be named without their names lying on each other, the largest first."""
    chosen: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: -dot.share):
        if all(
            abs(math.log10(dot.intensity / other.intensity)) > CROWDED[0]
            or abs(math.log10(dot.flops_per_s / other.flops_per_s)) > CROWDED[1]
            for other in chosen
        ):
            chosen.append(dot)
    return chosen


def roofline(dots: Sequence[Dot], peak: float, bandwidth: float) -> Chart:
    """Ops under the roof of a card: FLOP/s over FLOPs a byte, the dot's area by its share of the step."""

    def draw(palette: Palette, narrow: bool) -> Figure:
        figure = new_figure(3.6, narrow=narrow)
        axes = figure.subplots()
        low, high = min(dot.intensity for dot in dots) / 2, max(*(dot.intensity for dot in dots), peak / bandwidth) * 3
        knee = peak / bandwidth
        axes.plot([low, knee, high], [low * bandwidth / 1e12, peak / 1e12, peak / 1e12], color=palette["ink"],
                  linewidth=1.4)  # fmt: skip
        for role in dict.fromkeys(dot.role for dot in dots):
            mine = [dot for dot in dots if dot.role == role]
            axes.scatter([d.intensity for d in mine], [d.flops_per_s / 1e12 for d in mine],
                         s=[14 + 700 * d.share for d in mine], color=palette[role], alpha=0.75, linewidths=0,
                         label=role)  # fmt: skip
        for dot in _apart(dots)[: LABELLED - 3 if narrow else LABELLED]:
            right = math.log(dot.intensity / low) > 0.7 * math.log(high / low)
            name = axes.annotate(dot.label, (dot.intensity, dot.flops_per_s / 1e12), xytext=(-5 if right else 5, -10),
                                 ha="right" if right else "left", textcoords="offset points", fontsize=7.5,
                                 color=palette["ink"])  # fmt: skip
            name.set_in_layout(False)  # the axes keep their width, however long a name is
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain(axes.xaxis)
        _plain(axes.yaxis)
        axes.set_xlim(low, high)
        axes.set_xlabel("FLOPs a byte")
        axes.set_ylabel("TFLOP/s")
        _dress(axes, palette, grid="both")
        legend = figure.legend(loc="outside upper left", ncols=3, labelcolor=palette["ink"], fontsize=8)
        for handle in legend.legend_handles:
            handle.set_sizes([30])  # type: ignore[union-attr]
        return figure

    return draw
