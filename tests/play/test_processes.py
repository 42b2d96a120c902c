"""Games in processes of their own: the same games, and a sentence for whatever befalls a process."""

import functools
import importlib
import time

import pytest
import torch

from play.players import Short, Standin, player, player_of
from ridgeline.errors import OutOfMemoryError, WorkerError
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.game import Boxing
from ridgeline.play import evaluate
from ridgeline.play.ledger import Ledger

judge = importlib.import_module("ridgeline.play.evaluate")  # the package has a function of that name


class Endless(Boxing):
    """A round that lasts longer than a round can."""

    cap = 20


def test_the_number_of_processes_does_not_matter(monkeypatch):
    monkeypatch.setattr(judge, "GAMES_A_CALL", 2)
    short = functools.partial(player_of, Short)
    one, two = (evaluate(short, 5, processes=count, first_seed=5_000) for count in (1, 2))
    assert one == two
    assert [game.seed for game in one.results] == list(range(5_000, 5_005))


def dying_player():
    return player(Standin(fail_after=100))


def test_a_dead_process_is_an_error():
    with pytest.raises(WorkerError, match=r"the games of seeds 10000 to 10001 died \(exit code 3\)"):
        evaluate(dying_player, 2)


def greedy_player():
    class Greedy(Standin):
        def act(self, batch, at_B, **settings):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    return player(Greedy())


def test_a_card_without_memory_for_another_process_is_one_sentence():
    with pytest.raises(OutOfMemoryError, match="not enough memory; let fewer processes play at a time"):
        evaluate(greedy_player, 1)


def hanging_player():
    class Hanging(Standin):
        def act(self, batch, at_B, **settings):
            if len(self.seen) > 50:
                time.sleep(600)
            return super().act(batch, at_B, **settings)

    return player(Hanging())


def test_a_hung_process_is_an_error():
    with pytest.raises(WorkerError, match="the games of seeds 10000 to 10000 was silent for 8 s"):
        evaluate(hanging_player, 1, timeout=8)


def test_a_slow_process_is_not_a_hung_one(monkeypatch):
    monkeypatch.setattr(judge, "HEARTBEAT_SECONDS", 0.0)
    signs = list(judge._play(judge.Job(player, range(5_000, 5_001), 3, 1.0, {})))
    assert len(signs) == 1 + sum(not finished for finished in signs) > 100


def test_a_game_that_does_not_end_is_an_error():
    with pytest.raises(WorkerError, match="did not end within 20 steps"):
        evaluate(functools.partial(player_of, Endless), 1)


def test_a_group_goes_on_with_the_games_it_lacks(tmp_path):
    short, ledger = functools.partial(player_of, Short), Ledger(tmp_path / "games.jsonl")
    (job,) = (judge.Job(short, seeds, 0, 1.0, {}) for seeds in judge.groups(4, 5_000))
    whole = [result for _, result in judge.play_jobs([job], processes=1)]
    for result in whole[1:3]:
        ledger.add({}, result)
    played = []
    counted = functools.partial(counting_player, tmp_path / "played")
    for _, result in judge.play_jobs([job._replace(load=counted)], processes=1, ledger=ledger):
        played.append(result)
    assert sorted(played, key=lambda game: game.seed) == sorted(whole, key=lambda game: game.seed)
    assert (tmp_path / "played").read_text() == "2"
    assert ledger.find({}, 0, job.seeds) == {result.seed: result for result in whole}


def counting_player(file):
    """A player of short rounds that writes down how many it decides in at a time."""

    class Counting(Standin):
        def act(self, batch, at_B, **settings):
            file.write_text(str(len(at_B)))
            return super().act(batch, at_B, **settings)

    GAME.environment = Short
    return player(Counting())


def test_games_that_are_kept_are_not_played_again(trained, tmp_path, monkeypatch):
    path, _, _ = trained
    file = tmp_path / "games.jsonl"
    first = evaluate(path, 1, first_seed=5_000, keep=file, processes=1)
    assert evaluate(path, 1, first_seed=5_000, keep=file) == first
    monkeypatch.setattr(judge, "run_parallel", lambda function, tasks, **settings: iter(tasks and [(0, [])]))
    assert evaluate(path, 1, first_seed=5_000, keep=file) == first
    for change in ({"temperature": 0.5}, {"level": 1}, {"cache": "none"}, {"first_seed": 5_001}):
        with pytest.raises(WorkerError, match="0 of 1 games came back"):
            evaluate(path, 1, keep=file, **{"first_seed": 5_000, **change})
