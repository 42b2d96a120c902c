"""Ratios of speeds, taken only where they mean something: between contenders that took turns in one group of one
record, and only if their difference is more than the spread of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.bench.contenders import is_baseline
from ridgeline.bench.timing import Timing, distinct
from ridgeline.records import ContenderResult, Record

SUBJECT = "best"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast one contender is as another of its group.

    Attributes:
        value: ratio of the median steps.
        noise: by how much the spreads of the two allow it to be wrong, as a share of it.
        distinct: whether the difference is more than the spread; if not, the value must not be shown.
        over: the other contender.
        group: the group that both took turns in.
    """

    value: float
    noise: float
    distinct: bool
    over: str
    group: int

    def __str__(self) -> str:
        return f"{self.value:.2f}×" if self.distinct else "≈"


def _timing(result: ContenderResult) -> Timing | None:
    if result.step_ms is None or result.spread is None:
        return None
    return Timing(result.step_ms, result.spread, 0)


def ratio(record: Record, name: str, over: str, group: int | None = None) -> Ratio | None:
    """How many times as fast `name` is as `over`; None where no group of the record timed both.

    Args:
        record: the run that both took part in.
        name, over: contenders.
        group: the group to look in; None for the first that timed both.
    """
    for mine in record.contenders:
        if mine.name != name or group not in (None, mine.group):
            continue
        other = record.result(over, mine.group)
        ours, theirs = _timing(mine), None if other is None else _timing(other)
        if ours is not None and theirs is not None and mine is not other:
            return Ratio(
                value=theirs.median_ms / ours.median_ms,
                noise=0.5 * (ours.spread + theirs.spread),
                distinct=distinct(ours, theirs),
                over=over,
                group=mine.group,
            )
    return None


def gain(record: Record, name: str, over: str) -> Ratio | None:
    """How many times as fast `name` is as `over`: in a group that timed both, else by way of `best`, which every group
    has: its ratio to each of them is taken in their own groups, so a card that changes in between does no harm. Of a
    record with several numbers of cards, on the fewest."""
    record = record.parts()[0]
    direct = ratio(record, name, over)
    if direct is not None or SUBJECT in (name, over):
        return direct
    upper, lower = ratio(record, name, SUBJECT), ratio(record, over, SUBJECT)
    if upper is None or lower is None:
        return None
    value, noise = upper.value / lower.value, upper.noise + lower.noise
    return Ratio(value=value, noise=noise, distinct=abs(value - 1) > noise, over=over, group=upper.group)


def baselines(record: Record, group: int | None = None) -> Sequence[ContenderResult]:
    """PyTorch's contenders that were timed, the fastest first."""
    found = [c for c in record.contenders if c.step_ms and group in (None, c.group) and is_baseline(c.name)]
    return sorted(found, key=lambda c: c.step_ms or 0.0)


def over_pytorch(record: Record, name: str = SUBJECT) -> Ratio | None:
    """The smallest ratio of `name` to any PyTorch contender, each taken within its group: to the best PyTorch.

    Of a record with several numbers of cards, on the fewest.
    """
    record = record.parts()[0]
    found = [ratio(record, name, other.name, other.group) for other in baselines(record)]
    return min((r for r in found if r is not None), key=lambda r: r.value, default=None)


def deciding(records: Sequence[Record]) -> list[Record]:
    """Of each card, number of cards and workload the newest record that says how `best` stands against PyTorch; newest
    first.

    That is one in which `best` took turns with the PyTorch contender that is the fastest in any of them: a run without
    it would flatter `best`.

    Args:
        records: in any order; those that are no benchmarks, or timed no such pair, decide nothing.
    """
    cases: dict[tuple[object, ...], list[tuple[Record, dict[str, float]]]] = {}
    for record in sorted(records, key=lambda record: record.date, reverse=True):
        timed = reversed(baselines(record.parts()[0]))  # the fastest last, which a name timed twice keeps
        rivals = {c.name: c.step_ms or 0.0 for c in timed if ratio(record, SUBJECT, c.name, c.group)}
        if record.kind == "bench" and rivals:
            cases.setdefault((record.card, record.gpus, record.workload), []).append((record, rivals))
    found = []
    for runs in cases.values():
        fastest = min((ms, name) for _, rivals in runs for name, ms in rivals.items())[1]
        found.append(next(record for record, rivals in runs if fastest in rivals))
    return sorted(found, key=lambda record: record.date, reverse=True)
