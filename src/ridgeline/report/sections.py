"""What a report says: records as sections, each a drawing, the table under it, and what it must not be taken for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.bench.contenders import is_baseline
from ridgeline.bench.explain_view import amount
from ridgeline.bench.ratios import SUBJECT, Ratio, baselines, deciding, gain, over_pytorch, ratio
from ridgeline.hardware.spec import GIB, TERA
from ridgeline.records import ContenderResult, Record
from ridgeline.report import articles
from ridgeline.report.draw import Bar, Gain, bars, ladder, ratios, stacked
from ridgeline.report.svg import Chart
from ridgeline.report.table import Cell, Table, number, quantity, words

SWALLOWED = (
    "× PyTorch is the ratio to the fastest PyTorch contender of the same group; ≈ means that the difference is less "
    "than the spread of the step times: no ratio can be given."
)
FLOOR = (
    "MFU is what the model needs of the card's dense peak; floor is the least time of its ops, by the arithmetic "
    "and bytes of one after another, as a share of the measured time, by the accounting of the record's own revision."
)

SEPARATOR = " · "
MERGED = {
    "attention": "attention", "relative table": "attention", "QKV": "projections", "output projection": "projections",
    "MLP up": "MLP", "MLP down": "MLP", "norms": "norms", "pointwise": "pointwise",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Section:
    """One figure with its table.

    Attributes:
        key: unique; of HTML ids and file names.
        title: what is shown.
        lead: how to read it, in a sentence or two.
        chart: the drawing; None where a table says it all.
        table: the same in numbers.
        notes: what must not be concluded.
        source: index of the record in the report; None for several.
    """

    key: str
    title: str
    lead: str
    chart: Chart | None
    table: Table
    notes: Sequence[str] = ()
    source: int | None = None


def slug(text: str) -> str:
    """A text as an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def workload_name(record: Record) -> str:
    """The workload in words."""
    info = record.workload
    if info is None:
        return "?"
    cards = f", {record.gpus} cards" if record.gpus > 1 else ""
    return f"{info.name}, batch {info.batch} × {info.context}, {info.precision}{cards}"


def base_of(name: str) -> str:
    """A contender's name without its variants, and a rung's without the single changes made to it."""
    return re.split(r"[:+-]", name)[0] if re.match(r"[mr]\d", name) else name.split(":")[0]


def role_of(name: str) -> str:
    """The colour of a contender."""
    if base_of(name) == SUBJECT:
        return "ours"
    if base_of(name) in articles.LADDER:
        return "rung"
    return "pytorch" if is_baseline(name) else "peer"


def timed(record: Record) -> list[ContenderResult]:
    """Every contender that was timed, once: rungs in climbing order, each before its single changes, `best`, then the
    others from fast to slow.

    Of one that ran in several groups it is the result in the group with the most rungs, so that a ladder is of a piece.
    """
    found: dict[str, ContenderResult] = {}
    for result in sorted(record.contenders, key=lambda result: (-_climbed(record, result.group), result.group)):
        if result.step_ms is not None:
            found.setdefault(result.name, result)
    order = [*articles.LADDER, SUBJECT]

    def place(result: ContenderResult) -> tuple[int, bool, float]:
        base = base_of(result.name)
        rung = base in order
        return order.index(base) if rung else len(order), rung and result.name != base, result.step_ms or 0.0

    return sorted(found.values(), key=place)


def _climbed(record: Record, group: int) -> int:
    """How many rungs a group timed."""
    return sum(r.group == group and r.step_ms is not None and r.name in articles.LADDER for r in record.contenders)


def rungs_of(record: Record) -> list[str]:
    """The whole rungs that a record timed, in climbing order, `best` last."""
    names = {result.name for result in timed(record)}
    return [name for name in (*articles.LADDER, SUBJECT) if name in names]


def contender_table(record: Record) -> Table:
    """Every field of every contender; a failed one's reason."""
    headers = ("contender", "group", "ms", "spread", "tokens/s", "windows/s", "× PyTorch", "MFU", "TB/s", "floor",
               "GiB", "first step s", "overlap")  # fmt: skip
    rows: list[list[Cell]] = []
    for result in record.contenders:
        if result.error is not None:
            rows.append([words(result.name), number(result.group, "d"), words(result.error, wide=True)])
            continue
        best = next(iter(baselines(record, result.group)), None)
        found = (
            None if best is None or best.name == result.name else ratio(record, result.name, best.name, result.group)
        )
        rows.append(
            [
                words(result.name),
                number(result.group, "d"),
                number(result.step_ms, ".4g"),
                number(result.spread, ".1%"),
                quantity(result.tokens_per_s),
                quantity(result.windows_per_s),
                Cell(text="–" if found is None else str(found)),
                number(result.mfu, ".1%"),
                _rate(result),
                number(result.floor_share, ".1%"),
                number(result.peak_memory_bytes, ".1f", scale=1 / GIB),
                number(result.first_step_s, ".1f"),
                number(result.overlap, ".0%"),
            ]
        )
    return Table(headers=headers, rows=rows).without_empty()


