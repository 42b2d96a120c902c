"""What a report says of records, and what it refuses to say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from report import samples
from ridgeline.errors import ConfigError
from ridgeline.report.page import build_page, chapters, circumstances
from ridgeline.report.palette import LIGHT
from ridgeline.report.sections import bench_sections, beside_section, headline, overview_section, rungs_of, timed
from ridgeline.report.series import curve_sections, roofline_section, short
from ridgeline.report.sweeps import sweep_section, sweeps


def table_of(section) -> dict[str, list[str]]:
    return {row[0].text: [cell.text for cell in row[1:]] for row in section.table.rows}


def test_the_ladder_is_climbed_in_order_and_its_gains_stand_beside_the_articles():
    record = samples.ladder()
    assert rungs_of(record) == ["m0", "m1", "m2", "m3", "r16", "best"]
    assert [r.name for r in timed(record)][:7] == [*rungs_of(record), "max-autotune"]
    speed, phases, layers = bench_sections(record, 0)
    assert speed.title == "The ladder"
    assert "2.04× the speed of PyTorch's best (max-autotune)" in speed.lead
    table = table_of(speed)
    assert table["transformers"][-1].startswith("UnsupportedError: transformers cannot express")
    assert table["compile+graph"][5] == "–"  # group 1's fastest PyTorch contender is itself
    assert [row[6].text for row in speed.table.rows if row[0].text == "compile+graph"] == ["≈", "–"]
    assert table_of(phases)["best"] == ["12.18", "24.35", "0.17"]
    assert table_of(layers)["backward, article"][:5] == ["50.35", "39.23", "19.84", "19.91", "19.01"]


def test_the_overview_has_the_newest_run_of_each_workload():
    old = replace(samples.smaller(), date="2026-11-01T00:00:00+00:00")
    section = overview_section([old, samples.ladder(), samples.smaller()])
    assert section is not None
    assert list(table_of(section)) == ["hal-20m, batch 512 × 256, bf16", "hal-5m, batch 512 × 128, bf16"]
    assert len(section.table.rows) == 2
    assert overview_section([old, samples.smaller()]) is None


def test_single_changes_follow_their_rung_whatever_their_speed():
    record = samples.ladder()
    single = [samples.result("m2+reuse", 150.0, 512, 256), samples.result("m2+zero_fill", 210.0, 512, 256)]
    names = [r.name for r in timed(replace(record, contenders=[*single, *record.contenders]))]
    assert names[:6] == ["m0", "m1", "m2", "m2+reuse", "m2+zero_fill", "m3"]


def test_a_rung_that_is_slower_or_not_told_apart_is_said_so():
    record = samples.ladder()
    slower = [replace(c, step_ms=200.0) if c.name == "m2" else c for c in record.contenders]
    slower = [replace(c, step_ms=200.5) if c.name == "m3" else c for c in slower]
    section = next(bench_sections(replace(record, contenders=slower), 0))
    assert "m3 and m2 differ by less than their spread." in section.notes
    turned = [replace(c, step_ms=700.0) if c.name == "m1" else c for c in record.contenders]
    section = next(bench_sections(replace(record, contenders=turned), 0))
    assert "m1 is slower than m0 here (0.87×)." in section.notes


def test_the_second_articles_figures_stand_below_its_workload_alone():
    said = [" ".join(next(bench_sections(record, 0)).notes) for record in samples.sweep()]
    assert ["Tesla T4" in notes for notes in said] == [False, True, False, False, False]


def test_no_ratio_crosses_runs():
    # the second article divides by a baseline of another session; here two runs are set beside each other, no more
    section = beside_section([samples.ladder(), samples.smaller()])
    assert section is not None
    assert not [cell for row in section.table.rows for cell in row if "×" in cell.text]
    assert beside_section([samples.ladder(), replace(samples.smaller(), card="another")]) is None
    assert beside_section([samples.ladder()]) is None
    alone = [c for c in samples.smaller().contenders if c.name == "best"]
    later = replace(samples.smaller(), date="2026-12-31T00:00:00+00:00", contenders=alone)
    assert beside_section([samples.ladder(), samples.smaller(), later, replace(later, gpus=2)]) is not None
    assert table_of(beside_section([samples.ladder(), samples.smaller(), replace(later, gpus=2), later])) == table_of(
        section
    )


def test_a_spread_that_swallows_the_difference_is_no_headline():
    record = samples.smaller()
    noisy = [replace(c, step_ms=13.0, spread=0.2) if c.name == "best" else c for c in record.contenders]
    assert "no faster or slower than the spread allows to say" in (headline(replace(record, contenders=noisy)) or "")
    assert "×" not in (headline(replace(record, contenders=noisy)) or "")


def test_all_workloads_at_a_glance_with_the_ladder_first():
    first, ladder, *_ = chapters(samples.everything())
    assert first.title == "At a glance"
    assert ladder.title.startswith("hal-20m")
    table = table_of(first.sections[0])
    assert table["hal-20m, batch 512 × 256, bf16"] == ["2.04×", "3.55 M", "1.74 M", "max-autotune"]
    assert list(table)[-1] == "gpt2-c256, batch 4 × 2048, bf16"
    assert [chapter.title for chapter in chapters([samples.smaller()])] == ["hal-5m, batch 512 × 128, bf16"]


def test_ratios_are_explained_where_there_are_some():
    whole = samples.smaller()
    alone = replace(whole, contenders=whole.contenders[:1])
    first, second = (next(bench_sections(record, 0)) for record in (whole, alone))
    assert any("× PyTorch is the ratio" in note for note in first.notes)
    assert not any("× PyTorch" in note for note in second.notes)


def test_floors_are_explained_where_there_are_some():
    whole = samples.smaller()
    bare = replace(whole, contenders=[replace(c, floor_share=None) for c in whole.contenders])
    first, second = (next(bench_sections(record, 0)) for record in (whole, bare))
    assert any("floor is the least time" in note for note in first.notes)
    assert not any("floor" in note for note in second.notes)


def test_columns_without_a_number_are_left_out():
    bare = [replace(c, overlap=None, first_step_s=None) for c in samples.smaller().contenders]
    section = next(bench_sections(replace(samples.smaller(), contenders=bare), 0))
    assert {"overlap", "first step s"}.isdisjoint(section.table.headers)
    assert {"MFU", "TB/s"} <= set(section.table.headers)
    rates = [row[section.table.headers.index("TB/s")].text for row in section.table.rows]
    assert all(re.fullmatch(r"\d+\.\d\d \(\d+%\)", text) for text in rates)
    assert all(len(row) == len(section.table.headers) for row in section.table.rows)


def test_a_headline_is_of_one_group():
    record = samples.smaller()
    other = [replace(samples.result("best", 6.0, 512, 128), group=1), samples.result("m1", 50.0, 512, 128, group=1)]
    said = headline(replace(record, contenders=[*record.contenders, *other]))
    assert said == "9.93 M tokens/s, 1.98× the speed of PyTorch's best (compile+graph)"  # not group 1's 10.9 M


def test_a_sweep_gathers_contexts_with_the_same_positions_a_step():
    records = samples.everything()
    (sweep,) = sweeps(records)
    assert sweep.kind.name == "context"
    assert list(sweep.members) == [128, 256, 512, 1024, 2048]
    assert all(records[i].workload.context == context for context, i in sweep.members.items())
    assert sweeps([*samples.sweep()[:1], *samples.sweep()[:1]]) == []
    folded = [chapter.title for chapter in chapters(records) if chapter.folded]
    assert len(folded) == 5
    place = sweep.members[256]
    rung = samples.result("m3", 2.4, 32, 256)
    records[place] = replace(records[place], contenders=[*records[place].contenders, rung])
    assert [c.title for c in chapters(records) if c.folded] == [t for t in folded if "32 × 256" not in t]  # it climbs
    earlier = replace(samples.sweep()[0], date="2026-11-01T00:00:00+00:00")
    assert sum(chapter.folded for chapter in chapters([*records, earlier])) == 5  # an earlier run of a value too


def test_sweeps_over_batch_and_cards():
    base = samples.smaller()
    larger = replace(base, workload=replace(base.workload, batch=1024))
    two = replace(base, gpus=2, contenders=[replace(base.contenders[0], tokens_per_s=1.9e7)])
    kinds = {sweep.kind.name: sweep for sweep in sweeps([base, larger, two])}
    assert {name: list(sweep.members) for name, sweep in kinds.items()} == {"batch": [512, 1024], "cards": [1, 2]}
    table = table_of(sweep_section(kinds["cards"], [base, larger, two], 0))
    assert table["best"] == ["9.93 M", "19.0 M"]
    assert "eager" not in table  # timed on one card alone
    later = [replace(record, date="2026-12-24T00:00:00+00:00") for record in (base, two)]
    titles = [chapter.title for chapter in chapters([base, two, *later]) if "a card" in chapter.title]
    assert [title[-10:] for title in titles] == ["2026-12-24", "2026-11-29"]  # two runs are told apart
    assert list(table_of(sweep_section(kinds["batch"], [base, larger, two], 0))) == [c.name for c in timed(base)]
    again = replace(base, date="2026-12-24T00:00:00+00:00")
    assert sweeps([again, base, larger])[0].members == {512: 0, 1024: 2}  # the newest of each value
    fewer = replace(again, contenders=again.contenders[:2])
    (filled,) = sweeps([fewer, base, larger])
    assert table_of(sweep_section(filled, [fewer, base, larger], 0))["eager"][0] == "1.84 M"  # of the run before it
    alone = replace(again, contenders=again.contenders[:1])
    assert sweeps([alone, base, larger])[0].members == {512: 1, 1024: 2}  # that has PyTorch beside `best`
    assert [sweep.kind.name for sweep in sweeps([base, replace(two, date=again.date)])] == []  # not of one run


def test_times_that_spread_by_more_than_themselves_have_no_band():
    records = samples.sweep()
    records[0] = replace(records[0], contenders=[replace(c, spread=7.59) for c in records[0].contenders])
    (sweep,) = sweeps(records)
    figure = sweep_section(sweep, records, 0).chart(LIGHT, False)
    heights = [path.vertices[:, 1] for band in figure.axes[0].collections for path in band.get_paths()]
    assert all(row.min() > 0 for row in heights)
    assert max(row.max() for row in heights) < 1.1 * 8192 / 1.2 / 1e3  # `best` at the shortest context


def test_who_was_timed_once_is_no_part_of_a_sweep():
    base = samples.smaller()
    larger = replace(base, workload=replace(base.workload, batch=1024), contenders=base.contenders[:1])
    (sweep,) = sweeps([base, larger])
    section = sweep_section(sweep, [base, larger], 0)
    assert list(table_of(section)) == [base.contenders[0].name]
    (legend,) = section.chart(LIGHT, False).legends
    assert [text.get_text() for text in legend.get_texts()] == [base.contenders[0].name]
    assert [chapter.folded for chapter in chapters([base, larger])].count(True) == 1  # the one of a single contender
    other = replace(larger, contenders=base.contenders[1:2])
    assert sweeps([replace(base, contenders=base.contenders[:1]), other]) == []
    two = [replace(record, gpus=2) for record in (base, larger)]
    assert [sweep.title for sweep in sweeps(two)] == ["hal-5m, windows of 128, bf16, 2 cards"]


def test_numbers_of_cards_in_one_record_are_a_sweep():
    base = samples.smaller()
    one = [replace(c, group=0, gpus=1) for c in base.contenders]
    two = [replace(c, group=1, gpus=2, tokens_per_s=2 * c.tokens_per_s) for c in base.contenders if c.tokens_per_s]
    record = replace(base, gpus=2, contenders=[*one, *two])
    parts = record.parts()
    (sweep,) = sweeps(parts)
    assert (sweep.kind.name, list(sweep.members)) == ("cards", [1, 2])
    assert table_of(sweep_section(sweep, parts, 0))["best"] == ["9.93 M", "19.9 M"]
    text = build_page([record])
    assert text == build_page(parts)
    assert "Tokens/s over the cards" in text
    assert ", 2 cards" in text


def test_a_roofline_needs_rates_and_a_known_card():
    record = samples.explained()
    assert [chapter.title for chapter in chapters([record])] == ["Explain: hal-20m, batch 512 × 256, bf16, best"]
    assert roofline_section(record, 0) is not None
    assert roofline_section(replace(record, card="a card of 2031"), 0) is None
    bare = [replace(op, tflops=None) for op in record.ops]
    assert roofline_section(replace(record, ops=bare), 0) is None


def test_names_on_a_roofline_are_short():
    assert short("mlp_up.weight_gradient") == "mlp_up.weight_gradient"
    assert short("heads.norm or heads.up or heads.down or cross_entropy") == "heads"
    assert short("qkv or mlp_up") == "qkv …"


def test_curves_are_drawn_over_steps_seconds_and_positions_and_rows_are_tables():
    titles = [section.title for section in curve_sections(samples.study(), 0)]
    assert titles == ["Loss: gpt2-c256", "Loss over time: gpt2-c256", "Standings"]
    rows = [[cell.text for cell in row] for row in list(curve_sections(samples.study(), 0))[2].table.rows]
    assert rows == [["gpt2-c256", "4.84 M", "1.61"]]
    runs = [
        {**c, "tokens": [512 * x for x in c["x"]]} if "rows" not in c and not c.get("line") else c
        for c in samples.study().curves
    ]
    sections = list(curve_sections(replace(samples.study(), curves=runs), 0))
    assert [section.key for section in sections[:3]] == ["loss-0", "loss-0-seconds", "loss-0-tokens"]
    for section in sections[:3]:  # counted lines stand in every one of them, as long as the longest run
        last = {row[0].text: row[2].text for row in section.table.rows}
        assert last["2-gram"] == max(last.values(), key=float)
    assert [row[2].text for row in sections[2].table.rows][:1] == ["0.512"]  # million positions
    broken = [{**curve, "tokens": "many"} if "tokens" in curve else curve for curve in runs]
    with pytest.raises(ConfigError):
        list(curve_sections(replace(samples.study(), curves=broken), 0))
    (strength,) = curve_sections(samples.race(), 0)
    assert strength.title == "Strength: boxing"


def test_a_table_of_anything_has_short_lists_and_what_is_true():
    rows = [{"way": "eager", "faster": False, "ms": [1.5, 2], "long": [1.0] * 9, "words": ["a"], "lone": None}]
    curves = [{"figure": "turns", "name": "turns", "rows": [*rows, {**rows[0], "faster": True, "ms": []}]}]
    (section,) = curve_sections(replace(samples.study(), curves=curves), 0)
    assert section.table.headers == ["way", "faster", "ms 1", "ms 2", "lone"]
    assert [[cell.text for cell in row] for row in section.table.rows] == [
        ["eager", "no", "1.5", "2", "–"],
        ["eager", "yes", "–", "–", "–"],
    ]


@pytest.mark.parametrize("narrow", [False, True])
def test_names_in_a_legend_leave_out_what_all_share_and_are_broken(narrow):
    shared = "+optimizer.lr=3e-4+optimizer.floor=3e-4+optimizer.warmup=0+optimizer.betas=[0.9,0.999]"
    own = "+optimizer.algorithm=adamw+optimizer.weight_decay=0.01+steps=2400+positions=learned+optimizer.stable=0.5"
    names = [f"gpt2-c256{shared}", f"fast-c256{own}{shared}"]
    curves = [{"figure": "loss", "name": name, "x": [1, 2], "y": [2.0, 1.0]} for name in names]
    (section,) = curve_sections(replace(samples.study(), curves=curves), 0)
    figure = section.chart(LIGHT, narrow)
    figure.canvas.draw()
    (legend,) = figure.legends
    first, second = (text.get_text() for text in legend.get_texts())
    assert (first, second.replace("\n", "")) == ("gpt2-c256", f"fast-c256{own}")
    box, (axes, _) = legend.get_window_extent(), figure.axes
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert list(table_of(section)) == ["gpt2-c256", f"fast-c256{own}"]
    assert section.notes == (
        "All with optimizer.lr=3e-4, optimizer.floor=3e-4, optimizer.warmup=0, optimizer.betas=[0.9,0.999].",
    )
    assert axes.get_window_extent().height > 1.5 * figure.dpi  # however many lines the legend takes


def test_a_figure_beneath_another():
    """Two panels over one axis, the lower one logarithmic with the curve's own values."""
    curve = {
        "name": "a",
        "figure": "training",
        "x": [20, 40],
        "y": [2.0, 1.5],
        "below": [0.5, 30.0],
        "below_label": "n",
    }
    (section,) = curve_sections(replace(samples.study(), curves=[curve]), 0)
    upper, lower = section.chart(LIGHT, False).axes
    assert (lower.get_yscale(), lower.get_ylabel()) == ("log", "n")
    assert [list(axes.lines[0].get_ydata()) for axes in (upper, lower)] == [[2.0, 1.5], [0.5, 30.0]]
    with pytest.raises(ConfigError, match="cannot be drawn"):
        list(curve_sections(replace(samples.study(), curves=[{**curve, "below": [0.5]}]), 0))


