"""Gradients that ops write themselves, beside those that autograd gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.engine import FlatParameters, TrainStep
from ridgeline.ops.sink import sink_of


class _Product(torch.autograd.Function):
    """A linear layer that writes its weight's gradient past autograd where it can."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.saved = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved
        gradient, sink = dy.float().t() @ x.float(), sink_of(weight)
        if sink is None:
            return dy @ weight, gradient.to(weight.dtype)
        target, add = sink.take()
        target.add_(gradient) if add else target.copy_(gradient)
        return dy @ weight, None


class Net(nn.Module):
    """One weight used twice by the op, one used by the op and by autograd, one by autograd alone, one not at all."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.both, self.plain, self.spare = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))
        self.product = _Product.apply if sinks else nn.functional.linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(self.product(x, self.twice).tanh(), self.twice)
        y = self.product(y, self.both).tanh() + x @ self.both
        return (y @ self.plain).square().mean()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


@pytest.mark.parametrize("cut", [{}, {"accumulate": 2}, {"lanes": 2}, {"accumulate": 2, "lanes": 2}])
def test_written_and_given_gradients_add_up(cut):
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    steps = [TrainStep(Net(sinks), loss, precision="fp32", **cut) for sinks in (False, True)]
    for _ in range(3):
        for step in steps:
            step(batch)
    a, b = (step.flat for step in steps)
    torch.testing.assert_close(a.masters, b.masters)
    for x, y in zip(steps[0].metrics(), steps[1].metrics(), strict=True):
        assert x.norm == pytest.approx(y.norm, rel=1e-5)


def test_a_sink_keeps_what_bf16_would_round():
    def train(sinks: bool) -> Tensor:
        step = TrainStep(Net(sinks), loss, precision="bf16")
        step.update = lambda loss: None  # keep the gradient
        step(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
        return step.flat.views(step.flat.grad)["twice"].clone()

    assert not torch.equal(train(True), train(True).bfloat16().float())
    assert torch.equal(train(False), train(False).bfloat16().float())


def test_weights_without_an_engine_have_no_sink():
    weight = nn.Parameter(torch.zeros(2, 2))
    assert sink_of(weight) is None
    model = nn.Linear(2, 2)
    flat = FlatParameters(model, compute=torch.bfloat16)
    assert sink_of(model.weight) is None
    with flat.swapped():
        sink = sink_of(model.weight)
        assert sink is not None
        assert sink.target.dtype == torch.float32
