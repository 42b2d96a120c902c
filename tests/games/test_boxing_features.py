"""The features: equal in training and at play, and blind to the clock and the score."""

import numpy as np
import pytest

from ridgeline.errors import DataError
from ridgeline.games.boxing.actions import CONTROLLERS
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.features import ARMS, CLOCK_AND_SCORE, HIDDEN, count, features
from ridgeline.games.boxing.game import Boxing


@pytest.fixture(scope="module")
def states():
    boxing, rng = Boxing(3), np.random.default_rng(0)
    rams = [boxing.reset(11)]
    rams += [boxing.step(CONTROLLERS[rng.integers(18)]) for _ in range(400)]
    return np.stack(rams)


@pytest.mark.parametrize("visible", [False, True])
def test_offline_and_live_rows_are_the_same(states, visible):
    offline = features(states, visible=visible)
    eyes = GAME.eyes(GAME.features(visible))
    live = [eyes(state) for state in states]
    assert offline.dtype == np.float32
    assert offline.shape == (len(states), count(visible))
    assert (offline == np.stack([numbers for _, numbers in live])).all()
    assert all(categories.shape == (0,) for categories, _ in live)


def test_rows_are_normalised(states):
    rows = features(states)
    assert np.abs(rows).max() <= 1.7  # the distance across the ring, in units of 64 pixels
    assert rows.std(axis=0).max() > 0.2


def test_no_policy_sees_clock_or_score(states):
    rng, other = np.random.default_rng(1), states.copy()
    other[:, CLOCK_AND_SCORE] = rng.integers(0, 256, (len(states), len(CLOCK_AND_SCORE)))
    assert (features(other) == features(states)).all()
    assert {16, 17, 18, 19} <= set(CLOCK_AND_SCORE)
    assert not set(CLOCK_AND_SCORE) & {*HIDDEN, *ARMS}


def test_visible_features_see_positions_and_arms_only(states):
    rng, other = np.random.default_rng(1), rng_states(states)
    assert (features(other, visible=True) == features(states, visible=True)).all()
    assert (features(other) != features(states)).any()
    for byte in (32, 33, 34, 35, *ARMS):
        changed = states.copy()
        changed[:, byte] = rng.integers(0, 80, len(states))
        assert (features(changed, visible=True) != features(states, visible=True)).any()


def rng_states(states):
    """The same positions and arms in a memory that is otherwise noise."""
    noise = np.random.default_rng(2).integers(0, 256, states.shape).astype(np.uint8)
    seen = [32, 33, 34, 35, *ARMS]
    noise[:, seen] = states[:, seen]
    return noise


def test_features_of_another_version_are_refused():
    for wrong in ({"version": 99}, {"game": "melee"}, {"visible": "some"}):
        with pytest.raises(DataError, match="not those of this version"):
            GAME.eyes(GAME.features() | wrong)
