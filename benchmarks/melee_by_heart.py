"""Does a model know a recording by heart, and does it come out of a console again? (The first article's method.)

`python benchmarks/melee_by_heart.py REPLAY [--steps 4000]` trains a small model on the first player's inputs, says for
each head what it makes of every frame as it is played (from its own window, read at the newest position), lets it play
against the loopback console, which serves that recording, and counts the c-stick presses that come out. Prints one JSON
object. Minutes on a CPU; the recording must be scripted or short to be learned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.data.api import prepare_melee
from ridgeline.data.melee.replay import read_replay
from ridgeline.games import stick_points
from ridgeline.games.melee import loopback
from ridgeline.games.melee.console import Match
from ridgeline.games.melee.controls import C_STICK, Encoding
from ridgeline.games.melee.events import Recording
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.frames import FIRST_FRAME
from ridgeline.games.table import GameTable
from ridgeline.models import ControllerPolicy
from ridgeline.play import Player, load_player
from ridgeline.play.consoles import play_matches
from ridgeline.presets import preset
from ridgeline.train import train
from ridgeline.train.settings import override

BATCH = 16


def learn(replay: Path, folder: Path, steps: int) -> Player:
    """A model that was trained on the recording; a copy of it is held out."""
    (folder / "replays").mkdir()
    for seed in range(2):
        (folder / "replays" / f"{seed}.slp").write_bytes(Recording.read(replay).reseeded(seed))
    prepare_melee(folder / "replays", folder / "data", processes=1)
    values = {
        "model": {"decoder": {"layers": 2, "width": 128, "heads": 4, "dropout": 0.0}},
        "data": str(folder / "data"),
        "batch": 4,
        "steps": steps,
        "optimizer": {"lr": 2e-3, "floor": 2e-5, "warmup": 30, "weight_decay": 0.0},
        "eval_interval": max(1, steps // 10),
        "checkpoint_interval": steps,
        "device": "cpu",
        "out": str(folder / "run"),
    }
    train(override(preset("hal-20m"), values))
    return load_player(folder / "run" / "last")


@torch.no_grad()
def judge(player: Player, table: GameTable) -> dict[str, dict[str, float]]:
    """Loss in nats and accuracy of each head, every frame from its own window."""
    policy, context = player.policy, player.window.context
    assert isinstance(policy, ControllerPolicy)
    whole: dict[str, np.ndarray] = {
        "categories": table.categories,
        "numbers": table.numbers,
        "previous": table.controller,
    }
    tensors = {
        name: torch.from_numpy(array if name == "numbers" else array.astype(np.int64)) for name, array in whole.items()
    }
    targets = torch.from_numpy(table.target.astype(np.int64))
    sums = {head: np.zeros(2) for head in stick_points("melee")} | {"buttons": np.zeros(2)}
    begin = torch.arange(min(context, len(table)))
    parts = [(begin[None], begin, slice(None))]  # while the window fills, one pass holds all of its lengths
    for first in range(context, len(table), BATCH):
        newest = torch.arange(first, min(first + BATCH, len(table)))
        parts.append((newest[:, None] - context + 1 + torch.arange(context), newest, slice(-1, None)))
    for rows, frames, read in parts:
        logits = policy({name: tensor[rows] for name, tensor in tensors.items()})
        for index, head in enumerate(policy.config.heads):
            said, right = logits[head.name][:, read].flatten(0, 1), targets[frames, index]
            loss = torch.nn.functional.cross_entropy(said, right, reduction="sum")
            sums[head.name] += [loss.item(), (said.argmax(-1) == right).sum().item()]
    return {head: dict(zip(("loss", "accuracy"), total / len(table), strict=True)) for head, total in sums.items()}


def replay_it(player: Player, replay: Path, table: GameTable, folder: Path) -> dict[str, Any]:
    """What is pressed on a console that serves the recording, beside what was pressed in it."""
    match = Match(dolphin=loopback.install(folder / "dolphin", log=folder / "log"), iso=replay)
    play_matches(player, match, 1, consoles=1, temperature=0.0)
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    pressed = {
        line["frame"] - FIRST_FRAME - 1: tuple(line["pads"]["1"]["c"]) for line in lines if line["frame"] is not None
    }
    recorded = dict(enumerate(C_STICK[label] for label in table.target[:, 0]))
    begun = [t for t in recorded if recorded[t] != (0, 0) and recorded.get(t - 1) != recorded[t]]
    out = [t for t in begun if any(pressed.get(t + k) == recorded[t] != pressed.get(t + k - 1) for k in (-1, 0, 1))]
    same = np.mean([pressed[t] == point for t, point in recorded.items()])
    return {"same_frames": float(same), "presses": len(begun), "pressed_within_a_frame": len(out)}


def main() -> None:
    """Train, judge, play, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replay", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        player = learn(options.replay, Path(name), options.steps)
        table = game_table(read_replay(options.replay).frames, 0, Encoding())
        heads = judge(player, table)
        print(json.dumps({"heads": heads, **replay_it(player, options.replay, table, Path(name))}))


if __name__ == "__main__":
    main()
