"""Matches on consoles that play back recordings: what the policy is shown, what is pressed, what is reported."""

import json
import sys

import numpy as np
import pytest

from data import melee_helpers as replays
from data.melee_helpers import needs_replays
from play.melee_players import Recorder, save_player, tiny_player
from ridgeline.cli import main
from ridgeline.data.melee.replay import read_replay
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError
from ridgeline.games.melee import loopback
from ridgeline.games.melee.console import Match
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.frames import FIRST_FRAME
from ridgeline.play.consoles import play_matches

FRAMES = 941


def inputs_of(log):
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["frame"]: line["pads"]["1"] for line in lines if line["frame"] is not None}


@needs_replays
@pytest.mark.parametrize(
    "window", [WindowSpec(context=32), WindowSpec(context=8, stride=2), WindowSpec(context=8, delay=18)]
)
def test_the_policy_sees_what_training_reads_and_what_it_chooses_is_pressed(tmp_path, window):
    recorder = Recorder()
    match = Match(dolphin=loopback.install(tmp_path / "dolphin", log=tmp_path / "log"), iso=replays.CPU)
    played = play_matches(recorder.player(window), match, 1, consoles=1)
    assert played.failed == {}
    table = game_table(read_replay(replays.CPU).frames, 0, Encoding())
    shown = {name: np.concatenate([row[name] for row in recorder.rows]) for name in recorder.rows[0]}
    decided = np.arange(0, FRAMES, window.stride)
    assert len(shown["numbers"]) == len(decided)
    rows = decided[decided < len(table)]
    assert np.array_equal(shown["numbers"][: len(rows)], table.numbers[rows])
    assert np.array_equal(shown["categories"][: len(rows)], table.categories[rows])
    assert np.array_equal(shown["previous"][: len(rows)], table.controller[rows])
    assert recorder.lengths[:3] == [[0], [1], [2]]  # filled from the left
    assert max(recorder.lengths) == [window.context - 1]

    chosen = Encoding().decode(recorder.rule(shown["categories"]))
    arrived = inputs_of(tmp_path / "log")
    for frame in range(1, FRAMES):
        pad, at = arrived[FIRST_FRAME + frame], frame - 1 - window.delay
        if at < 0:
            assert pad == {"main": [0, 0], "c": [0, 0], "l": 0, "r": 0, "buttons": 0}
            continue
        held = chosen[at // window.stride]
        assert (pad["main"], pad["c"]) == (held["main"].tolist(), held["c"].tolist())
        assert (pad["l"], pad["buttons"]) == (held["trigger"], held["buttons"])


@needs_replays
def test_several_consoles_share_a_call_of_the_model(tmp_path):
    recorder = Recorder()
    match = Match(dolphin=loopback.install(tmp_path / "dolphin"), iso=replays.SHORT, level=7)
    ended = []
    played = play_matches(recorder.player(WindowSpec(context=4)), match, 3, consoles=2, on_game=lambda: ended.append(1))
    assert [result.game for result in played.results] == [0, 1, 2]
    assert len(ended) == 3
    assert {len(row["numbers"]) for row in recorder.rows[:300]} == {2}
    summary = played.summary()
    assert (summary["games"], summary["failed"], summary["level"]) == (3, [], 7)
    last = read_replay(replays.SHORT).frames["players"][-1]
    assert summary["dealt"] == last[1]["percent"]
    assert summary["taken"] == last[0]["percent"]
    assert summary["frames"] == 3 * 308
    assert [entry["dealt"] for entry in summary["matches"]] == [last[1]["percent"]] * 3
    assert summary["wins"] + summary["losses"] + summary["ties"] == 3
    assert set(summary["intervals"]) == {"wins", "stocks_taken", "stocks_lost", "dealt", "taken"}


def crashing_once(folder):
    """A Dolphin of which the first to start crashes in the middle of its match."""
    good = loopback.install(folder / "good")
    bad = loopback.install(folder / "bad", crash=-50)
    script = folder / "dolphin"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {good} "$@"\n'
        f'if mkdir {folder}/taken 2>/dev/null; then exec {bad} "$@"; else exec {good} "$@"; fi\n'
    )
    script.chmod(0o755)
    return script


@needs_replays
def test_a_crashed_console_is_reported_and_the_others_go_on(tmp_path):
    match = Match(dolphin=crashing_once(tmp_path), iso=replays.SHORT)
    played = play_matches(Recorder().player(WindowSpec(context=4)), match, 2, consoles=2)
    assert len(played.results) == 1
    assert [entry["game"] for entry in played.summary()["failed"]] == [1 - played.results[0].game]
    assert "Dolphin ended with exit code 3" in played.summary()["failed"][0]["reason"]


@needs_replays
def test_command_line(tmp_path, capsys):
    saved = save_player(tmp_path / "checkpoint", tiny_player(WindowSpec(context=4)))
    dolphin = loopback.install(tmp_path / "dolphin")
    words = [
        "play",
        saved,
        "--game",
        "melee",
        "--iso",
        replays.SHORT,
        "--dolphin",
        dolphin,
        "--games",
        1,
        "--consoles",
        1,
    ]
    words += ["--opponent-level", 9, "--stage", "FINAL_DESTINATION", "--character", "FOX", "--json"]
    assert main(list(map(str, words))) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["games"], result["failed"], result["level"]) == (1, [], 9)
    words[words.index("--dolphin") + 1] = loopback.install(tmp_path / "bad", crash=-120)
    assert main(list(map(str, words))) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["games"] == 0
    assert captured.err.startswith("ridgeline: 1 of 1 matches failed, the first of them 0: console 0: ")


def test_what_cannot_be_asked_for(tmp_path, capsys):
    saved = save_player(tmp_path / "checkpoint", tiny_player())
    file = tmp_path / "file"
    file.write_text("")

    def refused(*words):
        assert main(["play", str(saved), *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "needs --iso" in refused("--game", "melee")
    assert "needs --iso" in refused("--iso", file)
    assert "there is no file" in refused("--iso", file, "--dolphin", tmp_path / "x")
    assert "is not executable" in refused("--iso", file, "--dolphin", file)
    dolphin = ("--iso", file, "--dolphin", sys.executable)
    assert "unknown stage" in refused(*dolphin, "--stage", "x")
    assert "unknown character" in refused(*dolphin, "--character", "x")
    assert "opponent_level must be 1 to 9, got 12" in refused(*dolphin, "--opponent-level", 12)
    assert "--game is for melee, got 'boxing'" in refused("--game", "boxing")
    assert "unknown protocol" in refused("--serve", "tcp")
    assert "games must be at least 1" in refused(*dolphin, "--games", 0)
    assert "consoles must be at least 1" in refused(*dolphin, "--consoles", 0)
    assert "temperature must be 0 or more" in refused(*dolphin, "--temperature", -1)
    for seed in (-1, 2**63):
        assert "seed must be in [0, 2^63)" in refused(*dolphin, "--seed", seed)
    assert "--games means nothing with --serve" in refused("--serve", "umi", "--games", 3)
    assert "--opponent-level means nothing with --serve" in refused("--serve", "umi", "--opponent-level", 3)
    assert "--iso means nothing with --serve" in refused("--serve", "umi", "--iso", file)
    assert "Melee is played on a console: give --game melee" in refused()
    assert "Melee is played on a console: give --game melee" in refused("--level", 1)
    match = Match(dolphin=sys.executable and file.__class__(sys.executable), iso=file)
    with pytest.raises(ConfigError, match="consoles must be"):
        play_matches(tiny_player(), match, 1, consoles=0)
