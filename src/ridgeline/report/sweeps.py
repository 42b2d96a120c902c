"""Sections over several benchmarks that differ in one thing alone: context, batch, or cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.bench.explain_view import amount
from ridgeline.bench.ratios import deciding
from ridgeline.records import ContenderResult, Record, WorkloadInfo
from ridgeline.report.draw import Line, lines
from ridgeline.report.names import model_place
from ridgeline.report.sections import Section, timed
from ridgeline.report.table import Cell, Table, words


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What benchmarks of a sweep differ in.

    Attributes:
        name: of the sweep's kind.
        axis: what the drawing's axis is called.
        short: what stands before a value in a table.
        lead: how to read it.
        value: of a record on the axis.
        same: what its records have in common besides card, model and precision; of cards also the run.
        title: of one sweep.
    """

    name: str
    axis: str
    short: str
    lead: str
    value: Callable[[Record, WorkloadInfo], int]
    same: Callable[[Record, WorkloadInfo], tuple[object, ...]]
    title: Callable[[WorkloadInfo], str]


KINDS = (
    Kind(
        name="context",
        axis="context (positions)",
        short="T",
        lead="A longer window means fewer of them, so that every step learns from as many positions.",
        value=lambda record, info: info.context,
        same=lambda record, info: (record.gpus, info.batch * info.context),
        title=lambda info: f"{info.batch * info.context:,} positions a step",
    ),
    Kind(
        name="batch",
        axis="batch (windows a step)",
        short="B",
        lead="A larger batch gives every kernel more to do, and the host and the launches more time.",
        value=lambda record, info: info.batch,
        same=lambda record, info: (record.gpus, info.context),
        title=lambda info: f"windows of {info.context}",
    ),
    Kind(
        name="cards",
        axis="cards",
        short="cards:",
        lead="Each card has a batch of its own, all tokens are counted. Groups of their own, so no ratio is given.",
        value=lambda record, info: record.gpus,
        same=lambda record, info: (record.date, info.batch, info.context),
        title=lambda info: f"batch {info.batch} × {info.context} a card",
    ),
)


@dataclass
class Sweep:
    """Benchmarks of one model, card and precision.

    Attributes:
        kind: what they differ in.
        place: of the model among others.
        title: of their section.
        runs: by value, the indices of the records there: first the one that decides how `best` stands against PyTorch,
            where there is none the newest, then the others, newest first.
    """

    kind: Kind
    place: int
    title: str
    runs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def members(self) -> dict[int, int]:
        """The index of each value's first record."""
        return {value: indices[0] for value, indices in self.runs.items()}

    def results(self, value: int, records: Sequence[Record]) -> dict[str, ContenderResult]:
        """Who was timed at a value, in its first record or else in the newest that timed it."""
        return {r.name: r for index in reversed(self.runs[value]) for r in timed(records[index])}


def sweeps(records: Sequence[Record]) -> list[Sweep]:
    """Every sweep in which a contender was timed at two values or more: contexts first, then by the model."""
    found: dict[tuple[object, ...], Sweep] = {}
    decided = {id(record) for record in deciding(records)}
    order = sorted(range(len(records)), key=lambda i: (id(records[i]) in decided, records[i].date), reverse=True)
    for kind in KINDS:
        for index in order:
            record, info = records[index], records[index].workload
            if record.kind != "bench" or info is None:
                continue
            key = (kind.name, record.card, info.name, info.precision, *kind.same(record, info))
            cards = f", {record.gpus} cards" if record.gpus > 1 and kind.name != "cards" else ""
            title = f"{info.name}, {kind.title(info)}, {info.precision}{cards}"
            sweep = found.setdefault(key, Sweep(kind, model_place(info.name), title))
            sweep.runs.setdefault(kind.value(record, info), []).append(index)
    in_order = sorted(found.values(), key=lambda sweep: (KINDS.index(sweep.kind), sweep.place, sweep.title))
    whole = [replace(sweep, runs=dict(sorted(sweep.runs.items()))) for sweep in in_order]
    return [sweep for sweep in whole if swept(sweep, records)]


def swept(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    """The contenders that were timed at two values or more: the others are no sweep, and stand with their record."""
    times = Counter(name for value in sweep.runs for name in sweep.results(value, records))
    return [name for name, count in times.items() if count > 1]


def _half(spread: float) -> float:
    """Half of a band as a share of its middle; none of times that spread by more than themselves, as on a busy host."""
    return spread / 2 if spread <= 1 else 0.0


def sweep_section(sweep: Sweep, records: Sequence[Record], number: int) -> Section:
    """Tokens/s over what the sweep's records differ in."""
    values = list(sweep.runs)
    by_value = {value: sweep.results(value, records) for value in values}
    drawn, rows = [], []
    for name in swept(sweep, records):
        here = {value: results[name] for value, results in by_value.items() if name in results}
        speeds = {value: (result.tokens_per_s or 0.0) / 1e6 for value, result in here.items()}
        half = {value: _half(result.spread or 0.0) for value, result in here.items()}
        drawn.append(
            Line(
                label=name,
                x=list(speeds),
                y=list(speeds.values()),
                low=[speed * (1 - half[value]) for value, speed in speeds.items()],
                high=[speed * (1 + half[value]) for value, speed in speeds.items()],
            )
        )
        cells = [Cell(text=amount(1e6 * speeds[value]) if value in speeds else "–") for value in values]
        rows.append([words(name), *cells])
    return Section(
        key=f"sweep-{number}",
        title=f"Tokens/s over the {sweep.kind.name}",
        lead=f"{sweep.kind.lead} A band is as wide as the middle 80 % of the times; where they spread by more than "
        "themselves there is none.",
        chart=lines(drawn, sweep.kind.axis, "million tokens/s", ticks=values, from_zero=True),
        table=Table(headers=("contender", *(f"{sweep.kind.short} {value}" for value in values)), rows=rows),
        source=sweep.members[values[0]] if sweep.kind.name == "cards" else None,  # all of one run
    )
