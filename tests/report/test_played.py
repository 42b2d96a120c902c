"""Tables of races and of training on replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from report import samples
from ridgeline.records import ContenderResult, Record, WorkloadInfo
from ridgeline.report import docs, played, series
from ridgeline.report.page import chapters


def race(
    level: int = 0, cache: str = "exact", names: tuple[str, ...] = ("a:best", "b:compile"), last: float = 60.0
) -> Record:
    games = {"count": 30, "level": level, "cache": cache, "first_seed": 10_000}
    curves: list[dict[str, Any]] = [
        {"figure": "setting", "name": "setting", "games": games, "grid": [0.0, 10.0, last], "data": "boxing"},
        {"figure": "crossings", "name": "crossings", "rows": [
            {"contender": "a:best", "target": "26 of 30 won", "seconds": 10.02},
            {"contender": "b:compile", "target": "26 of 30 won", "seconds": None},
        ]},
    ]  # fmt: skip
    for name in names:
        points = [
            {"at": at, "seconds": at + 0.02, "steps": 100 * at, "tokens": 1_500_000 * at, "val_loss": 0.5, "games": 30,
             "wins": 29, "ko": 28, "margin": 61.25, "intervals": {"margin": [55.04, 66.96]}}
            for at in (10, 60)
        ]  # fmt: skip
        curves.append({"figure": "race", "name": name, "points": points})
        drawn = {"x": [10.0, 60.0], "y": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]}
        curves.append({"figure": "margin", "name": name, **drawn, "x_label": "seconds", "y_label": "margin"})
    made = samples.record("race", "boxing", 32, 16, curves=curves)
    return replace(made, gpus=2, contenders=[ContenderResult(name=name) for name in names])


def test_a_race_is_a_table_a_setting_of_the_games():
    text = played.race([race(3, names=("a:best",)), race(), replace(race(), card="CPU", gpus=0), race()])
    first, second = text.split("30 games at level ")[1:]
    assert first.startswith("0, `--cache exact`, seeds from 10,000; boxing data, 60 s of training, one card each")
    assert "| `b:compile` | 60.0 | 6,000 | 1.50 M | 0.500 | 29 | 28 | 61.2 (55.0 to 67.0) |" in first
    assert first.count("| `") == 4
    assert second.startswith("3, ")
    assert played.race([samples.ladder()]) == played.MISSING


def test_a_checkpoint_that_did_not_play_all_games_says_so_and_has_no_margin():
    record = race(names=("a:best",))
    _, crossed, raced, _ = record.curves
    raced["points"][1] |= {"games": 13, "wins": 13, "ko": 12}
    crossed["rows"][0]["open"] = [60.02]
    text = played.race([record])
    assert "| 29 | 28 | 61.2 (55.0 to 67.0) |" in text
    assert f"| 13 of 13 | 12 of 13 | {played.CUT} |" in text
    told = "| `a:best` | 26 of 30 won | 10.0 s (at 60.0 s too few games to tell) |"
    assert told in played.crossings([record])


def test_the_longest_race_comes_first():
    records = [race(), race(3), race(names=("c:best",), last=300.0), race(names=("d:best",), last=300.0)]
    tables = played.race(records).split("30 games at level ")[1:]
    assert [("300 s" in table, table[0], table.count("| `")) for table in tables] == [
        (True, "0", 2),
        (False, "0", 4),
        (False, "3", 4),
    ]
    assert "`c:best`" in tables[0]  # the newest


def test_races_in_a_report_are_told_apart_by_their_games():
    records = [race(3, "rolling"), samples.race()]
    titles = [chapter.title for chapter in chapters(records)]
    assert "Race: boxing, 60 s of training, level 3, cache rolling" in titles
    assert "Race: boxing, batch 64 × 64, bf16" in titles  # without a setting there is nothing else to say


def test_crossings_and_picture_are_those_of_the_whole_race(tmp_path):
    records = [race(3, names=("a:best",)), race()]
    assert "| `a:best` | 26 of 30 won | 10.0 s |" in played.crossings(records)
    assert "| `b:compile` | 26 of 30 won | not in this time |" in played.crossings(records)
    section = played.race_section(records)
    assert section is not None
    assert section.title == "Margin: boxing"
    assert played.race_section([]) is None
    assert played.crossings([]) == played.MISSING


def test_the_times_of_a_race_are_drawn_by_their_ratio(monkeypatch):
    ticks = []
    monkeypatch.setattr(series, "lines", lambda *given, **rest: ticks.append(rest["ticks"]))
    played.race_section([race(last=300.0)])
    assert ticks == [[10.0, 300.0]]
    list(series.curve_sections(replace(race(), kind="study"), 0))
    assert ticks[1] is None


def melee(name: str, **rates: float) -> Record:
    rows = [{"step": 120, **{f"val_loss.{head}": 0.0123 for head in ("c", "main", "buttons")},
             **{f"val_accuracy.{head}": 0.995 for head in ("c", "main", "buttons")}}]  # fmt: skip
    curves = [
        {"figure": "melee", "name": "validations", "rows": rows},
        {"figure": "setting", "name": "setting", "command": "ridgeline train hal-20m --data OUT", "seconds": 33.2},
    ]
    contenders = [
        ContenderResult(name=name, tokens_per_s=rate, step_ms=131_072_000 / rate) for name, rate in rates.items()
    ]
    made = samples.record("study", name, 512, 256, curves=curves)
    return replace(
        made, contenders=contenders, workload=WorkloadInfo(name=name, batch=512, context=256, precision="bf16")
    )


def test_replays_say_rates_and_what_is_known_by_heart():
    text = played.replays([melee("hal-20m on Melee", train=3.6e6, fixed=3.7e6), samples.study()])
    assert text.startswith("`ridgeline train hal-20m --data OUT` on one NVIDIA H200, ")
    assert "| train | 3.60 M | 36.41 |" in text
    assert "heart" not in text
    text = played.replays([melee("hal-20m on Melee, one game by heart", train=3.6e6)])
    assert text.startswith("One game by heart, as both players, 33 s on one NVIDIA H200, ")
    assert "| 120 | 0.0123, 99.50% | 0.0123, 99.50% | 0.0123, 99.50% |" in text
    assert played.replays([samples.study(), race()]) == played.MISSING


def test_documents_take_benchmarks_and_others_apart():
    text = "<!-- from records: race -->\n<!-- end -->\n<!-- from records: singles -->\n<!-- end -->\n"
    assert "seeds from 10,000" in docs.written(text, [race(), samples.ladder()])
