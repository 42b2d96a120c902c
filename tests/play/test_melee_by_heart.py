"""From a recording to a bot that repeats it: if this fails, a feature, a label or a frame is not where it should be.

The beginning of a game in which one player repeats forward smashes, as long as a window, so that a small model knows
it by heart within seconds; that hal-20m knows the whole game is measured on a card (dev/gpu/melee_gpu.py).
"""

import json

import numpy as np
import pytest
import torch

from data import melee_helpers as replays
from data.melee_helpers import needs_replays, variant
from ridgeline.data.api import load_dataset, prepare_melee
from ridgeline.data.melee.replay import read_replay
from ridgeline.games.melee import loopback
from ridgeline.games.melee.console import Match
from ridgeline.games.melee.controls import C_STICK, Encoding
from ridgeline.games.melee.events import Recording
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.frames import FIRST_FRAME
from ridgeline.play import load_player
from ridgeline.play.consoles import play_matches
from ridgeline.presets import preset
from ridgeline.train import train
from ridgeline.train.metrics import read_metrics
from ridgeline.train.settings import override

CONTEXT = 256
FRAMED = (0x37, 0x38, 0x3A, 0x3B, 0x3C)


def beginning(part):
    """The first 257 frames."""
    late = part[0] in FRAMED and int.from_bytes(part[1:5], "big", signed=True) > FIRST_FRAME + CONTEXT
    return None if late else part


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    file = tmp_path_factory.mktemp("recording") / "smashes.slp"
    file.write_bytes(variant(replays.SCRIPTED, events=beginning))
    return file


@pytest.fixture(scope="module")
def run(recording, tmp_path_factory):
    """A run on two copies of the recording, of which one is held out."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "replays").mkdir()
    for seed in range(2):
        (folder / "replays" / f"{seed}.slp").write_bytes(Recording.read(recording).reseeded(seed))
    prepare_melee(folder / "replays", folder / "data", processes=1)
    decoder = {"layers": 1, "width": 64, "heads": 2, "dropout": 0.0, "positions": "learned", "position_table": CONTEXT}
    values = {
        "model": {"decoder": decoder},
        "data": str(folder / "data"),
        "batch": 4,
        "steps": 200,
        "optimizer": {"lr": 3e-3, "floor": 1e-4, "warmup": 10},
        "eval_interval": 1000,
        "checkpoint_interval": 1000,
        "device": "cpu",
        "out": str(folder / "run"),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(override(preset("hal-20m"), values))
    torch.set_num_threads(threads)
    return folder / "run"


@needs_replays
def test_a_model_knows_a_scripted_game_by_heart(run):
    last = [record for record in read_metrics(run) if "val_loss" in record][-1]
    for head in ("c", "main", "buttons"):
        assert last[f"val_loss.{head}"] <= 0.02  # over both players, of whom one stands still: 0.04 for the other one
        assert last[f"val_accuracy.{head}"] >= 0.995
    assert len(load_dataset(run.parent / "data").held_out) == 2


@needs_replays
def test_its_smashes_come_out_of_a_console(run, recording, tmp_path):
    match = Match(dolphin=loopback.install(tmp_path / "dolphin", log=tmp_path / "log"), iso=recording)
    played = play_matches(load_player(run), match, 1, consoles=1, temperature=0.0)
    assert played.failed == {}
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    pressed = {line["frame"]: tuple(line["pads"]["1"]["c"]) for line in lines if line["frame"] is not None}
    table = game_table(read_replay(recording).frames, 0, Encoding())
    recorded = [C_STICK[label] for label in table.target[:, 0]]
    same = [pressed[FIRST_FRAME + 1 + t] == point for t, point in enumerate(recorded)]
    assert np.mean(same) >= 0.99
    forward = [t for t in range(1, len(recorded)) if recorded[t] == (80, 0) != recorded[t - 1]]
    assert len(forward) >= 12
    assert all(pressed[FIRST_FRAME + 1 + t + 1] == (80, 0) for t in forward)  # a frame early or late is allowed
