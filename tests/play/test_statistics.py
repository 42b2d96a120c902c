"""Intervals: against published values, and by their coverage."""

import numpy as np
import pytest

from ridgeline.play.statistics import Z, bootstrap, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe 1998, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert (wilson(0, 7)[0], wilson(7, 7)[1]) == (0.0, 1.0)
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        low, high = bootstrap(rng.normal(10, 3, 30))
        hits += low < 10 < high
    assert 0.90 < hits / 300 < 0.98
    assert bootstrap([5.0, 5.0]) == (5.0, 5.0)


def test_the_bootstrap_repeats_itself_and_has_enough_resamples_for_two_digits():
    values = np.random.default_rng(2).normal(10, 3, 400)
    low, high = bootstrap(values)
    assert bootstrap(values) == (low, high)
    half = Z * values.std() / len(values) ** 0.5
    assert (values.mean() - low, high - values.mean()) == pytest.approx((half, half), rel=0.03)
