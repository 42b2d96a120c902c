"""The fused blocks under the step: gradients in their sinks, masks by global sample, lanes and parts."""

from __future__ import annotations

import pytest

from engine.helpers import LANGUAGE, POLICY, language_batch, policy_batch
from ridgeline.engine import TrainStep
from ridgeline.models import build


@pytest.mark.parametrize(("config", "make"), [(LANGUAGE, language_batch), (POLICY, policy_batch)])
def test_fused_blocks_train_as_the_reference_does(config, make):
    reference = TrainStep(build(config, impl="reference", seed=3), precision="fp32")
    fused = TrainStep(build(config, impl="fused", seed=3), precision="fp32", lanes=2, accumulate=2)
    for i in range(2):
        reference(make(i))
        fused(make(i))
    for a, b in zip(reference.metrics(), fused.metrics(), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert b.norm == pytest.approx(a.norm, rel=1e-4)
