"""What a step leaves behind and takes up: resuming, other precisions, states of something else."""

from __future__ import annotations

import pytest
import torch

from engine.helpers import LANGUAGE, SETTINGS, language_batch, strange_step
from engine.recorder import Recorder
from ridgeline.engine import LossScale, TrainStep
from ridgeline.errors import CheckpointError
from ridgeline.models import build


def test_resuming_in_the_middle_changes_nothing():
    straight = TrainStep(build(LANGUAGE, impl="reference", seed=3), optimizer=SETTINGS, steps=12, precision="bf16")
    first = TrainStep(build(LANGUAGE, impl="reference", seed=3), optimizer=SETTINGS, steps=12, precision="bf16")
    for i in range(12):
        straight(language_batch(i))
    for i in range(5):
        first(language_batch(i))
    weights, state = first.model.state_dict(), first.state_dict()
    model = build(LANGUAGE, impl="reference", seed=99)
    second = TrainStep(model, optimizer=SETTINGS, steps=12, precision="bf16", capture=Recorder())
    model.load_state_dict(weights)
    second.load_state_dict(state)
    for i in range(5, 12):
        second(language_batch(i))
    assert torch.equal(straight.flat.masters, second.flat.masters)
    assert [m.loss for m in second.metrics(5)] == [m.loss for m in straight.metrics(5)]


@pytest.mark.parametrize(("first", "then"), [("fp16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_a_loss_scale_stays_in_its_precision(first, then):
    """What one precision has learnt another goes on with; a scale that it has not, or has anew, is no factor."""
    steps = [strange_step(precision=precision, scale=LossScale(start=256.0)) for precision in (first, then)]
    for number in range(3):
        steps[0](language_batch(number))
    steps[1].model.load_state_dict(steps[0].model.state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    for step in steps:
        step(language_batch(3))
    a, b = (step.metrics(3)[0] for step in steps)
    assert a.norm == pytest.approx(b.norm, rel=0.05)
    assert float(steps[1].update.loss_scale) == (256.0 if then == "fp16" else 1.0)


@pytest.mark.parametrize("name", ["first.attn.weight", "second.wte.weight", "skipped"])
def test_a_state_that_does_not_fit_changes_nothing(name):
    trained, step = strange_step(), strange_step()
    trained(language_batch())
    before = [tensor.clone() for tensor in step.update.state()]
    with pytest.raises(CheckpointError, match=r"moment of (attn|wte)|skipped of .* has 5 numbers"):
        step.load_state_dict(trained.state_dict() | {name: torch.ones(5)})
    assert all(torch.equal(tensor, old) for tensor, old in zip(step.update.state(), before, strict=True))
