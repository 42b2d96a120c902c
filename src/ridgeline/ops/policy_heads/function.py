"""The policy heads as one autograd function, whose weight gradients go to sinks where there are some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops.kept import Kept
from ridgeline.ops.policy_heads import hopper, launch
from ridgeline.ops.policy_heads.reference import HeadWeights
from ridgeline.ops.sink import GradientSink, sink_of

FIELDS = len(HeadWeights._fields)


def _heads(flat: tuple[Tensor, ...]) -> list[HeadWeights]:
    return [HeadWeights(*flat[start : start + FIELDS]) for start in range(0, len(flat), FIELDS)]


class PolicyHeads(torch.autograd.Function):
    """Losses (K,) of x (N, C), targets (N, K), the norms' eps and the heads' weights, one head after the other.

    `cuda`: what a backward pass follows goes through the Hopper kernel.
    """

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, targets_NK: Tensor, eps: float, cuda: bool, *flat: Tensor) -> Tensor:
        heads, x_NC = _heads(flat), x_NC.contiguous()
        gradient = any(ctx.needs_input_grad)
        cuda = cuda and gradient
        plan = launch.layout_of(heads, hopper.STEP) if cuda else launch.layout_of(heads)
        packed = launch.pack(plan, heads)
        if cuda:
            passed = hopper.forward(plan, packed, heads, x_NC, targets_NK, eps=eps)
        else:
            passed = launch.forward(plan, packed, heads, x_NC, targets_NK, eps=eps, gradient=gradient)
        ctx.plan, ctx.packed, ctx.passed, ctx.x_NC, ctx.flat = plan, packed, passed, x_NC, flat
        ctx.kept = Kept(x_NC, *flat, spends=False)
        return launch.losses(plan, passed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_K: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.demand()
        plan, passed, x_NC = ctx.plan, ctx.passed, ctx.x_NC
        dx_NC, factors = launch.state_gradient(plan, ctx.packed, passed, x_NC, dlosses_K.contiguous())
        state_WC = launch.product(passed.q_NW, x_NC)
        if isinstance(passed.rest, Tensor):
            products = hopper.narrow_products(plan, passed.rest)
        else:
            products = launch.head_products(plan, passed.q_NW, passed.rest)
        gradients: list[Tensor | None] = []
        for place, head, mine in zip(plan.heads, _heads(ctx.flat), products, strict=True):
            sinks = [sink for sink in map(sink_of, head) if sink is not None]
            targets, add, own = _targets(head, sinks)
            launch.weight_gradients(plan, place, head, state_WC, mine, passed.sums, factors, targets, add=add)
            for sink in [] if own else sinks:
                sink.finished()
            gradients += targets if own else [None] * FIELDS
        return dx_NC, None, None, None, *gradients


def _targets(head: HeadWeights, sinks: list[GradientSink]) -> tuple[HeadWeights, bool, bool]:
    """Where a head's gradients go, whether to add to what is there, and whether autograd is to have them."""
    if len(sinks) < FIELDS:
        return HeadWeights(*(torch.empty_like(weight) for weight in head)), False, True
    taken = [sink.take() for sink in sinks]
    return HeadWeights(*(target for target, _ in taken)), taken[0][1], False
