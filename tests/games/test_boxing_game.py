"""The emulator behind the environment interface."""

import sys

import numpy as np
import pytest

from ridgeline.errors import ConfigError, MissingExtraError
from ridgeline.games import game
from ridgeline.games.boxing.actions import CONTROLLERS, NEUTRAL, ale_action, direction
from ridgeline.games.boxing.experts import Scripted, Stance
from ridgeline.games.boxing.game import DEALT, TAKEN, Boxing


def play(seed, level=0, decisions=60, stance=None):
    boxing, previous, player = Boxing(level), NEUTRAL, Scripted(stance)
    states = [boxing.reset(seed)]
    while not boxing.done and len(states) <= decisions:
        previous = player.choose(boxing, previous)
        states.append(boxing.step(previous))
    return boxing, np.stack(states)


def test_the_seed_determines_the_game():
    assert (play(3)[1] == play(3)[1]).all()
    assert (play(3)[1] != play(4)[1]).any()


def test_reset_starts_anew():
    boxing = Boxing()
    first = boxing.reset(3).copy()
    for _ in range(10):
        boxing.step((2, 1))
    assert (boxing.reset(3) == first).all()
    assert boxing.score == (0, 0)


def test_levels_play_differently():
    assert (play(3, level=0)[1] != play(3, level=3)[1]).any()


def test_a_round_ends_by_knockout_and_then_stands_still():
    boxing, states = play(1, level=3, decisions=2_000, stance=Stance(x=14, y=13))
    assert boxing.done
    assert (boxing.score.dealt, boxing.knockout) == (100, 1)
    assert states[-2][DEALT] < 0xC0
    end = boxing.state.copy()
    boxing.step((1, 1))
    assert (boxing.state == end).all()


def test_the_score_follows_the_points_the_emulator_reports():
    boxing, total = Boxing(), 0
    boxing.reset(0)
    player, previous = Scripted(Stance(x=14, y=13)), NEUTRAL
    for _ in range(150):
        previous = player.choose(boxing, previous)
        total += boxing.advance(previous)
        assert boxing.score.margin == total
    ram = boxing.state
    assert boxing.score == (int(f"{ram[DEALT]:x}"), int(f"{ram[TAKEN]:x}"))
    assert min(boxing.score) > 0


def test_a_snapshot_continues_elsewhere():
    here, there = Boxing(sticky=0.0), Boxing(sticky=0.0)
    here.reset(0), there.reset(9)
    for _ in range(20):
        here.step((3, 1))
    there.restore(here.snapshot())
    for controller in CONTROLLERS:
        assert (here.step(controller) == there.step(controller)).all()


def test_every_console_action_has_one_controller():
    assert sorted(map(ale_action, CONTROLLERS)) == list(range(18))
    names = {"up": (0, -1), "right": (1, 0), "down-left": (-1, 1)}
    assert [ale_action((direction(*names[name]), 0)) for name in names] == [2, 3, 9]
    assert [ale_action((direction(*names[name]), 1)) for name in names] == [10, 11, 17]


@pytest.mark.parametrize("controller", [(9, 0), (0, 2), (0,)])
def test_a_foreign_controller_is_refused(controller):
    with pytest.raises(ConfigError, match="a Boxing controller is"):
        ale_action(controller)


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="levels 0, 1, 2, 3, got 4"):
        Boxing(4)
    with pytest.raises(ConfigError, match="sticky"):
        Boxing(sticky=1.0)
    with pytest.raises(ConfigError, match="did you mean boxing"):
        game("boxin")


def test_without_the_emulator_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"\.\[games\]"):
        Boxing()
