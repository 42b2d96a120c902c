"""A watched game: drawn in the terminal, or every screen of it in an animated picture."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
import torch

from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.game import Boxing
from ridgeline.games.boxing.policy import policy_config
from ridgeline.games.env import Score
from ridgeline.models import ControllerPolicy, DecoderConfig
from ridgeline.play import Player, play_games
from ridgeline.play.watch import Sight, Watched, draw, show, write_picture


@pytest.fixture(scope="module")
def player():
    policy = ControllerPolicy(policy_config(DecoderConfig(layers=1, width=32, heads=2, context=8)), seed=0).eval()
    return Player(policy, "boxing", GAME.features(), WindowSpec(context=8), torch.device("cpu"))


def sights(screens):
    return [Sight(np.asarray(screen, np.uint8), Score(3, 1), 1 / 15) for screen in screens]


def chunks(content):
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        data = content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + data),)
        yield kind.decode(), data
        at += 12 + length


def decode(content):
    """The screens of an animated PNG, by its specification; and seconds of each."""
    canvas, palette, screens, delays, sequence = None, None, [], [], 0
    for kind, data in chunks(content):
        if kind == "IHDR":
            width, height, depth, color, *rest = struct.unpack(">IIBBBBB", data)
            assert (depth, color, rest) == (8, 3, [0, 0, 0])
            canvas = np.zeros((height, width), np.uint8)
        elif kind == "acTL":
            frames, _ = struct.unpack(">II", data)
        elif kind == "PLTE":
            palette = np.frombuffer(data, np.uint8).reshape(-1, 3)
        elif kind == "fcTL":
            number, w, h, x, y, over, under, *_ = struct.unpack(">IIIIIHHBB", data)
            assert number == sequence
            sequence += 1
            delays.append(over / under)
        elif kind in ("IDAT", "fdAT"):
            if kind == "fdAT":
                assert struct.unpack(">I", data[:4]) == (sequence,)
                sequence, data = sequence + 1, data[4:]
            lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(h, w + 1)
            assert not lines[:, 0].any()
            canvas[y : y + h, x : x + w] = lines[:, 1:]
            screens.append(palette[canvas])
    assert frames == len(screens)
    return screens, delays


def test_the_picture_holds_every_screen_in_its_colours(tmp_path):
    rng = np.random.default_rng(0)
    screens = [np.zeros((6, 5, 3), np.uint8)]
    for _ in range(5):
        screens.append(screens[-1].copy())
        screens[-1][rng.integers(6), rng.integers(5)] = rng.integers(256, size=3)
    screens.append(screens[-1].copy())  # nothing moved
    assert write_picture(sights(screens), tmp_path / "game.png") == 7
    shown, delays = decode((tmp_path / "game.png").read_bytes())
    assert all((one == other).all() for one, other in zip(shown, screens, strict=True))
    assert delays == pytest.approx([1 / 15] * 7, abs=5e-4)


def test_a_watched_game_is_the_played_one_and_shows_the_emulators_screen(player):
    watched = Watched(player, 5_000, level=0)
    first = next(iter(watched))
    assert (first.screen.shape, first.screen.dtype, first.seconds) == ((210, 160, 3), np.uint8, pytest.approx(4 / 60))
    assert len(np.unique(first.screen.reshape(-1, 3), axis=0)) > 3
    watched = Watched(player, 5_000, level=0)
    *_, last = watched
    among_others = [game for ended in play_games(player, [4_999, 5_000], level=0) for game in ended]
    (result,) = [game for game in among_others if game.seed == 5_000]
    assert watched.result == result
    assert last.score == (result.dealt, result.taken)


def test_a_screen_is_drawn_as_large_as_fits_with_its_colours():
    screen = np.zeros((210, 160, 3), np.uint8)
    screen[:105] = (255, 0, 0)
    lines = draw(screen, 80, 24)
    assert len(lines) == 24
    assert {line.count("▀") for line in lines} == {36}  # 48 half lines of 210: 160 · 48 / 210 columns
    assert lines[0] == "\x1b[38;2;255;0;0;48;2;255;0;0m" + "▀" * 36 + "\x1b[0m"
    assert lines[-1].startswith("\x1b[38;2;0;0;0;48;2;0;0;0m")
    assert {line.count("▀") for line in draw(screen, 20, 100)} == {20}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_terminal_is_left_as_it_was():
    terminal = Terminal()
    show(sights(np.zeros((2, 4, 4, 3))), terminal, lambda: os.terminal_size((8, 4)))
    text = terminal.getvalue()
    assert text.count("3 dealt, 1 taken") == 2
    assert text.endswith("\x1b[0m\x1b[?25h\n")

    def interrupted():
        yield from sights(np.zeros((1, 4, 4, 3)))
        raise KeyboardInterrupt

    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt):
        show(interrupted(), terminal, lambda: os.terminal_size((8, 4)))
    assert terminal.getvalue().endswith("\x1b[?25h\n")


class Unseen(Boxing):
    """A round without a picture."""

    screen = None


def test_what_cannot_be_shown_says_why(player, tmp_path):
    with pytest.raises(ConfigError, match=r"--picture game\.png"):
        show(sights([]), io.StringIO(), lambda: os.terminal_size((80, 24)))
    for file, words in (("game.gif", "animated PNG"), ("no/game.png", "there is no folder"), ("f.png", "is a folder")):
        (tmp_path / "f.png").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=words):
            write_picture(sights([]), tmp_path / file)
    many = np.stack(np.broadcast_arrays(*np.ogrid[:17, :17], 0), axis=-1)
    with pytest.raises(UnsupportedError, match="256 colours"):
        write_picture(sights([many]), tmp_path / "game.png")
    GAME.environment = Unseen
    with pytest.raises(UnsupportedError, match="boxing shows no screen here"):
        Watched(player, 5_000, level=0)
