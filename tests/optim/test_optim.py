import math

import pytest
import torch
from torch import nn

from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.optim import (
    OptimizerConfig,
    build_adamw,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    set_learning_rate,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.norm(self.table(tokens)))


def test_groups_by_dimension_list_shared_once_and_frozen_never():
    decayed, plain = parameter_groups(Tied(), 0.1)
    assert decayed["names"] == ["table.weight"]
    assert decayed["weight_decay"] == 0.1
    assert plain["names"] == ["norm.weight", "norm.bias"]
    assert plain["weight_decay"] == 0.0


def test_schedule_warms_up_then_follows_the_cosine_to_the_floor():
    config = OptimizerConfig(lr=1.0, floor=0.1, warmup=10)
    assert learning_rate(config, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(config, 4, 0.0) == pytest.approx(0.5)
    assert learning_rate(config, 10, 0.0) == 1.0
    assert learning_rate(config, 500, 0.5) == pytest.approx(0.55)
    assert learning_rate(config, 1000, 1.0) == pytest.approx(0.1)
    assert learning_rate(config, 2000, 3.0) == pytest.approx(0.1)
    assert learning_rate(OptimizerConfig(lr=1.0), 0, 0.25) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def advance(model, optimizer, steps):
    for step in range(steps):
        set_learning_rate(optimizer, 0.01 / (step + 1))
        loss = model(torch.arange(5)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def settings():
    return {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def test_a_stable_phase_puts_the_decay_off():
    """Full rate up to the given share of the run, then the cosine over what is left of it."""
    config = OptimizerConfig(lr=1e-3, floor=1e-4, warmup=10, stable=0.8)
    assert learning_rate(config, 4, 0.04) == pytest.approx(5e-4)
    assert learning_rate(config, 50, 0.5) == learning_rate(config, 80, 0.8) == 1e-3
    assert learning_rate(config, 90, 0.9) == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert learning_rate(config, 100, 1.0) == pytest.approx(1e-4)


def test_state_by_name_continues_to_the_bit():
    torch.manual_seed(0)
    model = Tied()
    optimizer = build_adamw(model, **settings())
    advance(model, optimizer, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = {name: value.clone() for name, value in optimizer_tensors(optimizer).items()}
    advance(model, optimizer, 2)

    other = Tied()
    other.load_state_dict(weights)
    again = build_adamw(other, **settings())
    load_optimizer_tensors(again, saved)
    advance(other, again, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for name, value in optimizer_tensors(optimizer).items():
        assert torch.equal(value, optimizer_tensors(again)[name]), name


def test_state_before_the_first_step():
    model = Tied()
    fresh = optimizer_tensors(build_adamw(model, **settings()))
    assert set(fresh) == {"applied"}
    load_optimizer_tensors(build_adamw(model, **settings()), fresh)


def test_state_of_another_model_is_refused():
    model = Tied()
    optimizer = build_adamw(model, **settings())
    advance(model, optimizer, 1)
    saved = optimizer_tensors(optimizer)
    saved["first.table.weight"] = torch.zeros(6, 4)
    with pytest.raises(CheckpointError, match=r"table.weight should have shape \[5, 4\], got shape \[6, 4\]"):
        load_optimizer_tensors(build_adamw(model, **settings()), saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive"),
        ({"lr": 1e-3, "floor": 1e-2}, "floor must be between"),
        ({"warmup": -1}, "warmup must be 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"stable": 1.0}, "stable must be in"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": math.nan}, "eps must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"weight_decay": math.inf}, "weight_decay must be 0 or more"),
        ({"clip": math.nan}, "clip must be 0 or more"),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**values)
