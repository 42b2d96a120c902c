"""Explain: the JSON that it promises, what it refuses, and advice that is computed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ridgeline.bench import explain as explaining
from ridgeline.bench.case import Case, check_fits, largest_batch
from ridgeline.bench.explain import ExplainResult, explain, explain_preset, preset_case
from ridgeline.bench.explain_view import amount, micros, render
from ridgeline.cost import floor_of
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import Ceilings, card, driver, save_ceilings
from ridgeline.hardware.driver import DriverReading
from ridgeline.models.accounting import step_cost
from ridgeline.models.plan import LEAN, PLAIN
from ridgeline.presets import PRESETS, preset

READING = DriverReading(
    name="NVIDIA H200",
    capability=(9, 0),
    sm_count=132,
    memory_bytes=150_000_000_000,
    l2_bytes=50 * 2**20,
    shared_per_sm=228 * 1024,
    shared_per_block=227 * 1024,
)
CEILINGS = Ceilings(
    card="NVIDIA H200", copy_bytes_per_s=4.25e12, products={"bf16": 686e12}, launch_s=2e-6, date="2026-11-29T12:00:00"
)


def shown(result: ExplainResult, width: int = 150) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(result))
    return console.export_text()


def here(monkeypatch: pytest.MonkeyPatch, reading: DriverReading) -> None:
    """Pretend that a card is in this machine."""
    monkeypatch.setattr(driver, "read_driver", lambda index=0: reading)
    monkeypatch.setattr(explaining, "read_driver", lambda index=0: reading)


def test_json_has_the_promised_keys_and_adds_up() -> None:
    values = json.loads(json.dumps(explain_preset("hal-20m", device="h200", batch=512).to_json()))
    assert [values[key] for key in ("preset", "device", "batch", "context", "precision", "parameters")] == [
        "hal-20m", "h200", 512, 256, "bf16", 19_845_065,
    ]  # fmt: skip
    ops, step, memory = values["ops"], values["step"], values["memory"]
    assert {"name", "phase", "flops", "bytes", "floor_s", "bound"} <= set(ops[0])
    for key in ("flops", "bytes", "floor_s"):
        assert sum(op[key] for op in ops) == pytest.approx(step[key], rel=1e-9)
    assert step["tokens_per_s"] == pytest.approx(512 * 256 / step["floor_s"])
    assert set(memory) == {"weights", "optimizer", "activations", "workspace", "peak"}
    assert memory["peak"] == sum(memory[key] for key in ("weights", "optimizer", "activations", "workspace"))
    assert sum(values["saved"].values()) == memory["activations"]


def test_gpt2_c256_at_batch_32() -> None:
    step = explain_preset("gpt2-c256", device="h200", batch=32).to_json()["step"]
    assert step["dense_flops"] == pytest.approx(271.4e9, rel=0.0005)
    assert step["flops"] == pytest.approx(271.4e9 - 6 * 3 * 2_147_483_648 / 2, rel=0.0005)


def test_the_floor_of_hal_is_between_the_products_alone_and_the_sum() -> None:
    result = explain_preset("hal-20m", device="h200")
    assert result.overlapped.seconds <= result.floor_s
    assert result.floor_s == pytest.approx(sum(row.floor.seconds for row in result.rows))
    assert result.overlapped.seconds == pytest.approx(result.cost.executed_flops / 989.4e12)


def test_small_steps_say_that_their_tensors_fit_the_cache() -> None:
    small, large = explain_preset("gpt2-c256", device="h200"), explain_preset("hal-20m", device="h200")
    assert small.cached > 100
    assert large.cached < 20
    assert f"{small.cached} of " in shown(small)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained_on_every_kind_of_card(name: str) -> None:
    for key, precision, plan in (("h200", "bf16", "fused"), ("t4", "fp16", "plain"), ("mi300x", "bf16", "plain")):
        result = explain_preset(name, device=key, batch=4)
        assert result.case.precision == precision
        assert result.case.plan.name == plan
        text = shown(result)
        assert name in text
        assert "what would help" in text


def test_the_share_of_the_cards_memory_is_never_told_as_nothing() -> None:
    assert "(less than 1% of the card)" in shown(explain_preset("boxing", device="h200"))
    assert "(8% of the card)" in shown(explain_preset("hal-20m", device="h200", batch=512))


def test_small_cards_are_said_to_be_limited_by_power() -> None:
    assert "a card of 70 W does not hold its boost clock" in shown(explain_preset("gpt2-c256", device="t4"))
    assert "boost clock" not in shown(explain_preset("gpt2-c256", device="a100"))


def test_an_update_by_muon_is_said_not_to_be_counted() -> None:
    for name, said in (("boxing-fast", True), ("gpt2-c256+optimizer.algorithm=muon", True), ("boxing", False)):
        text = shown(explain_preset(name, device="h200"))
        assert ("trains by muon, whose products are not counted" in text) == said, name


def test_precision_and_sizes_can_be_chosen() -> None:
    result = explain_preset("gpt2-c256", device="h200", batch=4, context=2048, precision="fp32", plan="plain")
    assert result.case.model.decoder.context == 2048
    assert (result.rates.matrix, result.case.plan) == (card("h200").peak("fp32"), PLAIN)
    assert explain_preset("gpt2-124m", device="h200").case.accumulation == 8
    assert explain_preset("gpt2-124m", device="h200", batch=64).case.accumulation == 1
    assert explain_preset("gpt2-124m", device="h200", batch=64, accumulation=2).case.accumulation == 2


def test_what_would_help_is_the_accounting_of_the_changed_model() -> None:
    result = explain_preset("hal-20m", device="h200", batch=512)
    found = {change.name: change for change in result.changes}
    decoder = preset("hal-20m").model.decoder
    smaller = replace(preset("hal-20m").model, decoder=replace(decoder, mlp_width=1024))
    floor = floor_of(step_cost(smaller, batch=512).ops, result.rates).seconds
    change = found["MLP of 2× the width (is 4×)"]
    assert change.floor_s == pytest.approx(floor)
    assert change.saved == pytest.approx(1 - floor / result.floor_s)
    assert change.parameters == 19_845_065 - 6 * (2 * 512 * 1024 + 1024)
    frames = found["every other frame (128 positions a window)"]
    assert frames.windows_per_s == pytest.approx(512 / frames.floor_s)
    assert 0.4 < frames.saved < 0.6
    assert "one KV head (are 8)" in found
    assert found["half the width (256)"].parameters == pytest.approx(5.31e6, rel=0.01)
    assert found["plan lean"].memory_saved > 0.1
    assert [c.saved for c in result.changes] == sorted((c.saved for c in result.changes), reverse=True)


def test_advice_depends_on_the_model_and_the_card() -> None:
    def advice(name: str, device: str, **settings: object) -> dict[str, float]:
        result = explain_preset(name, device=device, **settings)  # type: ignore[arg-type]
        return {change.name: change.saved for change in result.changes}

    fast, gpt = advice("fast-c256", "h200"), advice("gpt2-c256", "h200")
    assert not [name for name in fast if "KV head" in name or "MLP" in name]
    assert [name for name in gpt if "KV head" in name]
    assert "half the context (128 positions a window)" in gpt
    t4 = advice("gpt2-c256", "t4", precision="fp32")
    assert t4["fp16 instead of fp32"] > 0.5
    assert not [name for name in gpt if "instead of" in name]


def test_measured_ceilings_give_a_second_floor() -> None:
    result = explain(preset_case("hal-20m", card("h200")), card("h200"), ceilings=CEILINGS)
    assert result.measured_floor_s is not None
    assert result.measured_floor_s > result.floor_s
    assert result.launch_s == pytest.approx(2e-6 * result.cost.launches)
    assert "at what this card reached (686 TFLOP/s, 4.25 TB/s, 2026-11-29)" in shown(result)


def test_stored_ceilings_of_the_card_that_is_here_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    here(monkeypatch, READING)
    assert explain_preset("gpt2-c256").ceilings is None
    save_ceilings(CEILINGS)
    result = explain_preset("gpt2-c256")
    assert result.ceilings == CEILINGS
    assert result.spec.memory_bytes == 150_000_000_000
    assert explain_preset("gpt2-c256", device="t4").ceilings is None


def test_a_card_that_the_table_does_not_know_is_explained_by_its_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    here(monkeypatch, replace(READING, name="NVIDIA Rubin"))
    with pytest.raises(UnsupportedError, match=r"NVIDIA Rubin is not in the table .* --measure"):
        explain_preset("gpt2-c256")
    save_ceilings(replace(CEILINGS, card="NVIDIA Rubin"))
    result = explain_preset("gpt2-c256")
    assert result.case.precision == "bf16"
    assert result.rates.matrix == 686e12
    assert result.floor_s == result.measured_floor_s


def test_a_batch_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    with pytest.raises(ConfigError) as caught:
        explain_preset("hal-20m", device="rtx-4090", batch=4096)
    text = str(caught.value)
    case, spec = preset_case("hal-20m", card("rtx-4090"), batch=4096), card("rtx-4090")
    over = (case.memory().peak - spec.memory_bytes) / 2**30
    most = largest_batch(case, spec)
    assert f"{over:.1f} GiB more than the 24.0 GiB of NVIDIA GeForce RTX 4090" in text
    assert f"the largest batch that fits is {most}, or cut it by accumulation=" in text
    assert replace(case, batch=most).fits(spec)
    assert not replace(case, batch=most + 1).fits(spec)
    parts = int(text.split("accumulation=")[1].split(",")[0])
    assert replace(case, accumulation=parts).fits(spec)
    assert not replace(case, accumulation=parts // 2).fits(spec)


def test_a_batch_that_no_number_of_parts_divides_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="the largest batch that fits is") as caught:
        explain_preset("gpt2-c256", device="h200", batch=1_000_000_007)  # a prime
    assert "accumulation" not in str(caught.value)


def test_a_batch_that_is_cut_already_is_told_of_its_parts() -> None:
    with pytest.raises(ConfigError) as caught:
        explain_preset("gpt2-124m", device="t4", batch=512, accumulation=8)
    text, spec = str(caught.value), card("t4")
    assert text.startswith("batch=512 in 8 parts needs ")
    part = preset_case("gpt2-124m", spec, batch=int(text.split("the largest part that fits is ")[1].split(",")[0]))
    assert part.fits(spec)
    assert not replace(part, batch=part.batch + 1).fits(spec)


def test_a_batch_just_too_large_says_by_how_much_in_smaller_units() -> None:
    case, spec = preset_case("gpt2-c256", card("h200")), card("h200")
    case = replace(case, batch=largest_batch(replace(case, batch=2**20), spec) + 1)
    over = (case.memory().peak - spec.memory_bytes) / 2**20
    assert 0 < over < 100
    with pytest.raises(ConfigError, match=f", {max(1, round(over))} MiB more than"):
        check_fits(case, spec)


def test_a_leaner_plan_is_named_where_it_would_fit_and_can_run() -> None:
    spec = card("rtx-4090")
    case = preset_case("hal-20m", spec)
    most = largest_batch(replace(case, batch=4096), spec)
    with pytest.raises(ConfigError, match=f"or use the plan {LEAN.name}"):
        check_fits(replace(case, batch=most + 8), spec)
    with pytest.raises(ConfigError, match=r"needs .* on the plan plain") as caught:
        explain_preset("gpt2-124m", device="t4", batch=64)
    assert "use the plan" not in str(caught.value)


def test_not_even_one_window() -> None:
    case = preset_case("gpt2-124m", card("h200"), batch=1)
    tiny = replace(card("h200"), memory_gib=0.1)
    with pytest.raises(ConfigError, match="not even one window fits"):
        check_fits(case, tiny)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"preset": "gpt3-c256", "device": "h200"}, ConfigError, "unknown preset 'gpt3-c256'; did you mean gpt2-c256"),
        ({"device": "h300"}, UnsupportedError, "unknown card 'h300'; did you mean .*h200"),
        ({"device": "t4", "precision": "bf16"}, UnsupportedError, "NVIDIA T4 has no bf16; choose"),
        ({"device": "h200", "precision": "fp8"}, UnsupportedError, "precision must be one of bf16, fp16, tf32, fp32"),
        ({"device": "h200", "plan": "phat"}, UnsupportedError, "unknown plan 'phat'"),
        ({"device": "t4", "plan": "fused"}, UnsupportedError, r"plan fused needs a card of compute capability 8\.0"),
        ({"device": "h200", "accumulation": 0}, ConfigError, "batch and accumulation must be at least 1"),
        ({"device": "h200", "precision": ""}, UnsupportedError, "precision must be one of bf16"),
        ({"device": "rtx-5090", "precision": "tf32"}, UnsupportedError, "choose one of: fp32, fp16, bf16$"),
        ({"device": "h200", "batch": 0}, ConfigError, "batch and accumulation must be at least 1"),
        ({"device": "h200", "batch": 6, "accumulation": 4}, ConfigError, "accumulation=4 does not divide batch=6"),
    ],
)
def test_bad_input(settings: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain_preset(**{"preset": "gpt2-c256", **settings})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_no_card_named_and_none_here() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA card here; name one of the table, for instance --device h200"):
        explain_preset("gpt2-c256")


def test_a_relative_table_bounds_the_context() -> None:
    with pytest.raises(ConfigError, match="context=2048 is longer than position_table=1024"):
        explain_preset("hal-20m", device="h200", batch=1, context=2048)


@pytest.mark.parametrize("width", [150, 80, 60, 40])
@pytest.mark.parametrize("name", PRESETS)
def test_a_narrow_terminal_cuts_no_name_and_no_floor(name: str, width: int) -> None:
    result = explain_preset(name, device="h200", batch=8, accumulation=1)
    text = shown(result, width)
    lines = [line.split() for line in text.splitlines()]
    for row in result.rows:
        assert any(row.name in line and micros(row.floor.seconds) in line for line in lines), row.name
    assert "…" not in text
    assert ("no room for" in text) == (width < 80)


def test_amounts_have_three_digits() -> None:
    assert [amount(value) for value in (271.4e9, 4.3e12, 99.96e6, 1e3, 616, 0)] == [
        "271 G", "4.30 T", "100.0 M", "1.00 k", "616", "0.00",
    ]  # fmt: skip


def test_a_case_is_checked_on_construction() -> None:
    case = preset_case("gpt2-c256", card("h200"))
    assert isinstance(case, Case)
    with pytest.raises(ConfigError, match="context must be between"):
        replace(case, context=512)
