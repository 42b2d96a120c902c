"""Muon's passes over the flat buffers before and after its orthogonalisation; the specification and the choice.

    before   m ← m + (1 − μ)(g − m),  u = g + μ(m − g)       g the clipped gradient, u in bf16
    after    w ← (1 − rate · decay) w − rate · o             o the orthogonalised u, and w's 16-bit copy

A step that does not count changes neither m nor w. All numbers that change from step to step are tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MuonState(NamedTuple):
    """The flat buffers of the weights that Muon trains (M elements) and a step's numbers, all on one device.

    Attributes:
        weights: fp32[M].
        gradient: fp32[M].
        momentum: fp32[M].
        direction: bf16[M], receives u, and then holds the orthogonalised one.
        copy: bf16 or fp16[M], the weights that the model computes with; None where those are the masters.
        coefficient: fp32[1], what the gradient is multiplied by.
        rate: fp32[1], the learning rate.
        counts: fp32[1], 1 where the step counts, 0 where it changes nothing.
    """

    weights: Tensor
    gradient: Tensor
    momentum: Tensor
    direction: Tensor
    copy: Tensor | None
    coefficient: Tensor
    rate: Tensor
    counts: Tensor


def muon_before(state: MuonState, momentum: float) -> None:
    """The momentum's step, and the direction to orthogonalise."""
    g_M = state.gradient * state.coefficient
    m_M = state.momentum.lerp(g_M, 1 - momentum)
    state.direction.copy_(g_M.lerp(m_M, momentum))
    state.momentum.copy_(torch.where(state.counts > 0, m_M, state.momentum))


def muon_after(state: MuonState, weight_decay: float) -> None:
    """The weights' step along the orthogonalised direction."""
    w_M = state.weights * (1 - state.rate * weight_decay) - state.rate * state.direction
    state.weights.copy_(torch.where(state.counts > 0, w_M, state.weights))
    if state.copy is not None:
        state.copy.copy_(state.weights)
