"""`ridgeline data` and `ridgeline play`: what cannot be is refused at once, in one sentence, and nothing is touched."""

from types import SimpleNamespace

import pytest

from ridgeline.cli import data, main

TEXT = "a user's own text\nwhose last line has no end"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def refused(capsys, *arguments):
    """The one sentence of a refusal."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ridgeline: ")  # no blank line of a progress bar before it
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "mine.txt"], "let its name end in .jsonl"),
        (["--file", "mine.jsonl"], "is not a file of demonstrations"),
        (["--file", "/proc/q/new.jsonl"], "cannot write /proc/q/new.jsonl"),
        (["--file", "new.jsonl", "--out", "run"], "run exists; choose another folder"),
        (["--file", "new.jsonl", "--processes", 0], "processes must be at least 1, got 0"),
        (["--file", "new.jsonl", "--first-seed", -5], "must be 0 to 9999"),
        (["--file", "new.jsonl", "--levels", 9], "has the levels 0, 1, 2, 3, got 9"),
        (["--file", "new.jsonl", "--demonstrate", 0], "at least 2 games"),
    ],
)
def test_demonstrations_that_cannot_be_kept_are_not_played(capsys, tmp_path, arguments, words):
    (tmp_path / "run").mkdir()
    for name in ("mine.txt", "mine.jsonl"):
        (tmp_path / name).write_text(TEXT)
    complaint = refused(capsys, "data", "boxing", "--demonstrate", 2, *arguments)
    assert words in complaint
    assert "delete" not in complaint
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.jsonl", "mine.txt", "run"]
    assert (tmp_path / "mine.txt").read_text() == (tmp_path / "mine.jsonl").read_text() == TEXT


def test_a_file_that_is_read_stays_as_it_is(capsys, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"a": 1}')
    assert "is not a file of demonstrations" in refused(capsys, "data", "boxing", "--file", "mine.jsonl")
    assert (tmp_path / "mine.jsonl").read_text() == '{"a": 1}'


@pytest.mark.parametrize("option", [("--levels", 3), ("--first-seed", 5), ("--expert", "scripted")])
def test_how_games_are_played_means_nothing_where_none_is(capsys, option):
    assert f"{option[0]} is of games to be played; add --demonstrate" in refused(capsys, "data", "boxing", *option)


def test_sources_that_are_no_text(capsys, tmp_path):
    (tmp_path / "folder").mkdir()
    assert "is a folder; give a text file" in refused(capsys, "data", "folder")
    assert "SOURCE is empty; see ridgeline data --help" in refused(capsys, "data", "")
    assert "File name too long" in refused(capsys, "data", "x" * 300)
    (tmp_path / "a.txt").write_text(TEXT)
    assert "File name too long" in refused(capsys, "data", "a.txt", "--out", "x" * 300)


@pytest.mark.parametrize("more", [(), ("D",), ("--buttons", 5)])
def test_an_unknown_source_is_named_before_its_options(capsys, more):
    assert "unknown data set 'mele'; did you mean melee?" in refused(capsys, "data", "mele", *more, "-o", "C9")


def test_games_that_cannot_be_played(capsys):
    for arguments, words in (
        (["--processes", 0], "processes must be at least 1, got 0"),
        (["--first-seed", -5], "must be 0 to 2147483647, got -5 to 24"),
        (["--first-seed", 99999999999999], "must be 0 to 2147483647"),
        (["--games", 0], "games must be at least 1"),
    ):
        assert words in refused(capsys, "play", "nowhere", *arguments)


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    clock = iter([0.0, 29.0, 30.0, 30.0, 31.0, 61.0, 61.0])
    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with data.bar() as progress:
        count = data.counter(progress, "playing")
        for done in (1, 2, 3, 2_000):
            count(done, 3_000)
    assert capsys.readouterr().err.splitlines() == ["playing: 2 of 3,000", "playing: 2,000 of 3,000"]
