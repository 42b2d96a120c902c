"""Goals: the right record, the right ratio, and no verdict that the noise does not allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.helpers import record
from ridgeline.bench.goals import Goal, find_records, judge, main, read_goals, table
from ridgeline.errors import ConfigError
from ridgeline.records import ContenderResult, write_record

GOAL = Goal(workload="hal-20m", batch=512, context=256, precision="bf16", ratio=2.0)


def result(name: str, speed: float | None, group: int = 0, spread: float = 0.01) -> ContenderResult:
    if speed is None:
        return ContenderResult(name=name, group=group, error="failed")
    return ContenderResult(name=name, group=group, tokens_per_s=speed, step_ms=131072e3 / speed, spread=spread)


def test_the_fastest_pytorch_contender_decides():
    verdict = judge(GOAL, [record(result("best", 4e6), result("eager", 1e6), result("compile+graph:copies", 1.9e6))])
    assert verdict.ratio == pytest.approx(4 / 1.9)
    assert verdict.pytorch is not None
    assert verdict.pytorch.name == "compile+graph:copies"
    assert verdict.status == "met"


def test_a_newer_run_without_pytorchs_fastest_decides_nothing():
    old = record(result("best", 4e6), result("compile+graph", 1.9e6), result("compile+graph:explicit", 2e6))
    ladder = record(result("best", 4.2e6), result("compile+graph", 1.8e6), result("m3", 1.5e6), date="2026-12-01")
    apart = record(
        *(result("best", 4e6), result("compile+graph:explicit", 2.1e6, group=1), result("eager", 1e6)),
        date="2026-12-02",
    )  # never in a group with `best`
    for records in ([ladder, old], [old, ladder], [apart, ladder, old]):
        assert judge(GOAL, records).record == old
    elsewhere = replace(record(result("best", 1e6), result("compile", 5e5), date="2026-12-03"), card="another")
    assert judge(GOAL, [ladder, elsewhere, old]).ratio == pytest.approx(2)  # of that card the only one, and the newest
    whole = record(result("best", 5e6), result("compile+graph:explicit", 2e6), date="2026-12-04")
    assert judge(GOAL, [old, whole, ladder]).record == whole


def test_ratios_are_taken_within_groups():
    contenders = [
        result("best", 4e6, group=0),
        result("eager", 1e6, group=0),
        result("best", 3e6, group=1),  # the card was slower then, for both
        result("compile", 1.8e6, group=1),
    ]
    verdict = judge(GOAL, [record(*contenders)])
    assert verdict.ratio == pytest.approx(3 / 1.8)
    assert verdict.status == "missed"


def test_spread_across_the_goal_is_unclear():
    assert judge(GOAL, [record(result("best", 4.1e6, spread=0.1), result("eager", 2e6))]).status == "unclear"


def test_failed_contenders_and_other_workloads_decide_nothing():
    assert judge(GOAL, [record(result("best", None), result("eager", 1e6))]).status == "no record"
    assert judge(GOAL, [record(result("best", 4e6), result("eager", 1e6), batch=32)]).status == "no record"
    two = replace(record(result("best", 4e6), result("eager", 1e6)), gpus=2)
    assert judge(GOAL, [two]).status == "no record"
    assert judge(GOAL, []).status == "no record"


def test_one_card_decides_where_a_record_has_several_numbers(tmp_path):
    both = [
        replace(result(name, speed, group=cards - 1), gpus=cards)
        for name, speed, cards in (("best", 8e6, 2), ("eager", 5e6, 2), ("best", 4e6, 1), ("eager", 2e6, 1))
    ]
    write_record(replace(record(*both), gpus=2), tmp_path / "a.json")
    records = find_records(tmp_path)
    assert [r.gpus for r in records] == [1, 2]
    verdict = judge(GOAL, records)
    assert verdict.ratio == pytest.approx(2)  # and not 1.6 of two cards, nor 4 or 0.8 across
    assert verdict.ours is not None
    assert verdict.ours.tokens_per_s == 4e6


def test_peers_and_rungs_are_no_pytorch_baseline():
    assert judge(
        GOAL, [record(result("best", 4e6), result("m3", 3.9e6), result("liger", 2e6), result("eager", 1e6))]
    ).ratio == pytest.approx(4)


def test_command_reads_newest_first(tmp_path, capsys):
    goals = tmp_path / "goals.toml"
    goals.write_text(
        '[[goal]]\nworkload = "hal-20m"\nbatch = 512\ncontext = 256\nprecision = "bf16"\nratio = 2.0\n'
        '[[goal]]\nworkload = "hal-5m"\nbatch = 512\ncontext = 128\nprecision = "bf16"\nratio = 2.0\n'
    )
    new = record(result("best", 4e6), result("eager", 1e6))
    old = record(result("best", 1e6), result("eager", 1e6), date="2026-11-01T00:00:00+00:00")
    write_record(new, tmp_path / "results" / "card" / "a.json")
    write_record(old, tmp_path / "results" / "card" / "b.json")
    assert main([str(goals), str(tmp_path / "results")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4.00" in lines[1]
    assert "met" in lines[1]
    assert "no record" in lines[2]


def test_an_edited_record_stops_the_table(tmp_path, capsys):
    file = write_record(record(result("best", 4e6), result("eager", 1e6)), tmp_path / "a.json")
    file.write_text(file.read_text().replace("4000000.0", "9000000.0"))
    goals = tmp_path / "goals.toml"
    goals.write_text("goal = []")
    assert main([str(goals), str(tmp_path)]) == 2
    assert "changed after it was written" in capsys.readouterr().err


def test_a_folder_that_is_not_there_and_half_a_command(tmp_path, capsys):
    goals = tmp_path / "goals.toml"
    goals.write_text("goal = []")
    assert main([str(goals), str(tmp_path / "none")]) == 2
    assert "is no folder of records" in capsys.readouterr().err
    assert main([str(goals)]) == 2
    assert "a file of goals and a folder of records, or neither" in capsys.readouterr().err


def test_the_projects_goals_can_be_read():
    goals = read_goals("benchmarks/goals.toml")
    assert len(goals) == 11
    assert "hal-20m B512 T256 bf16" in table([judge(goal, []) for goal in goals])


def test_unreadable_goals(tmp_path):
    file = tmp_path / "goals.toml"
    for text in ("", "[[goal]]\nspeed = 1\n", "["):
        file.write_text(text)
        with pytest.raises(ConfigError, match="holds no goals"):
            read_goals(file)
