"""The table of several cards: what is compared with what."""

from dataclasses import replace

from report import samples
from ridgeline.records import Record
from ridgeline.report.played import MISSING
from ridgeline.report.scaling import scaling


def timed(batch: int, gpus: int, step_ms: float, date: str = "2026-11-30T01:30:23+00:00") -> Record:
    result = samples.result("best", step_ms, batch * gpus, 256)
    return replace(samples.record("bench", "hal-20m", batch, 256, contenders=[result]), gpus=gpus, date=date)


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_batch_of_each_card_or_of_all_is_compared_within_one_run() -> None:
    older = [timed(512, 1, 40.0, "2026-11-29T01:00:00+00:00"), timed(512, 2, 80.0, "2026-11-29T01:00:00+00:00")]
    table = rows(scaling([timed(512, 1, 40.0), timed(512, 2, 40.0), timed(256, 2, 25.0), *older]))
    assert [row[1] for row in table] == ["2", "2"]
    assert ["512 × 256 a card" in table[0][0], "512 × 256 in all" in table[1][0]] == [True, True]
    assert [row[-1] for row in table] == ["2.00", "1.60"]


def test_cards_of_different_runs_are_not_compared() -> None:
    assert scaling([timed(512, 2, 40.0), timed(512, 1, 40.0, "2026-11-29T01:00:00+00:00")]) == MISSING
    assert scaling([]) == MISSING
