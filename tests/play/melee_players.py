"""Policies for Melee that are small, or not policies at all."""

import dataclasses

import numpy as np
import torch

from ridgeline import checkpoint
from ridgeline.data.window import WindowSpec
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import GROUPS, NUMBERS, describe
from ridgeline.models import Category, ControllerPolicy, DecoderConfig, Head, PolicyConfig
from ridgeline.play import Player

WIDTHS = {"stage": 4, "character": 4, "action": 8}


def tiny_policy(encoding, context, seed=0):
    config = PolicyConfig(
        decoder=DecoderConfig(layers=1, width=32, heads=2, positions="relative", context=context),
        heads=tuple(Head(name=name, classes=classes) for name, classes in encoding.heads),
        categories=tuple(Category(name=n, rows=rows, width=WIDTHS[n], columns=columns) for n, rows, columns in GROUPS),
        numbers=NUMBERS,
        previous=tuple(name for name, _ in encoding.heads),
    )
    policy = ControllerPolicy(config, seed=seed).eval()
    with torch.no_grad():
        for parameter in policy.parameters():  # bolder than freshly initialised: its choices differ
            parameter.mul_(4)
    return policy


def tiny_player(window=None, encoding=None, seed=0):
    window, encoding = window or WindowSpec(context=16), encoding or Encoding()
    policy = tiny_policy(encoding, window.context, seed)
    return Player(policy, "melee", describe(encoding), window, torch.device("cpu"))


def save_player(folder, player):
    meta = {
        "preset": "hal-20m",
        "features": dict(player.features),
        "config": {
            "model": dataclasses.asdict(player.policy.config),
            "window": dataclasses.asdict(player.window),
        },
    }
    return checkpoint.save(folder, checkpoint.join(model=player.policy.state_dict()), meta)


class Recorder:
    """Chooses by a rule that the newest state decides, and keeps the newest row of every window it was shown."""

    def __init__(self, encoding=None):
        self.encoding = encoding or Encoding()
        self.rows = []
        self.lengths = []

    def act(self, batch, at_B, *, temperature=1.0, generator=None):
        rows = torch.arange(len(at_B))
        self.rows.append({name: tensor[rows, at_B].numpy().copy() for name, tensor in batch.items()})
        self.lengths.append(at_B.tolist())
        return torch.from_numpy(self.rule(self.rows[-1]["categories"]))

    def rule(self, categories):
        action = categories[:, 3].astype(np.int64)
        steps = zip((1, 7, 3), self.encoding.heads, strict=True)
        return np.stack([action * step % size for step, (_, size) in steps], axis=-1)

    def player(self, window):
        return Player(self, "melee", describe(self.encoding), window, torch.device("cpu"))
