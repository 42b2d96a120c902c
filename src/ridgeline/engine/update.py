"""The second half of a step: norm, clip, AdamW or Muon, schedule, loss scale, counters, with nothing on the host.

Every number that changes from step to step lives in a tensor on the model's device, so that a captured step is as
right at its ten-thousandth replay as at its first. A step whose loss or gradient is not finite changes no weight
and no moment: the decision is taken on the device, and counted there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.muon import MuonUpdate
from ridgeline.errors import CheckpointError, ConfigError, UnsupportedError, nearest
from ridgeline.ops._triton.support import demand
from ridgeline.ops.optimizer import IMPLEMENTATIONS, AdamWSettings, AdamWState, available
from ridgeline.optim import OptimizerConfig, learning_rate

RING = 1024  # steps whose loss, norm and rate are kept on the device until the host reads them


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scale of fp16.

    Attributes:
        start: first scale.
        growth: factor after `interval` finite steps in a row.
        backoff: factor after a step that was not finite.
        interval: steps.

    Raises:
        ConfigError: a factor that would not let it grow, fall or be one.
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf:
            raise ConfigError(f"a loss scale starts at a positive, finite number, got {self.start}")
        if not 1 <= self.growth < math.inf or not 0 < self.backoff < 1:
            raise ConfigError(
                f"a loss scale grows by 1 or more and falls by less, got {self.growth} and {self.backoff}"
            )
        if self.interval < 1:
            raise ConfigError(f"a loss scale grows after at least one step, got {self.interval}")


class StepMetrics(NamedTuple):
    """What a step reports: its number from 0, loss, gradient norm before clipping, rate, whether it was skipped."""

    step: int
    loss: float
    norm: float
    lr: float
    skipped: bool


class Update:
    """Optimiser state and the calls that turn a flat gradient into a change of weights.

    Args:
        flat: the buffers it works on.
        config: AdamW or Muon, clipping and schedule.
        steps: length of the schedule; None where the host sets the rate with `set_rate`.
        weighted: divide gradient and loss by the weight in their buffer.
        scale: the loss scale, or None where the loss is not scaled.
        seed: seed of the run, for the dropout masks.
        whole: a step's gradients are what one backward pass wrote: no parts, lanes or processes add to them. Then the
            kernels leave squares of what they write, and the norm reads the other gradients alone.
        impl: "triton" for the two kernels of ops.optimizer, "torch" for PyTorch's operations (about thirty launches);
            None for Triton where the model is on a card that runs it.

    Attributes:
        seed_step: int64[2], the run's seed and the number of steps taken, skipped ones included.
        first: fp32[N], AdamW's first moment, and Muon's momentum where that trains a weight.
        second: fp32[N − start], AdamW's second moment.
        applied: fp32[1], updates applied (AdamW's t).
        skipped: int64[2], steps skipped in all and in a row until now.
        loss_scale: fp32[1], 1 where the loss is not scaled.
    """

    def __init__(
        self,
        flat: FlatParameters,
        config: OptimizerConfig,
        *,
        steps: int | None = None,
        weighted: bool = False,
        scale: LossScale | None = None,
        seed: int = 0,
        whole: bool = False,
        impl: str | None = None,
    ) -> None:
        self.flat, self.config, self.scale, self.steps = flat, config, scale, steps
        self.weighted = weighted
        device = flat.device
        self.first, self.second = torch.zeros_like(flat.masters), torch.zeros_like(flat.masters[flat.start :])
        self.seed_step = torch.tensor([seed, 0], dtype=torch.int64, device=device)
        self.applied = torch.zeros(1, dtype=torch.float32, device=device)
        self.skipped = torch.zeros(2, dtype=torch.int64, device=device)
        self.loss_scale = torch.full((1,), scale.start if scale else 1.0, dtype=torch.float32, device=device)
        self._growth = torch.zeros(1, dtype=torch.int32, device=device)
        rates = [learning_rate(config, step, step / steps) for step in range(steps)] if steps else [config.lr]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.ring = torch.zeros(RING, 4, dtype=torch.float32, device=device)
        if impl is None:
            impl = "triton" if device.type == "cuda" and available("triton", device) is None else "torch"
        if impl not in ("torch", "triton"):
            raise UnsupportedError(nearest(impl, ("torch", "triton"), "implementation of the update"))
        self._muon = MuonUpdate(flat, config, self.first, impl) if flat.start else None
        if whole and impl == "triton":
            flat.lanes[0].ask_for_squares()
        self._run = self._triton() if impl == "triton" else self._torch

    def _triton(self) -> Callable[[Tensor], None]:
        """The update by ops.optimizer's kernels, on this object's own state."""
        demand("triton", IMPLEMENTATIONS, self.flat.device)
        from ridgeline.ops.optimizer.triton import adamw_raw, plan_numbers, workspace

        flat, config, scale = self.flat, self.config, self.scale or LossScale()
        state = AdamWState(
            weights=flat.masters,
            gradient=flat.grad,
            moment_1=self.first,
            moment_2=self.second,
            copy=None if flat.copies is flat.masters else flat.copies,
            boundary=flat.boundary,
            rates=self._rates,
            seed_step=self.seed_step,
            applied=self.applied,
            skipped=self.skipped,
            ring=self.ring,
            loss=flat.lanes[0].loss,
            weight=flat.lanes[0].weight if self.weighted else None,
            loss_scale=self.loss_scale if self.scale else None,
            growth=self._growth if self.scale else None,
            start=flat.start,
        )
        settings = AdamWSettings(
            beta_1=config.betas[0],
            beta_2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_norm=config.clip or math.inf,
            growth=scale.growth,
            backoff=scale.backoff,
            interval=scale.interval,
        )
        work = workspace(flat.device)

        def run(loss: Tensor) -> None:
            adamw_raw(state._replace(loss=loss), settings, work, known=flat.lanes[0].known_squares())
            if self._muon is not None:
                self._muon(*plan_numbers(work))

        return run

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes, weights included."""
        own = [self.first, self.second, self.seed_step, self.applied, self.skipped, self.loss_scale, self._growth]
        copies = [] if self.flat.copies is self.flat.masters else [self.flat.copies]
        return [self.flat.masters, *copies, *own, self.ring]

    def workspace(self) -> list[Tensor]:
        """What it holds beside the state."""
        return [] if self._muon is None else [self._muon.direction]

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the steps that follow, where no schedule was given; asynchronous.

        Raises:
            ConfigError: a schedule of `steps` decides the rate, or it is none.
        """
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise ConfigError(f"a learning rate is a finite number of at least 0, got {rate!r}")
        if self.steps is not None:
            raise ConfigError(f"the learning rate follows a schedule of {self.steps} steps; build it with steps=None")
        self._rates.fill_(rate)

    @torch.no_grad()
    def __call__(self, loss: Tensor | None = None) -> None:
        """One update from the flat gradient, whose content is used up.

        Args:
            loss: fp32[1], the step's loss; None where it lies behind the gradient, as a sum over pieces does.
        """
        self._run(self.flat.lanes[0].loss if loss is None else loss)

    def _torch(self, loss: Tensor) -> None:
        flat, config = self.flat, self.config
        step = self.seed_step[1:]
        lr = self._rates.index_select(0, step.clamp(max=len(self._rates) - 1))
        divisor = self.loss_scale * flat.lanes[0].weight if self.weighted else self.loss_scale
        loss = loss / flat.lanes[0].weight if self.weighted else loss
        norm = torch.linalg.vector_norm(flat.grad[: flat.size]).view(1) / divisor
        bad = (~torch.isfinite(norm + loss)).float()
        if config.clip > 0:
            divisor = divisor * ((norm + 1e-6) / config.clip).clamp(min=1.0)
        self.applied += 1 - bad
        self._adamw(lr, divisor, bad)
        if self._muon is not None:
            self._muon(1 / divisor, lr, 1 - bad)
        if flat.copies is not flat.masters:
            flat.copies.copy_(flat.masters)
        self.ring.index_copy_(0, step % RING, torch.stack([loss, norm, lr, bad], dim=1))
        self.skipped.copy_(torch.stack([self.skipped[0] + bad[0].long(), (self.skipped[1] + 1) * bad[0].long()]))
        if self.scale is not None:
            torch._amp_update_scale_(
                self.loss_scale, self._growth, bad, self.scale.growth, self.scale.backoff, self.scale.interval
            )
        step += 1

    def _adamw(self, lr: Tensor, divisor: Tensor, bad: Tensor) -> None:
        flat, config = self.flat, self.config
        for start, end, decay in (
            (flat.start, flat.boundary, config.weight_decay),
            (flat.boundary, flat.size, 0.0),
        ):
            if start == end:
                continue
            torch._fused_adamw_(
                [flat.masters[start:end]],
                [flat.grad[start:end]],
                [self.first[start:end]],
                [self.second[start - flat.start : end - flat.start]],
                [],
                [self.applied],
                lr=lr.view(()),
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor.view(()),
                found_inf=bad.view(()),
            )

    def metrics(self, since: int = 0) -> list[StepMetrics]:
        """What the steps from number `since` on reported, oldest first; at most the last RING. Waits for the device."""
        ring, done = self.ring.tolist(), int(self.seed_step[1])
        rows = [(step, ring[step % RING]) for step in range(max(since, done - RING, 0), done)]
        return [StepMetrics(step, loss, norm, lr, bool(skipped)) for step, (loss, norm, lr, skipped) in rows]

    def _counters(self) -> dict[str, Tensor]:
        return {"applied": self.applied, "seed_step": self.seed_step, "skipped": self.skipped}

    def _scaling(self) -> dict[str, Tensor]:
        return {"loss_scale": self.loss_scale, "growth": self._growth} if self.scale else {}

    def state_dict(self) -> dict[str, Tensor]:
        """Moments by parameter name, the counters, and the loss scale where there is one.

        It does not depend on how the buffers are laid out.
        """
        state = self._counters() | self._scaling()
        for kind, flat in (("first", self.first), ("second", self.second)):
            state |= {f"{kind}.{name}": view for name, view in self.flat.views(flat).items()}
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave. Moments may be missing where no update was applied yet: they are zero.

        A loss scale begins anew where the state is of a run without one, and is left where this run has none.

        Raises:
            CheckpointError: it belongs to another model; then nothing has changed.
        """
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(f"an optimiser state holds tensors by name, got {type(state).__name__}")
        counters = self._counters()
        missing = [name for name in counters if name not in state]
        if missing:
            raise CheckpointError(f"the optimiser state lacks {', '.join(missing)}")
        scaling = {name: tensor for name, tensor in self._scaling().items() if name in state}
        for name, tensor in (counters | scaling).items():
            if state[name].numel() != tensor.numel():
                raise CheckpointError(
                    f"{name} of the optimiser state has {state[name].numel()} numbers, not {len(tensor)}"
                )
        if not all(0 <= number < math.inf for number in (*state["applied"].tolist(), int(state["seed_step"][1]))):
            raise CheckpointError("the optimiser state counts no steps: applied or seed_step is negative or not finite")
        moments = {"first": self.first, "second": self.second}
        named = {
            kind: {name[len(kind) + 1 :]: value for name, value in state.items() if name.startswith(f"{kind}.")}
            for kind in moments
        }
        loaded = [kind for kind in moments if named[kind] or int(state["applied"])]
        for kind in loaded:
            self.flat.demand(moments[kind], named[kind], f"the optimiser's {kind} moment")
        for kind, flat in moments.items():
            self.flat.load(flat, named[kind]) if kind in loaded else flat.zero_()
        if self.scale is not None:
            self.loss_scale.fill_(self.scale.start)
            self._growth.zero_()
        for name, tensor in (counters | scaling).items():
            tensor.copy_(state[name].view_as(tensor))
