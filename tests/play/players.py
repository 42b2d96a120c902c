"""Stand-ins for policies, and rounds of Boxing that end soon, for the tests of playing."""

import os

import torch

from ridgeline.data.window import WindowSpec
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.game import Boxing
from ridgeline.play import Player, play_games


class Standin:
    """A policy that chases the opponent and notes what it was shown."""

    def __init__(self, fail_after=None):
        self.seen, self.fail_after = [], fail_after

    def act(self, batch, at_B, *, temperature=1.0, generator=None):
        self.seen.append({name: tensor.clone() for name, tensor in batch.items()} | {"at": at_B.clone()})
        if self.fail_after is not None and len(self.seen) > self.fail_after:
            os._exit(3)
        newest = batch["numbers"][torch.arange(len(at_B)), at_B]
        right, down = newest[:, 8] * 64, newest[:, 9] * 64
        stick = torch.where(right.abs() > 26, torch.where(right > 0, 2, 3), torch.where(down > 0, 4, 1))
        chance = [torch.rand((), generator=own) for own in generator] if temperature else [torch.ones(())] * len(at_B)
        noise = torch.stack(chance) < 0.1 * temperature
        fire = 1 - batch["previous"][torch.arange(len(at_B)), at_B, 1]
        return torch.stack([torch.where(noise, torch.zeros_like(stick), stick), fire], dim=-1)


def player(policy=None, window=None):
    spec = window or WindowSpec(context=8)
    return Player(policy or Standin(), "boxing", GAME.features(), spec, torch.device("cpu"))


class Short(Boxing):
    """A round that ends after some steps."""

    length = 60

    def reset(self, seed):
        self.steps = 0
        return super().reset(seed)

    def step(self, controller):
        self.steps += 1
        return super().step(controller)

    @property
    def done(self):
        return self.steps >= self.length


def player_of(kind):
    """A player whose process plays another kind of round."""
    GAME.environment = kind
    return player()


def shorten(monkeypatch, steps):
    monkeypatch.setattr(Short, "length", steps)
    GAME.environment = Short


def play_all(seeds, who=None, **settings):
    return [game for finished in play_games(who or player(), seeds, level=0, **settings) for game in finished]
