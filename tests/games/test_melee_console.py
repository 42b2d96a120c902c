"""The live path against a console that plays back a recording: the real libmelee client, real pipes, a real network."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data import melee_helpers as replays
from data.melee_helpers import needs_replays
from ridgeline.data.melee.replay import read_replay
from ridgeline.errors import ConfigError, WorkerError
from ridgeline.games.melee import console as console_module
from ridgeline.games.melee import loopback
from ridgeline.games.melee.console import Console, Match
from ridgeline.games.melee.controls import MAIN, Encoding
from ridgeline.games.melee.frames import FIRST_FRAME
from ridgeline.games.melee.score import Tally


def match(folder, replay=replays.CPU, **options):
    return Match(dolphin=loopback.install(folder / "dolphin", log=folder / "log", **options), iso=replay)


def inputs(count, encoding):
    """Every class of every head, in turn, and all of them in some order."""
    return np.stack(
        [np.arange(count) * step % size for step, (_, size) in zip((1, 5, 1), encoding.heads, strict=True)], -1
    )


def play(game, controllers):
    """Everything that a console gives for controllers that are held whatever it gives."""
    frames = [game.receive(60.0)]
    for controller in controllers:
        game.send(controller)
        frame = game.receive()
        if frame is None:
            break
        frames.append(frame)
    return np.concatenate(frames)


@needs_replays
@pytest.mark.parametrize("count", [6, 7])
def test_every_frame_comes_and_every_input_arrives(tmp_path, count):
    encoding = Encoding(count)
    game = Console(match(tmp_path))
    chosen = inputs(1200, encoding)
    held = encoding.decode(chosen)
    try:
        frames = play(game, [held[t : t + 1] for t in range(len(held))])
    finally:
        game.close()
    expected = read_replay(replays.CPU).frames
    assert np.array_equal(frames, expected)  # live path == file path
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    arrived = {line["frame"]: line["pads"]["1"] for line in lines if line["frame"] is not None}
    assert set(arrived) == set(range(FIRST_FRAME, FIRST_FRAME + len(frames)))
    assert arrived[FIRST_FRAME] == {"main": [0, 0], "c": [0, 0], "l": 0, "r": 0, "buttons": 0}
    for t in range(len(frames) - 1):  # what was chosen at a frame leads to the next one
        pad = arrived[FIRST_FRAME + t + 1]
        assert pad == {
            "main": held["main"][t].tolist(),
            "c": held["c"][t].tolist(),
            "l": int(held["trigger"][t]),
            "r": 0,
            "buttons": int(held["buttons"][t]),
        }
    assert {tuple(pad["main"]) for pad in arrived.values()} == set(MAIN)


@needs_replays
def test_files_of_the_folder_that_one_is_in(tmp_path, monkeypatch):
    """A name without a folder is a file here, not a program of the system's."""
    loopback.install(tmp_path / "dolphin")
    (tmp_path / "game.iso").write_bytes(replays.SHORT.read_bytes())
    monkeypatch.chdir(tmp_path)
    game = Console(Match(dolphin=Path("dolphin"), iso=Path("game.iso")))
    try:
        assert game.receive(60.0) is not None
    finally:
        game.close()


@needs_replays
def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    """What a console's process does when its caller goes without a word."""
    game = Console(match(tmp_path))
    try:
        assert game.receive(60.0) is not None
        game._pipe.close()
        game._process.join(30.0)
        assert not game._process.is_alive()
        assert not game.home.exists()
    finally:
        game.close()


@needs_replays
def test_a_stall_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(console_module, "FRAME_SECONDS", 2.0)
    game = Console(match(tmp_path, stall=-100))
    try:
        with pytest.raises(WorkerError, match="console 0 gave no frame within 2 s"):
            receive_all(game, 2.0)
    finally:
        game.close()
    assert not game._process.is_alive()
    assert not game.home.exists()


