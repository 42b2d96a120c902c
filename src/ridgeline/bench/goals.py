"""`make goals`: what the records say of the goals in benchmarks/goals.toml."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline import files
from ridgeline.bench.ratios import SUBJECT, deciding, over_pytorch
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import ContenderResult, Record, WorkloadInfo, read_record


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio to reach on a workload.

    Attributes:
        workload, batch, context, precision: as in records.
        ratio: tokens/s of `best` over those of the fastest PyTorch contender of the same run.
        tokens_per_s: the aim on one H200, for orientation.
    """

    workload: str
    batch: int
    context: int
    precision: str
    ratio: float
    tokens_per_s: float | None = None

    def fits(self, record: Record) -> bool:
        """Whether a record is of this goal's workload, on one card."""
        return record.gpus <= 1 and record.workload == WorkloadInfo(
            name=self.workload, batch=self.batch, context=self.context, precision=self.precision
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal against the newest record that can decide it (`deciding`).

    Attributes:
        goal: the goal.
        record: the record, or None where no record has both sides.
        ours, pytorch: the two results that decide.
        ratio: the smallest ratio to any PyTorch contender, taken within groups.
        noise: by how much the spreads of the two allow the ratio to be wrong, as a share of it.
    """

    goal: Goal
    record: Record | None = None
    ours: ContenderResult | None = None
    pytorch: ContenderResult | None = None
    ratio: float | None = None
    noise: float | None = None

    @property
    def status(self) -> str:
        """met, missed, unclear (the spread reaches across the goal), or no record."""
        if self.ratio is None or self.noise is None:
            return "no record"
        if abs(self.ratio - self.goal.ratio) < self.noise * self.ratio:
            return "unclear"
        return "met" if self.ratio >= self.goal.ratio else "missed"


def read_goals(file: str | Path) -> list[Goal]:
    """The goals in a TOML file.

    Raises:
        ConfigError: the file or an entry cannot be read.
    """
    try:
        entries = files.parsed(Path(file).read_text(encoding="utf-8"), tomllib.loads)["goal"]
        return [Goal(**entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no goals that can be read: {error}") from error


def find_records(folder: str | Path, kinds: Sequence[str] = ("bench",)) -> list[Record]:
    """Every record of some kinds below a folder, newest first, each number of cards for itself.

    Raises:
        ConfigError: there is no such folder.
        RecordError: one of them was edited or is no record.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is no folder of records; run this where it is, or name one")
    records = [part for file in sorted(Path(folder).rglob("*.json")) for part in read_record(file).parts()]
    return sorted((r for r in records if r.kind in kinds), key=lambda r: r.date, reverse=True)


def judge(goal: Goal, records: Sequence[Record]) -> Verdict:
    """The verdict of the newest record in which `best` took turns with the fastest PyTorch contender there is."""
    for record in deciding([record for record in records if goal.fits(record)]):
        found = over_pytorch(record)
        if found is not None:
            ours, other = record.result(SUBJECT, found.group), record.result(found.over, found.group)
            return Verdict(goal=goal, record=record, ours=ours, pytorch=other, ratio=found.value, noise=found.noise)
    return Verdict(goal=goal)


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as text, one line a goal."""
    lines = [
        f"{'workload':<34}{'best PyTorch':>24}{'M tok/s':>9}{'best':>9}{'ratio':>8}{'goal':>7}  {'':<10}record",
    ]
    for v in verdicts:
        name = f"{v.goal.workload} B{v.goal.batch} T{v.goal.context} {v.goal.precision}"
        middle = f"{'–':>24}{'–':>9}{'–':>9}{'–':>8}"
        where = ""
        if v.ours and v.pytorch and v.record and v.ours.tokens_per_s and v.pytorch.tokens_per_s:
            theirs, ours = v.pytorch.tokens_per_s / 1e6, v.ours.tokens_per_s / 1e6
            middle = f"{v.pytorch.name:>24}{theirs:>9.2f}{ours:>9.2f}{v.ratio:>8.2f}"
            where = f"{v.record.date[:10]} {v.record.card} {(v.record.git or '')[:9]}"
        lines.append(f"{name:<34}{middle}{v.goal.ratio:>7.2f}  {v.status:<10}{where}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table for a goals file and a folder of records, without them this project's; 2 where they cannot be
    read."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if len(given) not in (0, 2):
            raise ConfigError(f"name a file of goals and a folder of records, or neither; got {' '.join(given)}")
        file, folder = given or ("benchmarks/goals.toml", "benchmarks/results")
        records = find_records(folder)
        print(table([judge(goal, records) for goal in read_goals(file)]))
    except RidgelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
