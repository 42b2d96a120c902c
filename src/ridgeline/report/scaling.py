"""How much faster several cards train than one: from benchmarks that timed both in one run."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.bench.explain_view import amount
from ridgeline.bench.ratios import SUBJECT
from ridgeline.records import ContenderResult, Record
from ridgeline.report.played import MISSING
from ridgeline.report.table import Cell, Table, number, quantity, words

HEADERS = ("windows", "cards", "tokens/s", "ms a step", "one card, tokens/s", "times one card")
_Key = tuple[object, ...]


def scaling(records: Sequence[Record]) -> str:
    """`best` on several cards beside one card with the batch of each, or with the batch of all.

    Args:
        records: benchmarks of one number of cards each, newest first; those of one run have the same date.
    """
    alone = {
        _key(record, record.workload.batch): result
        for record in records
        if record.gpus <= 1 and record.workload is not None and (result := _best(record)) is not None
    }
    rows: dict[_Key, list[Cell]] = {}
    for record in records:
        info, result = record.workload, _best(record)
        if record.gpus < 2 or info is None or result is None:
            continue
        each, whole = alone.get(_key(record, info.batch)), alone.get(_key(record, info.batch * record.gpus))
        base, share = (each, "a card") if each is not None else (whole, "in all")
        if base is None:
            continue
        windows = info.batch if base is each else info.batch * record.gpus
        name = f"`{info.name}`, {windows} × {info.context} {share}, {info.precision}"
        gain = (result.tokens_per_s or 0.0) / (base.tokens_per_s or 1.0)
        rows.setdefault(
            (*_key(record, windows)[1:], record.gpus, share),
            [
                words(name),
                number(record.gpus, "d"),
                quantity(result.tokens_per_s),
                number(result.step_ms, ".4g"),
                Cell(text=amount(base.tokens_per_s or 0.0)),
                Cell(text=f"{gain:.2f}"),
            ],
        )
    return Table(headers=HEADERS, rows=list(rows.values())).markdown() if rows else MISSING


def _best(record: Record) -> ContenderResult | None:
    return next((r for r in record.contenders if r.name == SUBJECT and r.step_ms), None)


def _key(record: Record, batch: int) -> _Key:
    info = record.workload
    assert info is not None
    return record.date, record.card, info.name, info.context, info.precision, batch
