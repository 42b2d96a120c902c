"""Finished games on disk."""

import pytest

from ridgeline.errors import RidgelineError
from ridgeline.play import GameResult
from ridgeline.play.ledger import Ledger


def test_a_ledger_survives_interruption_and_refuses_what_is_none(tmp_path):
    one, two = (GameResult(seed=s, level=0, dealt=2, taken=1, knockout=0, steps=5, decision_s=0.5) for s in (3, 4))
    file = tmp_path / "games.jsonl"
    ledger = Ledger(file)
    ledger.add({"at": 1.0}, one)
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:-9])  # the second was cut off
    ledger = Ledger(file)
    assert ledger.find({"at": 1.0}, 0, [3]) == {3: one}
    assert ledger.find({"at": 1.0}, 0, [4, 3]) == {3: one}
    assert ledger.find({"at": 2.0}, 0, [3]) == {}
    assert ledger.find({"at": 1.0}, 1, [3]) == {}
    ledger.add({"at": 1.0}, two)
    assert Ledger(file).find({"at": 1.0}, 0, [4, 3]) == {4: two, 3: one}
    for content in ('{"contender": "a"}', "[]", "no", '{"seed": "x"}', 200_000 * "["):
        file.write_text(content + "\n")
        with pytest.raises(RidgelineError, match=r"line 1 of .* is no game"):
            Ledger(file)
    for content in ("a text of somebody else's", '{"a": 1}', "{"):  # without an end of its last line, too
        file.write_text(content)
        with pytest.raises(RidgelineError, match=r"line 1 of .* is no game"):
            Ledger(file)
        assert file.read_text() == content
    for length in (len(whole) - 1, len(whole) - 2, 2, 0):  # what an interruption leaves of a first game
        file.write_bytes(whole[:length])
        Ledger(file).add({"at": 1.0}, two)
        assert Ledger(file).find({"at": 1.0}, 0, [4]) == {4: two}
    with pytest.raises(RidgelineError, match="cannot be read"):
        Ledger(tmp_path)
    with pytest.raises(RidgelineError, match="cannot write"):  # before a game is played for it
        Ledger(tmp_path / "nowhere" / "games.jsonl")


def test_two_processes_keep_games_in_one_file(tmp_path):
    """Each opened it before the other wrote."""
    games = [GameResult(seed=s, level=0, dealt=2, taken=1, knockout=0, steps=5) for s in range(6)]
    file = tmp_path / "games.jsonl"
    one, two = Ledger(file), Ledger(file)
    for game in games[:4]:
        (one if game.seed % 2 else two).add({}, game)
    file.write_bytes(file.read_bytes() + b'{"seed": 9')  # a third one was killed
    one.add({}, games[4])
    two.add({}, games[5])
    assert Ledger(file).find({}, 0, range(10)) == dict(enumerate(games))
    assert two.find({}, 0, range(10)) == dict(enumerate(games))
    file.unlink()
    one.add({}, games[0])
    assert Ledger(file).find({}, 0, range(10)) == {0: games[0]}
    file.write_text("a letter\n" * 1000)
    with pytest.raises(RidgelineError, match=r"line 2 of .* is no game"):
        one.add({}, games[1])
