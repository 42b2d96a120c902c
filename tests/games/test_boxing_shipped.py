"""The demonstrations that ship with the package."""

import pytest

from ridgeline.games.boxing import archive
from ridgeline.games.boxing.demos import replay
from ridgeline.games.boxing.game import LEVELS
from ridgeline.games.env import FIRST_EVALUATION_SEED


@pytest.fixture(scope="module")
def games():
    return archive.load()


def test_no_demonstration_used_an_evaluation_seed(games):
    seeds = [game.seed for game in games]
    assert 0 <= min(seeds) <= max(seeds) < FIRST_EVALUATION_SEED
    assert len(set(seeds)) == len(seeds)


def test_hundreds_of_games_at_every_level_fit_into_a_megabyte(games):
    assert archive.SHIPPED.stat().st_size <= 1_000_000
    assert len(games) >= 200
    assert {game.level for game in games} == set(LEVELS)


def test_the_expert_is_declared_and_won_with_mistakes_put_in(games):
    for game in games:
        assert (game.origin.expert, game.origin.privileged, game.origin.sticky) == ("look-ahead", True, 0.25)
        assert game.dealt > game.taken
    executed_otherwise = sum(int((game.executed != game.labels).sum()) for game in games)
    assert 0.05 < executed_otherwise / sum(len(game.labels) for game in games) < 0.3


def test_games_of_every_level_replay_here(games):
    for level in LEVELS:
        game = next(game for game in games if game.level == level)
        assert len(replay(game)) == len(game.labels)


@pytest.mark.slow
def test_every_fourth_game_replays_here(games):
    for game in games[::4]:  # whoever trains on them replays and verifies all
        replay(game)
