"""Timing: summaries, warm-up until stable, and ratios that say something."""

from __future__ import annotations

import time

import pytest
import torch

from ridgeline.bench import timing
from ridgeline.bench.nvml import Clocks, extremes, reasons
from ridgeline.bench.timing import Timing, distinct, summarise, time_steps, warm_up

CPU = torch.device("cpu")


def test_summary_is_median_and_spread():
    found = summarise([10.0] * 8 + [11.0, 100.0])
    assert found.median_ms == 10.0
    assert found.steps == 10
    assert 0 < found.spread < 10  # one outlier does not decide it
    assert summarise([5.0, 5.0]).spread == 0
    with pytest.raises(ValueError, match="two times"):
        summarise([1.0])


def test_times_are_of_single_steps():
    naps = iter([0.001, 0.3, 0.001])
    times = time_steps(lambda: time.sleep(next(naps)), 3, CPU)
    assert times[1] > 250
    assert max(times[0], times[2]) < 250  # a busy machine wakes late


def test_warm_up_runs_until_two_windows_agree(monkeypatch):
    medians = iter([100.0, 50.0, 20.0, 10.0, 10.1, 0.0])
    monkeypatch.setattr(timing, "time_steps", lambda step, count, device: [next(medians)])
    assert warm_up(lambda: None, CPU) == 5 * timing.WINDOW


def test_warm_up_ends_in_time_even_if_nothing_settles(monkeypatch):
    clock = iter(range(100))
    values = iter(range(1, 100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(timing, "time_steps", lambda step, count, device: [2.0 ** next(values)])
    assert warm_up(lambda: None, CPU, limit_s=4) == 4 * timing.WINDOW


def test_a_ratio_that_its_spread_swallows():
    # the second article's compile times: 95.25 to 107.67 ms between sessions, a gap of 5.9 ms argued over
    assert not distinct(Timing(101.0, 0.12, 10), Timing(95.1, 0.12, 10))
    assert distinct(Timing(101.0, 0.01, 10), Timing(95.1, 0.01, 10))


def test_throttle_reasons_and_extremes():
    assert reasons(0x4 | 0x40) == ("power cap", "hardware thermal")
    assert reasons(0) == ()
    assert extremes([]) is None
    found = extremes([Clocks(sm_mhz=1980, power_w=300.0), Clocks(sm_mhz=1755, power_w=690.0, throttle=("power cap",))])
    assert found == {
        "throttle": ["power cap"],
        "sm_mhz": [1755, 1980],
        "memory_mhz": None,
        "power_w": [300.0, 690.0],
        "temperature_c": None,
    }
