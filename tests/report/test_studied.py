"""Tables of comparisons, recipes, norms and long windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from report import samples
from ridgeline.records import ContenderResult, Record
from ridgeline.report import docs, studied


def study(target: float | None = None, gpus: int = 1, steps: int = 1200, names: str = "abc") -> Record:
    rows: list[dict[str, Any]] = [
        {"contender": name, "parameters": 4_837_888, "learning_rate": 2e-3, "at_edge": name == "b", "best_loss": 1.49,
         "best_spread": 0.0021, "final_loss": 1.5, "final_spread": None, "tokens_per_s": 7.2e6}
        for name in names
    ]  # fmt: skip
    for row in rows[1:]:
        row["difference"] = "+0.0100 (+0.0050 to +0.0150), beyond the spread"
    if target is not None:
        rows[0] |= {"reached": 3, "target_steps": 740.0, "target_s": 1.234, "target_spread_s": 0.05}
        for row in rows[1:]:
            row |= {"reached": 2, "target_steps": None, "target_s": None, "target_spread_s": None}
    curves = [
        {"figure": "loss", "name": "a", "x": [1, 2], "y": [2.0, 1.5], "seconds": [0.1, 0.2]},
        {"figure": "standings", "name": "standings", "rows": rows},
        {"figure": "setting", "name": "setting", "seeds": 3, "target": target, "steps": {"a": steps}},
    ]
    made = samples.record("study", "tinyshakespeare", 32, 256, curves=curves)
    return replace(made, gpus=gpus, contenders=[ContenderResult(name="a", step_ms=1.1)])


def test_a_comparison_and_a_recipe_are_told_apart():
    records = [study(gpus=0), study(1.4697), study()]
    text = studied.comparison(records)
    assert text.startswith("tinyshakespeare, batch 32, context 256, bf16, one NVIDIA H200, 2026-11-29:")
    assert "| `a` | 4.84 M | 0.002 | 1.4900 ± 0.0021 | 1.5000 | 7.20 M | – |" in text
    assert "| `b` | 4.84 M | 0.002 (edge) |" in text
    assert text.endswith("| +0.0100 (+0.0050 to +0.0150), beyond the spread |")
    text = studied.recipe(records)
    assert "held 1.4697" in text
    assert "| `a` | 1.100 | 1.4900 ± 0.0021 | 3 of 3 | 740 | 1.23 ± 0.05 | – |" in text
    assert "| `b` | – | 1.4900 ± 0.0021 | 2 of 3 | – | – | – |" in text
    assert set(studied.pictures(records)) == {"comparison", "recipe"}
    assert studied.article(records) == studied.MISSING
    both = [study(2.4844, steps=200), *records]
    assert "held 2.4844" in studied.article(both)
    assert studied.recipe(both) == text
    pair = study(1.5, names="ab")
    assert "held 1.5 |" in studied.confirmed([pair, *both])
    assert studied.recipe([pair, *both]) == text
    pictures = studied.pictures([pair, *both])
    assert {name: section.key for name, section in pictures.items()} == {
        "comparison": "loss-0", "recipe": "loss-0", "confirmed": "loss-0-seconds"
    }  # fmt: skip
    assert studied.confirmed(both) == studied.MISSING
    assert studied.comparison([study(gpus=0)]) == studied.recipe([study()]) == studied.MISSING


def test_what_all_contenders_share_is_said_once():
    record = study(2.4844, steps=200, names="ab")
    both = "+optimizer.lr=3e-4+optimizer.floor=3e-4"
    renamed = [f"a{both}", f"a+kv_heads=1{both}"]
    curves = [
        {**curve, "rows": [{**row, "contender": name} for row, name in zip(curve["rows"], renamed, strict=True)]}
        if "rows" in curve else curve
        for curve in record.curves
    ]  # fmt: skip
    text = studied.article([replace(record, curves=curves)])
    assert "2026-11-29: all with `optimizer.lr=3e-4`, `optimizer.floor=3e-4`:" in text
    assert "| `a` |" in text
    assert "| `a+kv_heads=1` |" in text


def test_norms():
    row = {"way": "eager", "steps": 3000, "loss_of_the_last_100_steps": 0.25, "largest_norm": 21.5,
           "largest_norm_after_step_100": 3.25, "first_step_that_is_not_finite": None,
           "kernels_with_mix_order_reduction": 12}  # fmt: skip
    broken = {**row, "way": "compile", "first_step_that_is_not_finite": 7}
    curves = [
        {"figure": "training", "name": "eager", "x": [20], "y": [2.0], "below": [21.5]},
        {"figure": "runs", "name": "divergence", "rows": [row, broken]},
    ]
    record = samples.record("study", "hal-20m", 42, 256, curves=curves)
    text = studied.divergence([study(), record])
    assert "| `eager` | 3,000 | 0.2500 | 21.5 | 3.25 | – | 12 |" in text
    assert "| `compile` | 3,000 | 0.2500 | 21.5 | 3.25 | 7 | 12 |" in text
    assert list(studied.pictures([record])) == ["divergence"]
    assert studied.divergence([study()]) == studied.MISSING


def test_whole_commands():
    row = {"seed": 0, "caches": "full", "imports_s": 3.5, "data_s": 0.01, "first_step_s": 1.25, "held_s": 1.31,
           "held_at_step": 800, "training_s": 1.97, "validations_s": 0.3, "checkpoints_s": 0.5, "call_s": 4.0,
           "in_all_s": 9.0}  # fmt: skip
    short = {**row, "caches": "empty", "first_step_s": 22.0, "held_s": None, "held_at_step": None}
    curves = [{"figure": "starts", "name": "shakespeare-fast", "target": 1.4697, "rows": [row, short]}]
    record = samples.record("study", "tinyshakespeare", 32, 256, curves=curves)
    text = studied.starts([study(), record])
    assert "training to 1.4697, s" in text
    assert "| 0 | full | 3.50 | 0.01 | 1.25 | 1.31 | 800 | 1.97 | 0.30 | 0.50 | 4.00 | 9.00 |" in text
    assert "| 0 | empty | 3.50 | 0.01 | 22.00 | – | – | – | – | – | – | – |" in text
    assert studied.starts([study(), replace(record, gpus=0)]) == studied.MISSING


def test_studies_on_the_same_data_have_titles_of_their_own():
    asked = [{"figure": "standings", "name": "standings", "rows": []}, {"figure": "setting", "target": 1.47}]
    record = samples.record("study", "tinyshakespeare", 32, 256, curves=asked)
    names = ["fast-c256", "fast-c256+kv_heads=8", "fast-c256+a_setting_with_a_long_name=3"]

    def title(*chosen):
        contenders = [samples.result(name, 1.0, 32, 256) for name in chosen]
        return studied.title(replace(record, contenders=contenders))

    ending = ", to a loss of 1.47 on tinyshakespeare, batch 32 × 256, bf16"
    assert title(*names[:2]) == f"fast-c256 and fast-c256+kv_heads=8{ending}"
    assert title(names[0], names[2]) == f"fast-c256 and 1 more{ending}"
    assert title(*names) == f"fast-c256 and 2 more{ending}"
    assert title() is None
    assert studied.title(samples.ladder()) is None


def test_a_search():
    trial = {"number": 0, "params": {"layers": 3, "lr": 0.0012345}, "state": "complete", "quality": 1.59,
             "seconds": None, "crossing": None, "tokens_per_s": 9.0e6, "predicted_tokens_per_s": 1.2e7}  # fmt: skip
    trials = [
        {**trial, "number": 1, "params": {"layers": 2, "lr": 0.0012345}, "quality": 1.7, "state": "pruned"},
        trial,
        {**trial, "number": 2, "state": "refused", "quality": None},
        {**trial, "number": 3, "quality": 1.6, "seconds": 0.61, "crossing": 0.6},
    ]
    curves = [
        {"figure": "trials", "name": "trials", "rows": trials},
        {"figure": "setting", "name": "setting", "goal": ["loss", 1.6], "trial_s": 3.0, "budget_s": 55.0},
    ]
    record = samples.record("search", "tinyshakespeare", 32, 256, curves=curves)
    text = studied.searched([study(), record]).splitlines()
    counted = "1 pruned, 2 complete, 1 refused (… was left early). All with lr 0.0012."
    assert text[0].endswith(f": loss=1.6, budget 55 s, 3 s of training a trial: {counted}")
    assert text[4:] == [
        "| 3 | layers 3 | 1.6000 | 0.61 | 9.00 M | 12.0 M |",
        "| 0 | layers 3 | 1.5900 | – | 9.00 M | 12.0 M |",
        "| 1 | layers 2 | 1.7000 … | – | 9.00 M | 12.0 M |",
    ]
    assert studied.searched([study(), replace(record, gpus=0)]) == studied.MISSING


def test_an_inversion():
    ways = [samples.result(name, ms, 32, 256) for name, ms in (("a:eager", 4.0), ("b:compile", 3.0))]
    told = {"eager": "a", "compiled": "b", "way": "compile", "ratio": 0.75, "low": 0.7, "high": 0.8, "inverted": False}
    rows = [told, {**told, "way": "compile+graph", "high": 1.1, "inverted": None}]
    curves = [{"figure": "inversion", "name": "inversion", "rows": rows}]
    record = samples.record("study", "a", 32, 256, contenders=ways, curves=curves)
    lines = studied.inversion([study(), record]).splitlines()
    assert lines[4].startswith("| `b:compile` | 3.000 | ")
    assert lines[5].startswith("| `a:eager` | 4.000 | ")
    assert lines[-2:] == [
        "| `a` | `b:compile` | 0.75 | 0.70 to 0.80 | no |",
        "| `a` | `b:compile+graph` | 0.75 | 0.70 to 1.10 | not told apart |",
    ]
    assert studied.inversion([study(), replace(record, gpus=0)]) == studied.MISSING


def test_long_windows_stand_beside_the_accounting():
    long, short = (samples.record("bench", "gpt2-c256", 4, context, contenders=[
        samples.result("best", 2.0, 4, context), samples.result("compile+graph", 4.0, 4, context)
    ]) for context in (2048, 256))  # fmt: skip
    text = studied.long_windows([long, short])
    assert text.splitlines()[2].startswith("| `gpt2-c256` | 2048 | 4 | 4.10 M | 2.05 M | 20.00 | 20.00 | ")
    assert 0.3 < float(text.splitlines()[2].split("|")[-2]) < 3.0
    assert len(text.splitlines()) == 3
    assert studied.long_windows([short]) == studied.MISSING


def test_documents_take_them():
    for name in ("comparison", "recipe", "divergence", "starts", "inversion", "confirmed", "article", "long-windows"):
        text = f"<!-- from records: {name} -->\nold\n<!-- end -->"
        assert docs.written(text, []) == text.replace("old", studied.MISSING)
