"""Backward passes that keep what they need outside autograd's care say so when they cannot be right."""

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops.heads import HeadWeights, heads_losses
from ridgeline.ops.kept import Kept
from ridgeline.ops.norm import norm
from ridgeline.ops.policy_heads import HeadWeights as PolicyHead
from ridgeline.ops.policy_heads import policy_heads

pytest.importorskip("triton")


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


HEAD = ((8,), (8,), (4, 8), (4,), (5, 4), (5,))


def test_spent_or_changed() -> None:
    weight = torch.ones(3)
    once, again = Kept(weight, None, spends=True), Kept(weight, spends=False)
    again.demand()
    again.demand()
    once.demand()
    with pytest.raises(UnsupportedError, match="differentiated once a forward pass"):
        once.demand()
    weight.add_(1)
    with pytest.raises(UnsupportedError, match="changed in place"):
        again.demand()
    with torch.inference_mode():
        Kept(torch.ones(3), spends=True).demand()  # such tensors count no changes


@pytest.mark.parametrize("kind", ["policy", "sequential"])
def test_heads_notice_that_a_weight_has_changed(kind: str) -> None:
    x, *weights = leaves((6, 8), *HEAD)
    targets = torch.randint(5, (6, 1))
    if kind == "policy":
        losses = policy_heads(x, [PolicyHead(*weights)], targets, impl="triton")
    else:
        losses = heads_losses(x, [HeadWeights(*weights)], targets, impl="triton")
    with torch.no_grad():
        weights[2].mul_(2)
    with pytest.raises(UnsupportedError, match="changed in place"):
        losses.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    x, weight = leaves((3, 8), (8,))
    (slope,) = torch.autograd.grad((norm(x, weight, impl="triton") * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()
