"""The second half of a step over flat buffers: norm, clip, AdamW, counters and loss scale. The specification.

On gradients that are a mean already, exactly `torch.nn.utils.clip_grad_norm_` followed by `torch.optim.AdamW`. With
three additions: a step whose loss or norm is not finite changes no weight and no moment; the gradient may carry a loss
scale and a sum of sample weights, which are divided out; and all that changes from step to step is read from tensors
and written to tensors, so that a captured step stays right.
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
        weight_decay: decoupled, of the weights before the state's boundary.
        max_norm: the gradient is scaled down to this global norm; infinity for no clipping.
        growth: factor of the loss scale after `interval` finite steps in a row.
        backoff: factor of the loss scale after a step that was not finite.
        interval: steps.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name in ("beta_1", "beta_2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("eps", "max_norm", "growth", "backoff", "interval"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must not be negative, got {self.weight_decay}")


class AdamWState(NamedTuple):
    """The flat buffers (M elements) and the counters of an optimiser, all on one device.

    Attributes:
        weights: fp32[M], the master weights.
        gradient: fp32[≥ M].
        moment_1: fp32[M]. `moment_2`: fp32[M − start].
        copy: bf16 or fp16[M], the weights that the model computes with; None where those are the masters.
        boundary: elements before the first weight without decay.
        rates: fp32[R], the learning rate of each step; the last one holds from then on.
        seed_step: int64[2], the run's seed and the number of steps taken, skipped ones included.
        applied: fp32[1], updates applied (AdamW's t).
        skipped: int64[2], steps skipped in all, and in a row until now.
        ring: fp32[Q, 4], row `step mod Q` receives loss, norm before clipping, learning rate, 1 if skipped.
        loss: fp32[1], the step's loss.
        weight: fp32[1], divides gradient and loss (sum of sample weights), or None for 1.
        loss_scale: fp32[1], divides the gradient, or None for 1.
        growth: int32[1], finite steps since the scale last changed; None for a scale that stays.
        start: elements before the first weight that AdamW updates; the norm and the clipping are of all gradients.
    """

    weights: Tensor
    gradient: Tensor
    moment_1: Tensor
    moment_2: Tensor
    copy: Tensor | None
    boundary: int
    rates: Tensor
    seed_step: Tensor
    applied: Tensor
    skipped: Tensor
    ring: Tensor
    loss: Tensor
    weight: Tensor | None = None
    loss_scale: Tensor | None = None
    growth: Tensor | None = None
    start: int = 0


class KnownSquares(NamedTuple):
    """What is known of the gradient's squares before the step.

    Attributes:
        partials: fp32[P], which add up to the sum of squares of all gradients outside `rest`.
        rest: (first, end) of the elements whose squares are not among them; what lies between is zero or known.
    """

    partials: Tensor
    rest: tuple[tuple[int, int], ...]


def adamw_reference(state: AdamWState, settings: AdamWSettings) -> None:
    """One step in plain torch, in place; waits for the device."""
    step, M = int(state.seed_step[1]), state.weights.numel()
    rate = float(state.rates[min(step, len(state.rates) - 1)])
    loss, divisor = state.loss.clone(), torch.ones_like(state.loss)
    for factor in (state.weight, state.loss_scale):
        divisor = divisor if factor is None else divisor * factor
    if state.weight is not None:
        loss = loss / state.weight
    gradient_M = state.gradient[:M] / divisor
    norm = torch.linalg.vector_norm(gradient_M)
    finite = bool(torch.isfinite(norm + loss))
    state.ring[step % len(state.ring)] = torch.stack(
        [*loss, norm, state.rates.new_tensor(rate), 1 - finite * norm.new_ones(())]
    )
    if finite:
        state.applied.add_(1)
        _update(state, settings, gradient_M * (settings.max_norm / (norm + CLIP_EPS)).clamp(max=1.0), rate)
    state.skipped[0] += not finite
    state.skipped[1] = 0 if finite else state.skipped[1] + 1
    if state.loss_scale is not None and state.growth is not None:
        found = torch.full_like(state.loss, float(not finite))
        torch._amp_update_scale_(
            state.loss_scale, state.growth, found, settings.growth, settings.backoff, settings.interval
        )
    state.seed_step[1] += 1


def _update(state: AdamWState, settings: AdamWSettings, gradient_M: Tensor, rate: float) -> None:
    step = float(state.applied)
    start, gradient = state.start, gradient_M[state.start :]
    weights, moment_1, moment_2 = state.weights[start:], state.moment_1[start:], state.moment_2
    state.weights[start : state.boundary].mul_(1 - rate * settings.weight_decay)
    moment_1.lerp_(gradient, 1 - settings.beta_1)
    moment_2.mul_(settings.beta_2).addcmul_(gradient, gradient, value=1 - settings.beta_2)
    correction_1, correction_2 = 1 - settings.beta_1**step, 1 - settings.beta_2**step
    denominator = (moment_2.sqrt() / correction_2**0.5).add_(settings.eps)
    weights.addcdiv_(moment_1, denominator, value=-rate / correction_1)
    if state.copy is not None:
        state.copy[start:].copy_(weights)
