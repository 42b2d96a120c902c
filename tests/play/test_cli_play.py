"""`ridgeline play` on the command line: games that are kept, and one to look at."""

import pytest

from command_line import last_json, refused, run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


GAME = ["--first-seed", 5_000, "--temperature", 0.7]


def test_a_picture_is_of_the_game_that_is_judged(capsys, trained, tmp_path):
    path, _, _ = trained
    code, output, complaint = run(capsys, "play", path, *GAME, "--picture", tmp_path / "game.png", "--json")
    assert code == 0, complaint
    shown = last_json(output)
    assert (tmp_path / "game.png").read_bytes()[1:4] == b"PNG"
    kept = ["--keep", tmp_path / "games.jsonl"]
    code, output, complaint = run(capsys, "play", path, *GAME, *kept, "--games", 1, "--processes", 1, "--json")
    assert code == 0, complaint
    timing = {"seconds", "games_per_s", "decision_ms"}
    same = [{name: value for name, value in one.items() if name not in timing} for one in (shown, last_json(output))]
    assert same[0] == same[1]
    assert len((tmp_path / "games.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--watch"], "without one write it to a file: --picture game.png"),
        (["--watch", "--games", 3], "leave --games out"),
        (["--watch", "--picture", "game.png"], "--watch or --picture"),
        (["--picture", "game.gif"], "let its name end in .png"),
        (["--picture", "game.png", "--level", 7], "has the levels 0, 1, 2, 3, got 7"),
        (["--picture", "game.png", "--temperature", -1], "temperature must be 0 or more"),
        (["--games", 2_000_000_000], "games must be at most 10000, got 2000000000"),
        (["--cache", "rolling"], "learned positions end with the context"),
        (["--keep", "."], "cannot be read"),
        (["--keep", "nowhere/games.jsonl"], "cannot write nowhere/games.jsonl"),
        (["--picture", "game.png", "--keep", "games.jsonl"], "leave --keep and --processes out"),
        (["--watch", "--processes", 2], "leave --keep and --processes out"),
    ],
)
def test_what_cannot_be_is_one_sentence(capsys, trained, options, sentence):
    assert sentence in refused(capsys, "play", trained[0], *options)
