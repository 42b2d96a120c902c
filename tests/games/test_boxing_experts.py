"""The scripted boxer and the one that looks ahead."""

import numpy as np
import pytest

from ridgeline.errors import ConfigError
from ridgeline.games.boxing.actions import NEUTRAL, direction
from ridgeline.games.boxing.experts import LookAhead, Scripted, Stance, expert, follow
from ridgeline.games.boxing.game import Boxing


def ram(x, y, opponent_x, opponent_y):
    memory = np.zeros(128, np.uint8)
    memory[[32, 34, 33, 35]] = x, y, opponent_x, opponent_y
    return memory.tolist()


def test_the_script_walks_to_its_stance_and_punches_every_other_decision():
    stance = Stance(x=14, y=10)
    assert follow(stance, ram(30, 40, 80, 40), NEUTRAL) == (direction(1, 1), 0)
    assert follow(stance, ram(80, 10, 30, 60), NEUTRAL) == (direction(-1, 1), 0)
    assert follow(stance, ram(66, 70, 80, 60), NEUTRAL) == (direction(0, 0), 1)
    assert follow(stance, ram(66, 70, 80, 60), (0, 1)) == (direction(0, 0), 0)


def test_the_script_sees_positions_only():
    rng = np.random.default_rng(0)
    for _ in range(50):
        memory = rng.integers(0, 100, 128)
        other = rng.integers(0, 100, 128)
        other[32:36] = memory[32:36]
        assert follow(Stance(x=14, y=13), memory.tolist(), NEUTRAL) == follow(
            Stance(x=14, y=13), other.tolist(), NEUTRAL
        )


def test_looking_ahead_leaves_the_game_alone_and_beats_the_script():
    gained = {}
    for name, player in (("script", Scripted(Stance(x=14, y=13))), ("look-ahead", LookAhead())):
        boxing, previous = Boxing(), NEUTRAL
        boxing.reset(2)
        for _ in range(120):
            before = boxing.state.copy()
            previous = player.choose(boxing, previous)
            assert (boxing.state == before).all()
            boxing.step(previous)
        gained[name] = boxing.score.margin
    assert gained["look-ahead"] > gained["script"] + 10


def test_the_same_state_gives_the_same_choice():
    boxing = Boxing()
    boxing.reset(2)
    first, second = LookAhead(), LookAhead()
    for _ in range(5):
        choice = first.choose(boxing, NEUTRAL)
        assert second.choose(boxing, NEUTRAL) == choice
        boxing.step(choice)


def test_settings_build_the_same_expert():
    player = LookAhead(Stance(x=10, y=12, slack=1), horizon=2, discount=0.9, range=30)
    assert expert("look-ahead", player.settings()).settings() == player.settings()
    assert (expert("look-ahead").privileged, expert("scripted").privileged) == (True, False)
    with pytest.raises(ConfigError, match="did you mean look-ahead"):
        expert("look-ahed")
