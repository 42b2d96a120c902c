"""Ratios of speeds: within a group, by way of `best` across groups, and only where the spread allows."""

import dataclasses

import pytest

from bench.helpers import record
from ridgeline.bench.ratios import baselines, gain, over_pytorch, ratio
from ridgeline.records import ContenderResult


def result(name: str, ms: float | None, group: int = 0, spread: float = 0.01) -> ContenderResult:
    return ContenderResult(name=name, group=group, step_ms=ms, spread=None if ms is None else spread)


def test_a_ratio_knows_its_noise_and_its_group():
    taken = record(result("best", 10, spread=0.02), result("eager", 30, spread=0.06), result("m0", None))
    found = ratio(taken, "best", "eager")
    assert found is not None
    assert (found.value, found.noise) == pytest.approx((3, 0.04))  # half of both spreads
    assert (found.distinct, found.over, found.group, str(found)) == (True, "eager", 0, "3.00×")
    assert ratio(taken, "best", "m0") is None
    assert ratio(taken, "best", "best") is None
    assert ratio(taken, "graph", "eager") is None
    near = ratio(record(result("best", 10, spread=0.1), result("eager", 10.5, spread=0.1)), "best", "eager")
    assert near is not None
    assert (near.distinct, str(near)) == (False, "≈")


def test_the_group_asked_for_is_the_one_looked_in():
    taken = record(
        *(result("best", 10), result("eager", 30)), *(result("best", 20, group=1), result("eager", 40, group=1))
    )
    found = [ratio(taken, "best", "eager", group) for group in (None, 0, 1)]
    assert [(r.value, r.group) for r in found if r is not None] == [(3, 0), (3, 0), (2, 1)]
    assert ratio(taken, "best", "eager", 2) is None
    assert [c.step_ms for c in baselines(taken)] == [30, 40]
    assert [c.step_ms for c in baselines(taken, 1)] == [40]


def test_across_groups_each_is_set_against_best_in_its_own():
    m2, eager = result("m2", 8, spread=0.02), result("eager", 90, group=1, spread=0.08)
    taken = record(result("best", 4), m2, result("best", 9, group=1), eager)
    found = gain(taken, "m2", "eager")
    assert found is not None
    assert found.value == pytest.approx(0.5 * 10)
    assert found.noise == pytest.approx(0.5 * (0.02 + 0.01) + 0.5 * (0.08 + 0.01))  # of both
    assert (found.distinct, found.group) == (True, 0)
    close = record(result("best", 4), m2, result("best", 4, group=1), result("eager", 8.3, group=1, spread=0.08))
    assert str(gain(close, "m2", "eager")) == "≈"
    assert gain(record(result("best", 4), m2, eager), "m2", "eager") is None  # no `best` beside eager
    assert gain(taken, "best", "m2") == ratio(taken, "best", "m2")


def test_over_pytorch_is_over_the_fastest_of_each_group():
    taken = record(
        *(result("best", 10), result("eager", 30), result("compile", 20), result("m3", 12)),
        *(result("best", 12, group=1), result("compile+graph", 18, group=1)),
    )
    found = over_pytorch(taken)
    assert found is not None
    assert (found.value, found.over, found.group) == (1.5, "compile+graph", 1)
    assert [c.name for c in baselines(taken)] == ["compile+graph", "compile", "eager"]
    assert over_pytorch(record(result("best", 10), result("eager", None))) is None


def test_with_several_numbers_of_cards_the_fewest_count():
    one, two = (result("best", 10), result("eager", 30)), (result("best", 12), result("eager", 60))
    taken = record(*(dataclasses.replace(c, gpus=n) for n, part in ((2, two), (1, one)) for c in part))
    for found in (gain(taken, "best", "eager"), over_pytorch(taken)):
        assert found is not None
        assert found.value == 3
