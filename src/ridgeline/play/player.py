"""A trained policy with all that is needed to play: which game, seen through which features, in which window."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline import checkpoint
from ridgeline.data.window import WindowSpec
from ridgeline.errors import CheckpointError, ConfigError, RidgelineError, UnsupportedError, nearest
from ridgeline.games import game
from ridgeline.models import ControllerPolicy, DecoderConfig, PolicyConfig
from ridgeline.models.policy import Chance
from ridgeline.models.reader import read

DEVICE = re.compile("cpu|cuda(:[0-9]{1,3})?")
CACHES = ("exact", "rolling", "none")


class Policy(Protocol):
    """What chooses controllers; see `ridgeline.models.ControllerPolicy`."""

    def act(
        self,
        batch: dict[str, Tensor],
        at_B: Tensor,
        *,
        temperature: float = 1.0,
        generator: Chance | None = None,
    ) -> Tensor:
        """A controller for the state at position `at_B` of each window: int64[B, heads]."""


@dataclass(frozen=True)
class Player:
    """A policy ready to play.

    Attributes:
        policy: in evaluation mode, on its device.
        game: name of the game.
        features: name and version of its features, as the checkpoint records them.
        window: context, stride and delay that it was trained with.
        device: where the policy computes.
        cache: what is kept between decisions. "exact": keys and values while the window fills, which changes nothing;
            then whole windows. "rolling": keys and values always, another function than the trained one once the
            window is full, see `ridgeline.models.cache`. "none": whole windows always.
    """

    policy: Policy
    game: str
    features: Mapping[str, Any]
    window: WindowSpec
    device: torch.device
    cache: str = "none"


def load_player(path: str | Path, device: str = "cpu", cache: str = "exact") -> Player:
    """The policy of a checkpoint.

    Args:
        path: folder of a checkpoint, or of a run, whose best is taken.
        device: where to compute: cpu, cuda or cuda:N.
        cache: what is kept between decisions, see Player.

    Raises:
        CheckpointError: none, corrupt, not a policy, or of features that this version does not have.
        ConfigError: no such kind of device or cache.
        UnsupportedError: the device is not there, or the policy's cache cannot roll.
    """
    where = find_device(device)
    saved = checkpoint.load(checkpoint.find(path))
    features, config = saved.meta.get("features"), saved.meta.get("config", {})
    if not features:
        raise CheckpointError(f"{saved.path} is not a policy that plays a game; give the checkpoint of one")
    try:
        game(features["game"]).eyes(features)
        policy = ControllerPolicy(read(PolicyConfig, config["model"], "model"))
        policy.load_state_dict(saved.group("model"))
        window = read(WindowSpec, config["window"], "window")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, RidgelineError) as error:
        raise CheckpointError(f"{saved.path} cannot play here: {error}") from error
    check_cache(cache, policy.config.decoder)
    return Player(policy.eval().to(where), features["game"], features, window, where, cache)


def check_cache(cache: str, decoder: DecoderConfig) -> None:
    """Refuse a cache that does not exist, or that the decoder cannot have.

    Raises:
        ConfigError: no such cache.
        UnsupportedError: it cannot roll.
    """
    if cache not in CACHES:
        raise ConfigError(nearest(cache, CACHES, "cache"))
    if cache == "rolling" and decoder.positions == "learned":
        raise UnsupportedError("learned positions end with the context, so their cache cannot roll; use cache exact")


def find_device(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: no such kind of device.
        UnsupportedError: it is not there.
    """
    if not DEVICE.fullmatch(name):
        raise ConfigError(f"unknown device {name!r}; use cpu, cuda or cuda:N")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():  # PyTorch would wrap a large index around
        raise UnsupportedError(f"there is no GPU for device {name}; use device cpu")
    return torch.device(name)