def explained(table: Table) -> list[str]:
    """The notes of a table that has ratios, and of one that has floors."""
    told = {"× PyTorch": SWALLOWED, "floor": FLOOR}
    return [note for header, note in told.items() if header in table.headers]


def _rate(result: ContenderResult) -> Cell:
    """Bytes a second, and their share of the bandwidth where there is one."""
    share = "" if result.bandwidth is None else f" ({result.bandwidth:.0%})"
    rate = number(result.bytes_per_s, ".2f", scale=1 / TERA)
    return replace(rate, text=rate.text + share)


def _bars(record: Record) -> list[Bar]:
    found = []
    for result in timed(record):
        speed, spread = result.tokens_per_s or 0.0, (result.spread or 0.0) * (result.tokens_per_s or 0.0) / 2
        found.append(
            Bar(
                label=result.name, value=speed / 1e6, role=role_of(result.name), text=amount(speed), spread=spread / 1e6
            )
        )
    return found


def headline(record: Record) -> str | None:
    """The one sentence of a record: `best` against the best PyTorch."""
    found = over_pytorch(record)
    mine = None if found is None else record.result(SUBJECT, found.group)
    if found is None or mine is None:
        return None
    said = f"{found} the speed of" if found.distinct else "no faster or slower than the spread allows to say,"
    return f"{amount(mine.tokens_per_s or 0.0)} tokens/s, {said} PyTorch's best ({found.over})"


def _speed(record: Record, index: int) -> Section:
    best = headline(record)
    steps = [Gain(label=f"{a} → {b}", ours=shown(gain(record, b, a)), article=articles.gain(a, b))
             for a, b in articles.LADDER_STEPS if {a, b} <= set(rungs_of(record))]  # fmt: skip
    table = contender_table(record)
    notes = explained(table)
    chart = bars(_bars(record), "million tokens/s")
    lead = "Whole training steps, contenders taking turns; a whisker is as long as their middle 80 %."
    if steps:
        chart = ladder(_bars(record), steps, "million tokens/s", f"article ({articles.LADDER_CARD})")
        lead += " The second panel: what each rung gains over the one before it, here and as published."
        notes += _slower(record)
    info = record.workload
    published = None if info is None else articles.SECOND.get((info.name, info.batch, info.context))
    if published is not None:
        notes.append(published)
    return Section(
        key=f"speed-{index}",
        title="The ladder" if steps else "Speed",
        lead=f"{best}. {lead}" if best else lead,
        chart=chart,
        table=table,
        notes=notes,
        source=index,
    )


def shown(found: Ratio | None) -> float | None:
    """The value of a ratio that may be shown."""
    return found.value if found is not None and found.distinct else None


def _slower(record: Record) -> list[str]:
    names = rungs_of(record)
    said = []
    for lower, upper in itertools.pairwise(names):
        found = gain(record, upper, lower)
        if found is None:
            said.append(f"No group links {lower} and {upper}, so no gain is given.")
        elif not found.distinct:
            said.append(f"{upper} and {lower} differ by less than their spread.")
        elif found.value < 1:
            said.append(f"{upper} is slower than {lower} here ({found}).")
    return said


def _phases(record: Record, index: int) -> Section | None:
    found = [result for result in timed(record) if result.phases_ms]
    if not found:
        return None
    names = list(dict.fromkeys(name for result in found for name in result.phases_ms or {}))
    rows = [[words(r.name), *(number((r.phases_ms or {}).get(name), ".4g") for name in names)] for r in found]
    return Section(
        key=f"phases-{index}",
        title="Phases of a step",
        lead="Measured inside the step, by events that a captured step records as it runs; no phase is a share of a "
        "total.",
        chart=stacked([r.name for r in found], [r.phases_ms or {} for r in found], "milliseconds"),
        table=Table(headers=("contender", *(f"{name} ms" for name in names)), rows=rows),
        source=index,
    )


