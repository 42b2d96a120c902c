import dataclasses
import io
import json

import pytest
from rich.console import Console

from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.hardware import card
from ridgeline.presets import preset
from ridgeline.train import metrics
from ridgeline.train.meter import meter
from ridgeline.train.metrics import LiveLine, MetricsFile, amount, clock, read_metrics


def test_opening_drops_later_steps_and_a_torn_line(tmp_path):
    lines = [json.dumps({"step": step, "loss": step / 3}) for step in (1, 2, 3)]
    (tmp_path / metrics.FILE).write_text("\n".join(lines) + '\n{"step": 4, "los')
    file = MetricsFile(tmp_path, 2)
    file.write({"step": 3, "loss": 0.125})
    file.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1 / 3},
        {"step": 2, "loss": 2 / 3},
        {"step": 3, "loss": 0.125},
    ]


def test_what_was_flushed_can_be_read_while_the_run_goes_on(tmp_path):
    file = MetricsFile(tmp_path, 0)
    file.write({"step": 1})
    file.flush()
    assert read_metrics(tmp_path) == [{"step": 1}]
    file.close()


NO_RECORDS = {
    "torn": "{", "a list": "[1]", "a truth": '{"step": true}', "deep": "[" * 100_000,
    "half a validation": '{"step": 1, "val_loss": 2.0, "seconds": 1.0}',
}  # fmt: skip


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS.keys())
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / metrics.FILE).write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RidgelineError, match=r"line 2 of .* is no record of a run"):
        read_metrics(tmp_path)


def test_the_live_line_says_speed_loss_and_time_left(monkeypatch):
    monkeypatch.setattr(metrics, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with LiveLine(Console(file=stream, width=200), "tiny") as line:
        line.val_loss = 2.5
        line.update(12, 0.25, 3.0, 1_234_567.0, 90.0)
    assert stream.getvalue() == "tiny  step 12   25%  loss 3.0000 (smoothed)  val 2.5000  1.23 M tokens/s  1:30 left\n"


def test_mfu_counts_what_the_model_needs_on_the_card(config, change):
    assert meter(change(config, precision="fp32")) is None  # a CPU has no peak in the table
    fast = change(preset("gpt2-c256"), device="cpu", precision="bf16")
    measured = meter(fast, card("h200"))
    # 6 FLOPs a weight of the matrices and the head, and causal attention's six products at half the square
    matrices = 6 * (4 * 256 * 256 + 2 * 256 * 1024) + 256 * 65
    attention = 6 * 6 * 2 * 256 * 257 / 2
    expected = 1e6 * (6 * matrices + attention) / card("h200").peak("bf16")
    assert measured(1e6).mfu == pytest.approx(expected, rel=0.01)
    with pytest.raises(ConfigError, match="cannot be"):
        measured(1e9)
    together = meter(fast, card("h200"), cards=2)
    assert together(2e6).mfu == pytest.approx(measured(1e6).mfu, rel=0.01)
    assert together(2e6).bytes_per_s == pytest.approx(2 * measured(1e6).bytes_per_s, rel=0.2)  # two optimisers


def test_the_live_line_says_mfu_and_bytes_a_second_and_refuses_more_than_the_memory_has(change, monkeypatch):
    monkeypatch.setattr(metrics, "LINE_SECONDS", 0.0)
    config = change(preset("hal-20m"), device="cpu", precision="bf16")
    measured, slow = (meter(config, spec) for spec in (card("h200"), dataclasses.replace(card("h200"), gb_per_s=1000)))
    stream = io.StringIO()
    with LiveLine(Console(file=stream, width=200), "hal", measured) as line:
        line.update(1, 0.1, 3.0, 3.6e6, None)
    # 16.18 TFLOP and 76.5 GB a step of 131,072 positions; 989.4 TFLOP/s, 4.8 TB/s
    assert "3.6 M tokens/s  MFU 44.9%  2.01 TB/s (42% of the memory's)" in stream.getvalue()
    with pytest.raises(ConfigError, match=r"of the memory bandwidth cannot be .* is too short"):
        slow(3.6e6)


def test_on_a_terminal_it_is_one_line():
    stream = io.StringIO()
    with LiveLine(Console(file=stream, width=120, force_terminal=True), "tiny") as line:
        for step in range(5):
            line.update(step, step / 5, 3.0, 1000.0, None)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            140,
            "hal  step 9   10%  loss 3.0000 (smoothed)  val 2.5000  3.6 M tokens/s  MFU 44.9%  2.01 TB/s (42% of the",
        ),
        (95, "hal  step 9   10%  loss 3.0000 (smoothed)  val 2.5000  3.6 M tokens/s  MFU 44.9%  1:30 left"),
        (80, "hal  step 9   10%  loss 3.0000  val 2.5000  3.6 M tokens/s  MFU 44.9%  1:30 left"),
        (70, "hal  step 9   10%  loss 3.0000  val 2.5000  3.6 M tokens/s  1:30 left"),
        (60, "hal  step 9   10%  loss 3.0000  3.6 M tokens/s  1:30 left"),
        (40, "hal  step 9   10%  loss 3.0000  3.6 M t…"),
    ],
)
def test_a_narrow_terminal_loses_what_can_be_missed(change, width, line):
    config = change(preset("hal-20m"), device="cpu", precision="bf16")
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    with LiveLine(console, "hal", meter(config, card("h200"))) as live:
        live.val_loss = 2.5
        live.update(9, 0.1, 3.0, 3.6e6, 90.0)
    assert line in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_without_a_terminal_a_line_is_never_broken(monkeypatch):
    monkeypatch.setattr(metrics, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with LiveLine(Console(file=stream, width=20), "tiny") as line:
        line.update(12, 0.25, 3.0, 1_234_567.0, 90.0)
    assert stream.getvalue() == "tiny  step 12   25%  loss 3.0000 (smoothed)  1.23 M tokens/s  1:30 left\n"


def test_numbers_for_people():
    assert [amount(n) for n in (0.5, 999.0, 1500.0, 2.5e6, 3e9, 2e12)] == ["0.5", "999", "1.5 k", "2.5 M", "3 G", "2 T"]
    assert [clock(s) for s in (5.2, 65.0, 3661.0, float("inf"))] == ["0:05", "1:05", "1:01:01", "?"]
