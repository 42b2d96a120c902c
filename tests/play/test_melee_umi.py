"""The championship's bot: many games in slots of their own, each seen as if it were alone."""

import contextlib
import socket
import sys
import tempfile
import threading

import numpy as np
import pytest
import torch

from data import melee_helpers as replays
from data.melee_helpers import as_the_protocol_has_it, needs_replays
from play.melee_players import Recorder, save_player, tiny_player
from ridgeline.cli import main
from ridgeline.data.melee.replay import read_replay
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.umi import controller_rows
from ridgeline.play.umi import Memory, make_bot


def first_only(count):
    return np.arange(count) == 0


@needs_replays
@pytest.mark.parametrize("encoding", [Encoding(6), Encoding(5, True)])
def test_it_chooses_what_the_policy_chooses_on_the_replay(encoding):
    window = WindowSpec(context=16)
    player = tiny_player(window, encoding)
    frames = as_the_protocol_has_it(replays.SHORT)
    table = game_table(read_replay(replays.SHORT).frames, 0, encoding)
    memory = Memory(player, 2, temperature=0.0)
    rows = [memory.act(frames[t : t + 1], np.array([1]), np.array([t == 0]))[0] for t in range(len(table))]
    chosen = []
    for t in range(len(table)):
        part = slice(max(0, t + 1 - window.context), t + 1)
        batch = {
            "categories": torch.from_numpy(table.categories[part].astype(np.int64))[None],
            "numbers": torch.from_numpy(table.numbers[part])[None],
            "previous": torch.from_numpy(table.controller[part].astype(np.int64))[None],
        }
        at = torch.tensor([len(table.numbers[part]) - 1])
        chosen.append(player.policy.act(batch, at, temperature=0.0)[0].numpy())
    assert len({tuple(controller) for controller in chosen}) > 5
    assert np.array_equal(np.stack(rows), controller_rows(encoding.decode(np.stack(chosen))))


@needs_replays
def test_games_in_other_slots_do_not_matter():
    """Games begin and end at different times, and slots are used again."""
    frames = as_the_protocol_has_it(replays.SHORT)
    player = tiny_player(WindowSpec(context=8))
    alone = Memory(player, 1, temperature=0.0)
    expected = [alone.act(frames[t : t + 1], np.array([0]), np.array([t == 0]))[0] for t in range(100)]
    together = Memory(player, 3, temperature=0.0)
    starts = {0: (0, 50), 1: (7,), 2: (20, 60)}  # slot → when games in it begin
    for step in range(100):
        going = {
            slot: step - max(s for s in begin if s <= step) for slot, begin in starts.items() if min(begin) <= step
        }
        slots, ages = np.array(list(going)), np.array(list(going.values()))
        rows = together.act(frames[ages], slots, ages == 0)
        for row, age in zip(rows, ages, strict=True):
            assert np.allclose(row, expected[age])


@needs_replays
def test_every_other_frame_holds_the_last_choice():
    recorder = Recorder()
    memory = Memory(recorder.player(WindowSpec(context=4, stride=2)), 1)
    frames = as_the_protocol_has_it(replays.CPU)
    rows = [memory.act(frames[t : t + 1], np.array([0]), first_only(101)[t : t + 1]) for t in range(101)]
    assert len(recorder.rows) == 51
    assert all(np.array_equal(rows[t], rows[t + 1]) for t in range(0, 100, 2))
    table = game_table(read_replay(replays.CPU).frames, 0, Encoding())
    shown = np.concatenate([row["numbers"] for row in recorder.rows])
    assert np.array_equal(shown, table.numbers[:101:2])


def test_what_the_arena_is_told():
    bot = make_bot(tiny_player(WindowSpec(context=4, delay=21)), name="x", characters="FOX")
    assert {name: bot.hello()[name] for name in ("name", "characters", "delay")} == {
        "name": "x", "characters": "FOX", "delay": 21,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="unknown character"):
        make_bot(tiny_player(), name="x", characters="FOXY")
    boxing = tiny_player()
    object.__setattr__(boxing, "game", "boxing")
    with pytest.raises(DataError, match="a policy for boxing cannot play"):
        make_bot(boxing, name="x")


def test_without_an_arena(tmp_path, capsys, monkeypatch):
    saved = save_player(tmp_path / "checkpoint", tiny_player())
    monkeypatch.delenv("UMI_SOCKET", raising=False)
    assert main(["play", str(saved), "--serve", "umi"]) == 2
    assert "UMI_SOCKET is not set; the arena, or umi-conform, sets it" in capsys.readouterr().err
    for name in (str(tmp_path / "none"), "long" * 100):
        monkeypatch.setenv("UMI_SOCKET", name)
        assert main(["play", str(saved), "--serve", "umi"]) == 2
        assert "cannot be reached or has gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "cannot be reached or has gone"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak the championship's protocol"),
        (b"\1\0\0\0\xc1", "does not speak the championship's protocol"),
        (b"\2\0\0\0\1\1", "does not speak the championship's protocol"),
        (b"\4\0\0\0\x81\xa1t\1", "does not speak the championship's protocol"),
    ],
)
def test_something_else_in_the_arenas_place(tmp_path, capsys, monkeypatch, answer, words):
    saved = save_player(tmp_path / "checkpoint", tiny_player())
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as arena:
        arena.bind(f"{folder}/s")
        arena.listen()
        monkeypatch.setenv("UMI_SOCKET", f"{folder}/s")

        def talk():
            peer, _ = arena.accept()
            peer.recv(1 << 16)
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(1 << 16):  # its complaint
                    pass
            peer.close()

        talker = threading.Thread(target=talk)
        talker.start()
        assert main(["play", str(saved), "--serve", "umi"]) == 2
        talker.join()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("window", [WindowSpec(context=16, delay=18), WindowSpec(context=8, stride=2)])
def test_it_conforms(tmp_path, window):
    """The championship's own checks, against the command that a user would enter."""
    from umi.conform.arena import DummyArena

    saved = save_player(tmp_path / "checkpoint", tiny_player(window))
    command = [sys.executable, "-m", "ridgeline", "play", str(saved), "--serve", "umi", "--character", "FALCO"]
    checks = DummyArena(command, steps=20, max_games=8).run()
    assert [f"{check.name}: {check.detail}" for check in checks if check.status not in ("pass", "skip")] == []
    passed = {check.name for check in checks if check.status == "pass"}
    assert {"hello", "ready", "batch size", "lanes and game churn", "characters", "shutdown"} <= passed
    assert len(passed) >= 14
