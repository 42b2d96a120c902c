"""The tables of the project's own documents are those of its records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from report import samples
from ridgeline.bench.goals import find_records
from ridgeline.bench.workloads import floor_s, workload
from ridgeline.errors import ConfigError
from ridgeline.hardware import card
from ridgeline.records import RecordError
from ridgeline.report import docs

ROOT = Path(__file__).parents[2]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("name", docs.DOCUMENTS)
def test_documents_are_as_the_records_have_it(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / name).read_text(encoding="utf-8")
    assert docs.written(text, find_records(ROOT / docs.RECORDS, docs.KINDS), name) == text, "run: make docs"


def test_a_document_is_written_from_its_records_and_nothing_else_of_it_changes():
    text = "before\n<!-- from records: ladder -->\nold\n<!-- end -->\nafter\n"
    after = docs.written(text, [samples.ladder()])
    assert after.startswith(
        "before\n<!-- from records: ladder -->\n`hal-20m`, batch 512 × 256, bf16, on one NVIDIA H200"
    )
    assert after.endswith("\n<!-- end -->\nafter\n")
    assert "old" not in after
    assert docs.written(after, [samples.ladder()]) == after


def test_the_ladder():
    table = rows(docs.ladder([samples.ladder()]))
    assert [row[0] for row in table] == ["`m0`", "`m1`", "`m2`", "`m3`", "`r16`", "`best`",
                                         "PyTorch's best, `max-autotune`"]  # fmt: skip
    m2 = table[2]
    assert m2[3:5] == ["2.26×", "2.15×"]  # 430 / 190 here; 445,372 / 207,146 in the article
    assert m2[5] in ("4.65 (10.68)", "4.66 (10.68)")  # 4.655: Python 3.12 sums with less rounding
    assert table[5][4] == "–"  # the article has no such rung
    assert docs.ladder([samples.smaller()]) == docs.MISSING


def test_a_rung_that_failed_has_its_reason_and_the_next_is_compared_with_the_one_before_it():
    record = samples.ladder()
    broken = [
        samples.ContenderResult(name="m3", error="RuntimeError: no") if c.name == "m3" else c for c in record.contenders
    ]
    table = rows(docs.ladder([replace(record, contenders=broken)]))
    assert table[3][:2] == ["`m3`", "failed: RuntimeError: no"]
    assert table[4][:5] == ["`r16`", "58", "2.26 M", "3.28×", "2.53×"]  # over m2; 1,125,109 / 445,372 in the article


def test_a_ladder_is_of_one_group():
    record = samples.ladder()
    alone = replace(samples.result("best", 39.0, 512, 256, group=7), groups_ms_per_layer=None)
    table = rows(docs.ladder([replace(record, contenders=[alone, *record.contenders])]))
    assert table[5][1] == "36.9"  # beside the rungs, not in a group without them


def test_a_gain_that_the_spread_swallows_is_not_written():
    record = samples.ladder()
    noisy = [replace(c, spread=2.0) if c.name == "r16" else c for c in record.contenders]
    table = rows(docs.ladder([replace(record, contenders=noisy)]))
    assert table[4][3] == "≈"


def test_a_climb_whose_gains_cannot_be_told_stands_beside_one_whose_can():
    clear = samples.ladder()
    noisy = [replace(c, spread=3.0) if c.name == "m1" else c for c in clear.contenders]
    busy = replace(clear, date="2026-12-24T00:00:00+00:00", contenders=noisy)
    assert docs.ladder([busy, clear]) == docs.ladder([clear])
    table = rows(docs.climbed([busy, clear]))
    assert [row[1] for row in table] == ["`m0`", "`m1`", "`m2`", "`m3`", "`r16`", "`best`"]
    assert table[1][1:5] == ["`m1`", "430", "300%", "≈"]
    assert docs.ladder([busy]).count("≈") == 2  # alone it has to do: to m1, and from it
    short = replace(clear, date="2026-12-25T00:00:00+00:00", contenders=[c for c in clear.contenders if c.name != "m0"])
    assert docs.ladder([short, busy, clear]) == docs.ladder([clear])  # of all rungs
    assert rows(docs.ladder([short]))[0][0] == "`m1`"
    assert rows(docs.climbed([clear])) == rows(docs.climbed([busy])) == []


def test_other_models_climb_in_a_table_of_their_own():
    times = (("m0", 12.0, 0.3), ("m1", 13.0, 0.2), ("m3", 2.0, 0.01), ("best", 0.9, 0.01))
    small = samples.record(
        "bench", "gpt2-c256", 32, 256, contenders=[samples.result(n, ms, 32, 256, spread=s) for n, ms, s in times]
    )
    older = replace(small, date="2026-11-01T00:00:00+00:00", contenders=small.contenders[1:])
    table = rows(docs.elsewhere([small, samples.ladder(), older]))
    assert [row[:5] for row in table] == [
        ["`gpt2-c256`", "`m0`", "12", "30%", "–"],
        ["`gpt2-c256`", "`m1`", "13", "20%", "≈"],
        ["`gpt2-c256`", "`m3`", "2", "1%", "6.50×"],
        ["`gpt2-c256`", "`best`", "0.9", "1%", "2.22×"],
    ]
    assert docs.elsewhere([samples.ladder()]) == docs.MISSING


def test_layers_have_a_column_a_rung():
    table = docs.layers([samples.ladder()])
    assert table.splitlines()[0] == "| kernel ms a layer | `m0` | `m1` | `m2` | `m3` | `r16` | `best` |"
    assert rows(table)[0][0] == "forward · QKV"


def test_single_changes_are_compared_with_their_rung():
    record = samples.ladder()
    single = [
        samples.result("m2+reuse", 188.0, 512, 256, spread=0.001),
        samples.result("m3-zero_fill", 111.0, 512, 256),
    ]
    table = rows(docs.singles([replace(record, contenders=[*record.contenders, *single])]))
    assert table == [
        ["`hal-20m`", "`m2+reuse`", "188", "1.01×", "`m2`"],
        ["`hal-20m`", "`m3-zero_fill`", "111", "≈", "`m3`"],
    ]
    assert docs.singles([record]) == docs.MISSING


def test_performance_has_a_row_for_every_goal_measured_or_not(monkeypatch):
    monkeypatch.chdir(ROOT)
    table = rows(docs.performance([samples.ladder()]))
    assert len(table) == 11
    assert table[0] == ["`hal-20m` 512 × 256, bf16", "3.55 M", "1.74 M (`max-autotune`)", "2.04×", "43%", "59%"]
    assert table[1][1:] == ["–"] * 5
    assert docs.performance([]) == docs.MISSING


def test_floors_of_all_rows_are_of_one_formula_whatever_a_record_was_counted_by(monkeypatch):
    monkeypatch.chdir(ROOT)
    record = samples.ladder()
    other = replace(record, contenders=[replace(r, floor_share=0.01) for r in record.contenders])
    floor_ms = 1e3 * floor_s(workload("hal-20m"), card("h200"))
    share = floor_ms / next(r.step_ms for r in record.contenders if r.name == "best")
    assert rows(docs.performance([other]))[0][-1] == rows(docs.performance([record]))[0][-1] == f"{share:.0%}"
    assert rows(docs.performance([replace(record, card="a card of 2030")]))[0][-1] == "–"


def test_the_newest_record_counts():
    old = replace(samples.smaller(), date="2026-11-28T00:00:00+00:00")
    assert docs.newest([samples.smaller(), old]) == [samples.smaller()]
    assert docs.newest([replace(samples.smaller(), gpus=2)]) == []
    fewer = [result for result in samples.smaller().contenders if result.name != "compile+graph"]
    newer = replace(samples.smaller(), contenders=fewer, date="2026-11-30T00:00:00+00:00")
    assert docs.newest([newer, old]) == [old]  # without PyTorch's fastest a run says nothing of it
    assert docs.newest([newer]) == [newer]


def test_windows_and_contexts():
    records = [samples.ladder(), samples.smaller(), *samples.sweep()]
    assert [row[2] for row in rows(docs.windows(records))] == ["13.9 k", "6.81 k", "8.83 k", "77.6 k", "39.1 k"]
    text = docs.written("<!-- from records: contexts -->\n<!-- end -->", records)
    assert [row[1] for row in rows(text)] == ["128", "256", "512", "1024", "2048"]
    step = replace(
        records[2],
        contenders=[r for r in records[2].contenders if r.name != "eager"] + [samples.result("compile", 9.0, 64, 128)],
    )
    text = docs.written("<!-- from records: contexts -->\n<!-- end -->", [step, *records])
    assert rows(text)[0][5] == "630 k"  # of the newest run that timed it
    assert "compile`" not in text  # once is no sweep
    assert docs.windows([samples.ladder()]) == docs.MISSING
    newer = replace(samples.ladder(), contenders=[c for c in samples.ladder().contenders if c.name != "r16"])
    assert docs.windows([newer, *records]) == docs.windows(records)  # the rung of the newest run that timed it


@pytest.mark.parametrize(
    ("text", "words"),
    [("nothing", "has no block"), ("<!-- from records: poem -->\n<!-- end -->", "'poem', known are performance")],
)
def test_documents_without_blocks_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        docs.written(text, [])


def test_a_race_that_does_not_say_what_it_was():
    race = replace(samples.race(), curves=[])
    with pytest.raises(RecordError, match=r"the race record of .* does not say what was asked for"):
        docs.written("<!-- from records: race -->\n<!-- end -->", [race])


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "page.md"
    file.write_text("<!-- from records: ladder -->\n<!-- end -->\n", encoding="utf-8")
    assert docs.main([str(file)]) == 0
    assert "written" in capsys.readouterr().out
    assert docs.main([str(file)]) == 0
    assert "as the records have it" in capsys.readouterr().out
    assert docs.main([str(tmp_path / "none.md")]) == 2


def test_images_of_the_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    drawn = docs.images([samples.ladder(), samples.smaller()], tmp_path)
    assert [file.name for file in drawn] == ["overview.png", "ladder.png"]
    assert docs.images([samples.smaller()], tmp_path) == []  # one workload is no overview, and it climbs nothing


def test_every_image_that_a_document_shows_is_there():
    for name in docs.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for place in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert (ROOT / name).parent.joinpath(place).is_file(), f"{name} shows {place}; run: make docs"


def test_engines_stand_beside_each_other_in_one_order():
    measured = (
        ("best", 1.0, 0, None),
        ("compile+graph", 2.0, 0, None),
        ("liger", 2.5, 0, None),
        ("best", 1.1, 1, None),
        ("eager", 8.0, 1, 3.2),
        ("compile+graph", 2.1, 1, 29.7),
    )
    results = [
        replace(samples.result(name, ms, 32, 256, group=group), first_step_s=first)
        for name, ms, group, first in measured
    ]
    record = samples.record("bench", "gpt2-c256", 32, 256, contenders=results)
    text = docs.written("<!-- from records: engines -->\n<!-- end -->", [record])
    table = rows(text)
    assert [row[1] for row in table] == ["`eager`", "`compile+graph`", "`liger`", "`best`"]
    assert [row[2] for row in table] == ["8", "2", "2.5", "1"]
    assert [row[-2] for row in table] == ["3", "30", "–", "–"]  # the first step, from the group that measured it
    assert [row[-1] for row in table] == ["7.27×", "2.00×", "2.50×", "–"]  # each within its group
    assert docs.MISSING in docs.written("<!-- from records: engines -->\n<!-- end -->", [samples.ladder()])
    together = replace(record, contenders=[replace(c, first_step_s=None) for c in record.contenders])
    other = replace(record, card="NVIDIA A100", contenders=[replace(c, first_step_s=99.0) for c in record.contenders])
    text = docs.written("<!-- from records: engines -->\n<!-- end -->", [together, other, record])
    assert rows(text) == table  # first steps of an older run on such a card
    newer = replace(
        record,
        contenders=[
            samples.result(name, ms, 32, 256) for name, ms in (("best", 0.9), ("eager", 9.0), ("compile+graph", 1.8))
        ],
    )
    table = rows(docs.written("<!-- from records: engines -->\n<!-- end -->", [newer, record]))
    times = [row[2] for row in table]
    assert times == ["9", "1.8", "2.5", "0.9"]  # who is not in the newest has the row of the one before
    assert [row[-1] for row in table] == ["10.00×", "2.00×", "2.50×", "–"]  # and the ratio of that run
