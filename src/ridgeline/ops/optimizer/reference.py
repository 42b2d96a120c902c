"""Clip to a global norm, then AdamW, over flat buffers: the specification.

Exactly `torch.nn.utils.clip_grad_norm_(…, max_norm)` followed by `torch.optim.AdamW`, with two additions: a step whose
norm is not finite changes nothing but the count of skipped steps, and everything that changes from step to step is
read from tensors, so that a captured step stays right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import ConfigError

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """What stays the same over a run.

    Attributes:
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        eps: added to the root of the second moment.
        max_norm: gradients are scaled down to this global norm; infinity for no clipping.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    eps: float = 1e-8
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta_1", "beta_2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("eps", "max_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


class AdamWState(NamedTuple):
    """The flat buffers (M elements each) and the counters of an optimiser, all on one device.

    Attributes:
        weights: fp32 master weights.
        gradient: fp32 gradient.
        moment_1: fp32 first moment.
        moment_2: fp32 second moment.
        decay: fp32[K], weight decay of each of K equal granules of the M elements (K divides M).
        copy: bf16 or fp16 copy of the weights that the model computes with, or None.
        learning_rate: fp32[1].
        counters: int64[2]: updates applied so far, steps skipped so far.
        norm: fp32[1], written by each step: the gradient's norm before clipping.
        gradient_scale: fp32[1], what the gradient is to be multiplied by before anything else (the inverse of a loss
            scale), or None for 1.
    """

    weights: Tensor
    gradient: Tensor
    moment_1: Tensor
    moment_2: Tensor
    decay: Tensor
    copy: Tensor | None
    learning_rate: Tensor
    counters: Tensor
    norm: Tensor
    gradient_scale: Tensor | None = None


def adamw_reference(state: AdamWState, settings: AdamWSettings) -> None:
    """One step in plain torch, in place."""
    gradient_M = state.gradient
    if state.gradient_scale is not None:
        gradient_M = gradient_M * state.gradient_scale
    norm = torch.linalg.vector_norm(gradient_M)
    state.norm.copy_(norm)
    if not torch.isfinite(norm):
        state.counters[1] += 1
        return
    state.counters[0] += 1
    gradient_M = gradient_M * (settings.max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    step, rate = int(state.counters[0]), float(state.learning_rate)
    decay_M = state.decay.repeat_interleave(state.weights.numel() // state.decay.numel())
    state.weights.mul_(1 - rate * decay_M)
    state.moment_1.lerp_(gradient_M, 1 - settings.beta_1)
    state.moment_2.mul_(settings.beta_2).addcmul_(gradient_M, gradient_M, value=1 - settings.beta_2)
    correction_1, correction_2 = 1 - settings.beta_1**step, 1 - settings.beta_2**step
    denominator_M = (state.moment_2.sqrt() / correction_2**0.5).add_(settings.eps)
    state.weights.addcdiv_(state.moment_1, denominator_M, value=-rate / correction_1)
    if state.copy is not None:
        state.copy.copy_(state.weights)
