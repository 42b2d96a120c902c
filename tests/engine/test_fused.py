"""The fused blocks under the step: gradients in their sinks, masks by global sample, lanes and parts."""

from __future__ import annotations

import pytest
import torch

from engine.helpers import LANGUAGE, POLICY, language_batch, policy_batch
from ridgeline.engine import TrainStep
from ridgeline.errors import DivergedError
from ridgeline.models import build


@pytest.mark.parametrize(
    ("config", "make", "cut"),
    [
        (LANGUAGE, language_batch, {"lanes": 2, "accumulate": 2}),
        pytest.param(POLICY, policy_batch, {"lanes": 2}, marks=pytest.mark.slow),
    ],
)
def test_fused_blocks_train_as_the_reference_does(config, make, cut):
    reference = TrainStep(build(config, impl="reference", seed=3), precision="fp32")
    fused = TrainStep(build(config, impl="fused", seed=3), precision="fp32", **cut)
    reference(make())
    fused(make())
    (a,), (b,) = reference.metrics(), fused.metrics()
    assert b.loss == pytest.approx(a.loss, rel=1e-5)
    assert b.norm == pytest.approx(a.norm, rel=1e-4)
    torch.testing.assert_close(fused.flat.grad[: fused.flat.size], reference.flat.grad[: fused.flat.size])


def test_the_first_bad_tensor_is_named_by_the_reference():
    step = TrainStep(build(LANGUAGE, impl="fused", seed=3), precision="fp32", bad_steps=1)
    with torch.no_grad():
        step.model.decoder.blocks[0].mlp.up.weight[0, 0] = float("nan")
    step(language_batch())
    with pytest.raises(DivergedError, match=r"first bad tensor: output of decoder\.blocks\.0\.mlp\.up;"):
        step.check()
    assert step.model.decoder.impl == "fused"
