"""Playing: windows as in training, games that repeat, results that are all there."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from play.players import Short, Standin, play_all, player, shorten
from ridgeline import checkpoint
from ridgeline.data.window import WindowSpec
from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    UnsupportedError,
)
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.game import Boxing
from ridgeline.games.env import FIRST_EVALUATION_SEED
from ridgeline.models import ControllerPolicy
from ridgeline.play import Evaluation, GameResult, Player, decide, evaluate, load_player, play_games, rollout
from ridgeline.play.decide import Decider
from ridgeline.play.window import Window


def rows_of(seed, controllers, level=0):
    """Features and executed controllers of a game, as training has them."""
    boxing, eyes = Boxing(level), GAME.eyes(GAME.features())
    numbers = [eyes(boxing.reset(seed))[1]]
    numbers += [eyes(boxing.step(tuple(controller)))[1] for controller in controllers]
    return np.stack(numbers), np.array([(0, 0), *controllers])


@pytest.mark.parametrize(("stride", "delay"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_windows_at_play_are_those_of_training(monkeypatch, stride, delay):
    shorten(monkeypatch, 24)
    standin, spec = Standin(), WindowSpec(context=5, stride=stride, delay=delay)
    assert play_all([4], player(standin, spec), temperature=0)[0].steps == 24
    chosen = []
    for seen in standin.seen:
        chosen += [tuple(Standin().act(seen, seen["at"], temperature=0)[0].tolist())] * stride
    executed = [(0, 0)] * delay + chosen
    numbers, previous = rows_of(4, executed[:24])
    for call, seen in enumerate(standin.seen):
        newest = call * stride
        first = max(0, call - spec.context + 1) * stride
        assert seen["at"].tolist() == [min(call, spec.context - 1)]
        assert (seen["numbers"][0].numpy() == numbers[first : newest + 1 : stride]).all()
        assert (seen["previous"][0].numpy() == previous[first : newest + 1 : stride]).all()


def test_a_window_is_filled_from_the_left_and_then_rolls():
    window = Window(3, (np.zeros(1, np.uint16), np.zeros(2, np.float32)), heads=1)
    for step in range(5):
        assert len(window) == min(step, 3)
        window.append((np.full(1, step, np.uint16), np.full(2, step, np.float32)), (step,))
    for array in window.rows.values():
        assert array[:, 0].tolist() == [2, 3, 4]


def test_the_cut_window_gives_what_the_whole_one_gives(trained):
    _, policy, _ = trained
    whole = {
        "numbers": torch.randn(3, 8, policy.config.numbers, generator=torch.manual_seed(0)),
        "previous": torch.zeros(3, 8, 2, dtype=torch.int64),
    }
    cut = {name: tensor[:, :4] for name, tensor in whole.items()}
    for head, logits in policy(cut).items():
        torch.testing.assert_close(logits[:, 3], policy(whole)[head][:, 3])


def test_games_in_lock_step_have_their_own_seeds_and_lengths(monkeypatch):
    shorten(monkeypatch, 120)
    together = play_all([1, 2, 3], temperature=0)
    alone = [play_all([seed], temperature=0)[0] for seed in (1, 2, 3)]
    assert together == alone
    assert len({(result.dealt, result.taken) for result in together}) > 1


def test_a_seed_repeats_the_samples(monkeypatch):
    shorten(monkeypatch, 60)
    one, two, three = (play_all([seed, 50]) for seed in (9, 9, 10))
    assert one == two
    assert one[0] != three[0]
    assert one[1] == three[1]  # whoever plays beside it


def test_whole_games_are_counted():
    seen = []
    result = evaluate(player, 2, on_game=seen.append)
    assert sorted(seen, key=lambda game: game.seed) == list(result.results)
    assert [game.seed for game in result.results] == [FIRST_EVALUATION_SEED, FIRST_EVALUATION_SEED + 1]
    for one in result.results:
        assert one.steps > 100
        assert (one.knockout == 1) == (one.dealt == 100)
        assert (one.knockout == -1) == (one.taken == 100)
    assert set(result.summary()) == {
        *("games", "wins", "ties", "ko", "ko_against", "margin", "dealt", "taken", "intervals", "level"),
        *("seconds", "games_per_s", "decision_ms"),
    }


def test_the_summary_counts_right():
    scores = [(100, 3, 1), (50, 50, 0), (20, 100, -1), (60, 40, 0)]
    results = [
        GameResult(seed=i, level=2, dealt=dealt, taken=taken, knockout=knockout, steps=9)
        for i, (dealt, taken, knockout) in enumerate(scores)
    ]
    summary = Evaluation(level=2, results=tuple(results)).summary()
    assert [summary[name] for name in ("games", "wins", "ties", "ko", "ko_against", "level")] == [4, 2, 1, 1, 1, 2]
    assert summary["margin"] == pytest.approx((97 + 0 - 80 + 20) / 4)
    assert (summary["dealt"], summary["taken"]) == (57.5, 48.25)
    for name, (low, high) in summary["intervals"].items():
        assert low < summary[name] < high


def test_a_loaded_player_is_the_saved_policy(trained):
    path, policy, _ = trained
    loaded = load_player(path)
    assert (loaded.game, loaded.window) == ("boxing", WindowSpec(context=8))
    for name, tensor in loaded.policy.state_dict().items():
        assert (tensor == policy.state_dict()[name]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": {"game": "boxing", "version": 99, "visible": False}}, "not those of this version"),
        ({"features": {"game": "tennis"}}, "unknown game 'tennis'"),
        ({"features": None}, "not a policy that plays a game"),
        ({"config": {"model": {"vocabulary": 65}}}, "cannot play here"),
        ({"config": {}}, "cannot play here"),
        ({"config": 3}, "cannot play here"),
        ({"config": {"model": {"heads": 1, "decoder": 2}, "window": {}}}, "cannot play here"),
        ({"features": ["boxing"]}, "cannot play here"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(trained, tmp_path, change, words):
    _, policy, meta = trained
    checkpoint.save(tmp_path / "other", checkpoint.join(model=policy.state_dict()), meta | change)
    with pytest.raises(CheckpointError, match=words):
        evaluate(tmp_path / "other", 2)


def test_weights_of_another_shape_are_refused(trained, tmp_path):
    _, policy, meta = trained
    weights = policy.state_dict()
    weights["input.weight"] = torch.zeros(2, 2)
    checkpoint.save(tmp_path / "other", checkpoint.join(model=weights), meta)
    with pytest.raises(CheckpointError, match="cannot play here"):
        load_player(tmp_path / "other")


def test_requests_that_cannot_be(trained, monkeypatch):
    path, _, _ = trained
    for options, words in (
        ({"games": 0}, "games must be at least 1"),
        ({"games": 2_000_000_000}, "games must be at most 10000, got 2000000000"),
        ({"cache": "rollin"}, "unknown cache 'rollin'; did you mean rolling"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"processes": -2}, "processes must be at least 1"),
        ({"first_seed": -5}, "must be 0 to 2147483647, got -5 to 24"),
        ({"first_seed": 2**31 - 29}, "must be 0 to 2147483647"),
        ({"first_seed": 10**30}, "must be 0 to 2147483647"),
        ({"device": "gpu"}, "unknown device 'gpu'; use cpu, cuda or cuda:N"),
        ({"device": "mps"}, "unknown device 'mps'"),
        ({"level": 7}, "has the levels 0, 1, 2, 3, got 7"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(path, **options)
    with pytest.raises(CheckpointError, match="does not exist"):
        evaluate(path / "nowhere")
    with pytest.raises(UnsupportedError, match="there is no GPU for device cuda:999"):
        load_player(path, "cuda:999")


def test_games_of_impossible_seeds_are_not_played():
    for seed in (-1, 2**31):
        with pytest.raises(ConfigError, match="the seeds of games must be 0 to 2147483647"):
            play_all([seed])


def test_without_the_emulator_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"\.\[games\]"):
        next(play_games(player(), [1], level=0))


class Replayed:
    """Stands for a captured graph where there is no card: fixed inputs, shapes that never change."""

    def __init__(self, function, inputs, undo):
        self.function, self.inputs = function, {name: tensor.clone() for name, tensor in inputs.items()}
        for _ in range(2):
            function(self.inputs)
            undo()

    def __call__(self, inputs):
        for name, tensor in inputs.items():
            assert tensor.shape == self.inputs[name].shape
            self.inputs[name].copy_(tensor)
        return self.function(self.inputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("context", [8, 40])
def test_cached_and_captured_games_are_the_same_games(trained, monkeypatch, context, temperature):
    """Windows that roll, windows that never fill, and games that end one after another."""
    _, policy, _ = trained
    monkeypatch.setattr(decide, "Captured", Replayed)
    wider = dataclasses.replace(policy.config, decoder=dataclasses.replace(policy.config.decoder, context=context))
    chooser = ControllerPolicy(wider, seed=5).eval()
    GAME.environment = Fading
    games = {}
    for cache in ("none", "exact"):
        for capture in (False, True):
            monkeypatch.setattr(rollout, "Decider", functools.partial(Decider, capture=capture))
            seat = Player(
                chooser, "boxing", GAME.features(), WindowSpec(context=context), torch.device("cpu"), cache=cache
            )
            Fading.made = 0
            games[cache, capture] = play_all([1, 2, 3], seat, temperature=temperature)
    assert len({result.steps for result in games["none", False]}) == 3
    for played in games.values():
        assert played == games["none", False]


class Fading(Short):
    """Rounds of 20, 25, 30 … steps, in the order in which they are made."""

    made = 0

    def __init__(self, level=0):
        super().__init__(level)
        Fading.made += 1
        self.length = 15 + 5 * Fading.made


def test_a_rolling_cache_is_asked_for_and_needs_no_learned_positions(trained, tmp_path):
    path, policy, meta = trained
    with pytest.raises(UnsupportedError, match="cannot roll; use cache exact"):
        load_player(path, cache="rolling")
    config = dataclasses.replace(
        policy.config, decoder=dataclasses.replace(policy.config.decoder, positions="relative")
    )
    model = {"model": dataclasses.asdict(config), "window": meta["config"]["window"]}
    saved = checkpoint.join(model=ControllerPolicy(config, seed=0).state_dict())
    checkpoint.save(tmp_path / "relative", saved, meta | {"config": model})
    rolling = load_player(tmp_path / "relative", cache="rolling")
    assert len(list(play_games(rolling, [5], level=0, temperature=0.0))) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", ["none", "exact"])
def test_graphs_on_a_card_choose_what_calls_choose(trained, monkeypatch, cache, temperature):
    path, _, _ = trained
    shorten(monkeypatch, 40)
    games = []
    for capture in (False, True):
        monkeypatch.setattr(rollout, "Decider", functools.partial(Decider, capture=capture))
        games.append(play_all([1, 2, 3], load_player(path, "cuda", cache), temperature=temperature))
    assert games[0] == games[1]
