"""What the tests of playing share."""

import dataclasses

import pytest

from ridgeline import checkpoint
from ridgeline.data.window import WindowSpec
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.policy import policy_config
from ridgeline.models import ControllerPolicy, DecoderConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint's folder, its policy, untrained, and its meta."""
    config = policy_config(DecoderConfig(layers=1, width=32, heads=2, context=8))
    policy = ControllerPolicy(config, seed=0)
    meta = {
        "config": {"model": dataclasses.asdict(config), "window": dataclasses.asdict(WindowSpec(context=8))},
        "features": GAME.features(),
    }
    path = tmp_path_factory.mktemp("run") / "best"
    checkpoint.save(path, checkpoint.join(model=policy.state_dict()), meta)
    return path, policy, meta


@pytest.fixture(autouse=True)
def usual_rounds():
    """Whatever round a test had played instead is gone after it."""
    yield
    GAME.__dict__.pop("environment", None)
