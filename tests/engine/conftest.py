from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from engine.helpers import LANGUAGE, POLICY, language_batch, policy_batch
from ridgeline.models import build


@pytest.fixture(params=["language", "policy"])
def task(request: pytest.FixtureRequest) -> tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]]]:
    """A function that builds a model of the package, and one that makes its batches."""
    config, batch = {"language": (LANGUAGE, language_batch), "policy": (POLICY, policy_batch)}[request.param]
    return lambda: build(config, impl="reference", seed=3), batch