@needs_replays
@pytest.mark.parametrize(
    ("options", "words"),
    [({"crash": -100}, "console 0: .*exit code 3"), ({"disconnect": -100}, "console 0: EnetDisconnected")],
)
def test_a_crash_and_a_lost_connection_are_errors(tmp_path, options, words):
    game = Console(match(tmp_path, **options))
    try:
        with pytest.raises(WorkerError, match=words):
            receive_all(game, 40.0)
    finally:
        game.close()


def receive_all(game, seconds):
    neutral = Encoding().decode(np.array([Encoding().neutral]))
    frames = [game.receive(60.0)]
    while frames[-1] is not None:
        game.send(neutral)
        frames.append(game.receive(seconds))
    return frames


@needs_replays
def test_a_dolphin_that_is_none(tmp_path):
    fake = tmp_path / "dolphin"
    for script, words in (
        ("#!/bin/sh\nexit 7\n", r"is no Dolphin that libmelee knows \(\w"),
        ("#!/bin/sh\necho Something else 1.0\n", r"is no Dolphin that libmelee knows \(\w"),
        (TRUE_TO_ITS_VERSION, "exit code 9"),
    ):
        fake.write_text(script)
        fake.chmod(0o755)
        game = Console(Match(dolphin=fake, iso=replays.CPU))
        try:
            with pytest.raises(WorkerError, match=words):
                game.receive(60.0)
        finally:
            game.close()


TRUE_TO_ITS_VERSION = '#!/bin/sh\n[ "$1" = --version ] && echo mainline && exit 0\nexit 9\n'


@needs_replays
def test_what_cannot_be_played(tmp_path):
    whole = match(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no file .*; give --iso a file"):
        dataclasses.replace(whole, iso=tmp_path / "x")
    with pytest.raises(ConfigError, match="is not executable"):
        dataclasses.replace(whole, dolphin=replays.CPU)
    with pytest.raises(ConfigError, match="did you mean FALCO"):
        dataclasses.replace(whole, opponent="FALCON")
    with pytest.raises(ConfigError, match="unknown character 'NANA'"):
        dataclasses.replace(whole, character="NANA")
    with pytest.raises(ConfigError, match="unknown stage"):
        dataclasses.replace(whole, stage="HYRULE")
    with pytest.raises(ConfigError, match="opponent_level must be 1 to 9, got 0"):
        dataclasses.replace(whole, level=0)


@needs_replays
def test_the_score_of_recorded_games():
    """Against what the recording itself says of who won; stocks from before the match ends, not after."""
    import peppi_py

    for file in (replays.FOX_DITTO, replays.ONLINE, replays.ROLLBACK):
        frames = read_replay(file).frames
        tally = Tally()
        for t in range(len(frames)):
            tally.count(frames[t : t + 1])
        result = tally.result(5)
        assert (result.game, result.frames) == (5, len(frames))
        last = frames["players"]["stocks"][-1]
        assert (result.stocks_lost, result.stocks_taken) == (4 - last[0], 4 - last[1])
        assert result.winner == np.sign(int(last[0]) - int(last[1])) != 0
        assert min(result.dealt, result.taken) > 100
        placements = peppi_py.read_slippi(str(file), skip_frames=True).end.players
        if placements:
            first = next(player.port for player in placements if player.placement == 0)
            own = peppi_py.read_slippi(str(file), skip_frames=True).start.players[0].port
            assert (result.winner > 0) == (first == own)


def test_a_tie_in_stocks_goes_to_who_has_less_damage():
    from ridgeline.games.melee.frames import FRAME

    tally, frame = Tally(), np.zeros(1, FRAME)
    frame["players"]["stocks"] = 2
    tally.count(frame)
    assert tally.result(0).winner == 0
    frame["players"]["percent"] = [[30, 50]]
    tally.count(frame)
    frame["players"]["percent"] = [[30, 10]]  # healed, or another life: no damage is taken back
    tally.count(frame)
    assert dataclasses.astuple(tally.result(0))[1:] == (-1, 0, 0, 50, 30, 3)
