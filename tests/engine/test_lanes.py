"""The number of lanes is what a measurement says."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from engine.helpers import LANGUAGE, Stranger, language_batch, stranger_loss
from ridgeline.engine import TrainStep, choose_lanes
from ridgeline.errors import OutOfMemoryError
from ridgeline.models import build


@pytest.mark.parametrize("slow", [1, 2])
def test_the_faster_number_wins_and_what_does_not_divide_is_left_out(slow):
    def make(lanes: int) -> TrainStep:
        def loss(model, batch):
            if lanes == slow:
                time.sleep(0.01)
            return stranger_loss(model, batch)

        return TrainStep(Stranger(), loss, precision="fp32", lanes=lanes)

    times = choose_lanes(make, language_batch(batch=4), (1, 2, 3))
    assert min(times, key=times.get) == 3 - slow
    assert times.keys() == {1, 2}


def test_lanes_that_find_no_memory_are_left_out():
    class Full(TrainStep):
        def __call__(self, batch):
            if self.cut.lanes > 1:
                raise OutOfMemoryError("out of memory")
            super().__call__(batch)

    def make(lanes):
        return Full(build(LANGUAGE, impl="reference", seed=3), precision="fp32", lanes=lanes)

    assert choose_lanes(make, language_batch(batch=4)).keys() == {1}
    with pytest.raises(OutOfMemoryError):
        choose_lanes(make, language_batch(batch=4), (2,))


def test_lanes_that_a_model_cannot_be_trained_in_are_left_out():
    def make(lanes):
        return TrainStep(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), mean, precision="fp32", lanes=lanes)

    def mean(model, x):
        return model(x).square().mean()

    assert choose_lanes(make, torch.randn(4, 3)).keys() == {1}