@pytest.mark.parametrize("curve", [{"x": [1, 2], "y": [1.0]}, {"y": ["a"]}, {"y": []}, {}])
def test_a_curve_that_cannot_be_drawn_is_refused(curve):
    with pytest.raises(ConfigError, match="cannot be drawn"):
        list(curve_sections(replace(samples.race(), curves=[curve]), 0))


def test_nothing_to_show_is_an_error():
    with pytest.raises(ConfigError, match="nothing to report"):
        chapters([])
    with pytest.raises(ConfigError, match="nothing to report"):
        chapters([replace(samples.study(), curves=None)])


def test_circumstances_are_told():
    said = circumstances(samples.ladder())
    assert said["clock"] == "1710–1980 MHz"
    assert said["throttled by"] == "power cap"
    assert "torch 2.11.0+cu130" in said["versions"]
    assert "clock" not in circumstances(replace(samples.ladder(), clocks=None))


def test_names_are_no_formulas_and_marks_are_plain_numbers():
    odd = r"$\frac$ <b>&"
    bench, explained = samples.smaller(), samples.explained()
    named = [replace(c, name=c.name + odd, phases_ms={odd: 1.0}) for c in bench.contenders]
    ops = [replace(op, name=op.name + odd) for op in explained.ops]
    page = build_page([replace(bench, contenders=named), replace(explained, ops=ops)])
    assert page.count("best$\\frac$ &lt;b&gt;&amp;") > 2  # in the table and in both drawings
    assert odd not in page
    assert "mathdefault" not in page
    section = roofline_section(explained, 0)
    assert section is not None
    axes = section.chart(LIGHT, False).axes[0]
    assert axes.xaxis.get_major_formatter()(1000.0, 0) == "1000"
    assert axes.xaxis.get_minor_formatter()(20.0, 0) == ""  # there is a power of ten to be told by


def test_records_without_what_a_figure_is_about_have_no_such_figure():
    def without_best(record):
        return replace(record, contenders=[c for c in record.contenders if c.name not in ("best", "compile+graph")])

    pair = [without_best(samples.ladder()), without_best(samples.smaller())]
    assert beside_section(pair) is None
    assert beside_section([pair[0], samples.smaller()]) is None
    assert beside_section([samples.ladder(), samples.smaller()]) is not None
    noisy = [replace(c, spread=9.0) for c in samples.ladder().contenders]
    assert "m1 and m0 differ by less" in build_page(
        [*pair, replace(samples.ladder(), contenders=noisy)]
    )  # no gain told
