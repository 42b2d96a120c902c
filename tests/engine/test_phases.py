"""Phases are measured where they happen; none is a share of a total."""

from __future__ import annotations

import time

import pytest
import torch

from engine.helpers import LANGUAGE, Stranger, language_batch, stranger_loss
from ridgeline.engine import TrainStep
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig
from ridgeline.train.step import TorchStep

NAP = 0.03


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(NAP)
        return gradient


def slow(where: str):
    def loss(model, batch):
        if where == "forward":
            time.sleep(NAP)
        value = stranger_loss(model, batch)
        return _SlowBackward.apply(value) if where == "backward" else value

    return loss


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_slow_phase_shows_where_it_is(where):
    step = TrainStep(Stranger(), slow(where), precision="fp32")
    if where == "optimizer":
        update = step.update._run
        step.update._run = lambda loss: (time.sleep(NAP), update(loss))
    phases = step.phases(language_batch(), steps=3)
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert phases[where] > 1e3 * NAP
    assert all(value < 1e3 * NAP for name, value in phases.items() if name != where)


def test_measuring_changes_no_state():
    step = TrainStep(Stranger(), stranger_loss, precision="bf16")
    step(language_batch())
    before = [tensor.clone() for tensor in step.update.state()]
    step.phases(language_batch(1), steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, step.update.state(), strict=True))


def test_parts_are_summed_and_lanes_are_one_phase():
    parts = TrainStep(Stranger(), slow("forward"), precision="fp32", accumulate=2).phases(language_batch(), steps=1)
    assert parts["forward"] > 2e3 * NAP
    lanes = TrainStep(Stranger(), stranger_loss, precision="fp32", lanes=2).phases(language_batch(), steps=1)
    assert list(lanes) == ["forward and backward", "optimizer"]


def test_pytorchs_own_step_is_measured_alike():
    step = TorchStep(build(LANGUAGE, seed=0), OptimizerConfig(), steps=None, precision="fp32")
    phases = step.phases(language_batch(), steps=2)
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert all(value > 0 for value in phases.values())
