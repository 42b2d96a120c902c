"""What a model does beside its gradients: state on the host, buffers and weights that it writes, shared memory."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.helpers import language_batch, strange_step, stranger, stranger_loss
from engine.recorder import Recorder
from ridgeline.engine import TrainStep
from ridgeline.errors import ConfigError, UnsupportedError


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_on(model: nn.Module, **rest) -> TrainStep:
    return TrainStep(model, rest.pop("loss", squares), **{"precision": "fp32", **rest})


class Counting(nn.Linear):
    """Anneals its output by a number of its own."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


@pytest.mark.parametrize(
    ("model", "draw", "message"),
    [
        (Counting(), lambda: 1.0, r"Counting\.calls changes with every call on the host"),
        (nn.Linear(4, 1), random.random, "draws random numbers on the host"),
        (nn.Linear(4, 1), np.random.rand, "draws random numbers on the host"),
    ],
)
def test_what_a_capture_would_freeze_is_refused(model, draw, message):
    def loss(model, x):
        return squares(model, x) * draw()

    step = step_on(model, loss=loss, capture=Recorder())
    before = step.flat.masters.clone()
    with pytest.raises(UnsupportedError, match=message):
        step(torch.ones(4, 4))
    assert step.taken == 0
    assert torch.equal(step.flat.masters, before)
    free = step_on(nn.Linear(4, 1), loss=loss, capture=False)
    for _ in range(2):
        free(torch.ones(4, 4))
    assert free.taken == 2


class Running(nn.Module):
    """Keeps a mean of what it sees: in place, by a new tensor, or by writing what is there already."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        x = self.linear(x)
        mean = x.detach().mean(0)
        self.seen += 1
        if self.way == "new":
            self.mean = mean
        elif self.way == "same":
            self.mean.zero_()
        elif self.way == "data":
            self.mean.data.copy_(mean)
        else:
            self.mean.copy_(mean)
        return x


@pytest.mark.parametrize("way", ["new", "same", "data", "in place"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16", "capture": False}, r"Running\.mean, which bf16 replaces by copies"),
        ({"precision": "bf16", "capture": Recorder()}, r"Running\.mean, which bf16 replaces by copies"),
        ({"lanes": 2}, r"Running\.mean.*lanes would do at the same time; use lanes=1"),
    ],
)
def test_buffers_that_a_forward_pass_writes(settings, message, way):
    step = step_on(Running(way), **settings)
    with pytest.raises(UnsupportedError, match=r"place of buffer Running\.mean" if way == "new" else message):
        step(torch.randn(8, 4))
    assert step.taken == 0
    assert not step.model.mean.any()
    assert step.model.seen == 0
    step.check()


def test_a_replaced_buffer_is_refused_where_a_capture_would_lose_it():
    with pytest.raises(UnsupportedError, match="in place"):
        step_on(Running("new"), capture=Recorder())(torch.randn(8, 4))
    for way in ("new", "in place"):
        free = step_on(Running(way), capture=False)
        for _ in range(2):
            free(torch.randn(8, 4))
        assert free.model.mean.any()
    step = step_on(Running("in place"), capture=Recorder())
    step(torch.randn(8, 4))
    step.check()
    step.model.mean = torch.zeros(4)
    with pytest.raises(ConfigError, match=r"buffer Running\.mean was replaced"):
        step.check()


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"lanes": 2}])
def test_weights_that_a_forward_pass_writes(settings):
    def loss(model, ids):
        return model(ids).square().mean()

    def model():
        return nn.Embedding(5, 4, max_norm=0.5)

    with pytest.raises(UnsupportedError, match=r"writes to Embedding\.weight"):
        step_on(model(), loss=loss, **settings)(torch.arange(4))
    alone = step_on(model(), loss=loss)
    alone(torch.arange(5))
    alone(torch.arange(5))
    assert alone.model.weight.norm(dim=1).max() < 0.6


def test_a_buffer_without_a_number_is_not_taken_for_a_written_one():
    model = nn.Linear(4, 1)
    model.register_buffer("unset", torch.tensor([float("nan")]))
    step = step_on(model, precision="bf16")
    step(torch.ones(4, 4))
    assert step.taken == 1


def test_a_parameter_outside_the_model_is_told(caplog):
    outside, other = nn.Linear(1, 1), step_on(nn.Linear(1, 1))

    def loss(model, x):
        return outside(model(x)).mean()

    with caplog.at_level(logging.WARNING, logger="ridgeline.engine"):
        step = step_on(nn.Linear(4, 1), loss=loss, accumulate=2)
        step(torch.ones(4, 4))
        step(torch.ones(4, 4))
        told = sorted(record.getMessage().split(" that")[0] for record in caplog.records)
        assert told == [f"the loss reads a parameter of shape {shape}" for shape in ("(1, 1)", "(1,)")]
        caplog.clear()
        for frozen in outside.parameters():
            frozen.requires_grad_(False)
        step_on(nn.Linear(4, 1), loss=loss)(torch.ones(4, 4))
        adversary = step_on(nn.Linear(4, 1), loss=lambda model, x: other.model(model(x)).mean())
        adversary(torch.ones(4, 4))  # another step trains it
    assert not caplog.records


def shared_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


def shared_turned() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data.t()
    return model


def shared_by_a_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("part", model.weight.detach()[1:2])
    return model


@pytest.mark.parametrize("make", [shared_by_data, shared_turned, shared_by_a_buffer])
def test_memory_that_two_tensors_share_is_refused(make):
    with pytest.raises(ConfigError, match=r"share memory.*module\.weight = other\.weight"):
        step_on(make())


def test_memory_that_processes_share_is_refused():
    with pytest.raises(
        ConfigError, match=r"weight lies in memory that processes share.*share_memory\(\) when the step is built"
    ):
        step_on(nn.Linear(4, 4).share_memory())


def test_memory_side_by_side_is_not_shared():
    whole = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for index, module in enumerate(model):
        module.weight.data = whole[4 * index : 4 * index + 4]
    model.register_buffer("mask", torch.ones(1, 4).expand(4, 4))
    step_on(model)(torch.ones(4, 4))


def test_the_model_is_lent_to_one_step_at_a_time():
    step = strange_step(precision="bf16")
    step(language_batch())
    with step.weights():
        for use in (step, lambda _: step.model.load_state_dict(stranger().state_dict())):
            with pytest.raises(ConfigError, match=r"inside weights\(\)"):
                use(language_batch())
    nested = strange_step()

    def loss(model, batch):
        nested(batch)
        return stranger_loss(model, batch)

    nested._user_loss = loss
    with pytest.raises(ConfigError, match="a loss or another thread"):
        nested(language_batch())