def _layers(record: Record, index: int) -> Section | None:
    found = [result for result in timed(record) if result.groups_ms_per_layer]
    if not found:
        return None
    groups = list(dict.fromkeys(name for result in found for name in result.groups_ms_per_layer or {}))
    longest = max(value for result in found for value in (result.groups_ms_per_layer or {}).values())
    rows: list[list[Cell]] = []
    for group in groups:
        values = [(result.groups_ms_per_layer or {}).get(group) for result in found]
        rows.append([words(group), *(number(v, ".3f", share=None if v is None else v / longest) for v in values)])
    for phase in ("forward", "backward"):
        sums = [sum(v for g, v in (r.groups_ms_per_layer or {}).items() if g.startswith(phase)) for r in found]
        rows.append([words(f"{phase}, all"), *(number(total, ".3f") for total in sums)])
        theirs = [articles.LADDER.get(result.name) for result in found]
        if any(theirs):
            values = [None if t is None else getattr(t, f"{phase}_ms") for t in theirs]
            rows.append([words(f"{phase}, article"), *(number(v, ".2f") for v in values)])
    merged = [_merged(result.groups_ms_per_layer or {}) for result in found]
    return Section(
        key=f"layers-{index}",
        title="Kernel time in a layer",
        lead="Milliseconds of a layer's kernels, forward and backward, by what they work for, from a profile of the "
        "step run call by call.",
        chart=stacked([result.name for result in found], merged, "kernel milliseconds a layer"),
        table=Table(headers=("group", *(result.name for result in found)), rows=rows),
        notes=(
            "Kernels that run at the same time are counted each, so a column can add up to more than the step takes. "
            "A fused kernel counts for the first thing that it does.",
        ),
        source=index,
    )


def _merged(groups: dict[str, float]) -> dict[str, float]:
    """The groups of both phases, put together to as many as can be told apart by colour."""
    found: dict[str, float] = {}
    for name, value in groups.items():
        group = MERGED.get(name.split(SEPARATOR)[-1], "rest")
        found[group] = found.get(group, 0.0) + value
    return found


def bench_sections(record: Record, index: int) -> Iterator[Section]:
    """The sections of one benchmark: speed or ladder, phases, kernel time in a layer."""
    if timed(record):
        yield _speed(record, index)
        for section in (_phases(record, index), _layers(record, index)):
            if section is not None:
                yield section
    else:
        yield Section(
            key=f"speed-{index}", title="Speed", lead="No contender could be timed.", chart=None,
            table=contender_table(record), source=index,
        )  # fmt: skip


def beside_section(records: Sequence[Record]) -> Section | None:
    """hal-5m beside hal-20m in windows/s, as the first article's x2 beside r16; None unless one kind of card timed
    `best` on both.

    Each in the record on a single card that decides it, without one in its newest. No ratio: they did not take turns in
    one run.
    """
    newest: dict[str, Record] = {}
    decided = {id(record) for record in deciding(records)}
    for record in sorted(records, key=lambda record: (id(record) in decided, record.date)):
        info, known = record.workload, SUBJECT in rungs_of(record)
        if record.kind == "bench" and record.gpus <= 1 and known and info and info.name in ("hal-20m", "hal-5m"):
            newest[info.name] = record
    if len(newest) < 2 or len({record.card for record in newest.values()}) > 1:
        return None
    rows, found = [], []
    for name, record in newest.items():
        pair = over_pytorch(record)
        both = [r for r in timed(record) if r.name == SUBJECT]
        if pair is not None:
            both = [r for r in (record.result(name, pair.group) for name in (SUBJECT, pair.over)) if r is not None]
        for result in both:
            speed = result.windows_per_s or 0.0
            label = f"{name}, {result.name}"
            found.append(Bar(label=label, value=speed / 1e3, role=role_of(result.name), text=amount(speed)))
            rows.append([words(name), words(result.name), quantity(speed), number(result.step_ms, ".4g")])
    return Section(
        key="beside",
        title="Windows a second",
        lead="Half the width and every other frame: a window costs far less, and what matters is how many windows a "
        "second the model learns from.",
        chart=bars(found, "thousand windows/s"),
        table=Table(headers=("workload", "contender", "windows/s", "ms"), rows=rows),
        notes=("Two runs on the same kind of card, so no ratio is given; the article has 5.72× for its own pair.",),
    )


def overview_section(records: Sequence[Record]) -> Section | None:
    """`best` against the best PyTorch for every workload, each ratio of the newest run that decides it; None where not
    two."""
    labels, values, texts, rows = [], [], [], []
    decided = {id(record) for record in deciding(records)}
    for record in (record for record in records if id(record) in decided):
        found = over_pytorch(record)
        mine = None if found is None else record.result(SUBJECT, found.group)
        theirs = None if found is None else record.result(found.over, found.group)
        if found is None or mine is None or theirs is None:
            continue
        if found.distinct:
            labels.append(workload_name(record).replace("batch ", ""))
            values.append(found.value)
            texts.append(str(found))
        rows.append([words(workload_name(record)), Cell(text=str(found)), quantity(mine.tokens_per_s),
                     quantity(theirs.tokens_per_s), words(found.over)])  # fmt: skip
    if len(rows) < 2 or not values:
        return None
    headers = ("workload", "ratio", "best, tokens/s", "best PyTorch, tokens/s", "which")
    return Section(
        key="overview",
        title="Best against PyTorch's best",
        lead="How many times as fast a whole training step is, each ratio from a run in which the two took turns.",
        chart=ratios(labels, values, texts, "times as fast as PyTorch's best"),
        table=Table(headers=headers, rows=rows),
        notes=(SWALLOWED,),
    )
