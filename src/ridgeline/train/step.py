"""One optimisation step as the loop sees it, and the steps that plain PyTorch offers.

The step engine's TrainStep has the same methods, so the loop does not know which one it drives, and their states
share their names, so a run can be resumed under another engine.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.engine import StepMetrics, find_precision
from ridgeline.engine.diagnose import NOTHING, bad_gradient, watched
from ridgeline.engine.memory import enough
from ridgeline.engine.phases import END, Mark, Marks, measure, no_mark
from ridgeline.errors import DivergedError, UnsupportedError
from ridgeline.models import Model
from ridgeline.models.language import IGNORE
from ridgeline.optim import (
    OptimizerConfig,
    build_adamw,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)

Batch = dict[str, Tensor]
RING = 1024  # steps whose metrics are kept until they are read
BAD_STEPS = 20  # consecutive overflows that the loss scale may answer before the run is given up


class Step(Protocol):
    """Forward, backward, clip, update; owns the optimiser's state, not the model."""

    def __call__(self, batch: Batch) -> None:
        """Learn from a batch of CPU tensors; on CUDA without waiting for the device."""

    def set_rate(self, rate: float) -> None:
        """Give the coming steps a learning rate, where the clock and not the step number decides it."""

    def metrics(self, since: int = 0) -> list[StepMetrics]:
        """What the steps from number `since` on reported, oldest first; at most the last 1,024. Waits."""

    def check(self) -> None:
        """Raise if the run no longer trains."""

    def weights(self) -> contextlib.AbstractContextManager[nn.Module]:
        """The model as the step computes with it, for evaluation."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up what `state_dict` gave."""


class TorchStep:
    """PyTorch's own step: autocast, torch.optim.AdamW (fused on CUDA), optionally torch.compile.

    bf16 and fp16 are autocast over fp32 weights; fp16 adds a dynamic loss scale, which skips the update of a step
    that overflows. On the CPU, where nothing has to be waited for, weights stay as they are from the first step on that
    is not finite, and `check` names its first bad tensor. A batch cut into parts gives the mean of the whole, also
    where targets are missing.

    Args:
        model: built with impl="torch", on its device.
        optimizer: AdamW, clipping and schedule.
        steps: length of the schedule; None for a rate that stays at `optimizer.lr` or follows `set_rate`.
        compile: mode of torch.compile, or None.
        precision: a name of engine.PRECISIONS.
        accumulate: parts into which a batch is cut.
        seed: seed of the run, kept in the state.

    Raises:
        UnsupportedError: there is no compiler for torch.compile.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerConfig,
        *,
        steps: int | None,
        precision: str,
        compile: str | None = None,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        self.model, self.config, self.steps, self.accumulate, self.seed = model, optimizer, steps, accumulate, seed
        self.precision = find_precision(precision)
        self.device = next(model.parameters()).device
        self.optimizer = build_adamw(
            model, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
        )
        reduced = None if self.precision.compute == torch.float32 else self.precision.compute
        self._autocast = self.precision.autocast or reduced
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision.scaled)
        self._loss: Callable[[Batch], Tensor] = _loss_of(model, compile, self.device)
        self._captured = compile not in (None, "default")
        self._rate = optimizer.lr
        self._mark: Mark = no_mark
        self._taken, self._checked, self._bad_in_a_row = 0, 0, 0
        self._recent: list[tuple[int, Tensor, Tensor, float]] = []
        self._bad: tuple[Batch, Tensor] | None = None  # of the last step that was not finite: batch, random state

    def __call__(self, batch: Batch) -> None:
        """See Step.

        Raises:
            OutOfMemoryError: on the CPU, what needs how much; on a card PyTorch says it.
        """
        with enough(list(batch.values()), self.device, self._kept) if self._looks else contextlib.nullcontext():
            self._step(batch)

    def _kept(self) -> dict[str, int]:
        sizes = [parameter.numel() * parameter.element_size() for parameter in self.model.parameters()]
        return {"weights": sum(sizes), "gradients": sum(sizes), "optimiser moments": 2 * sum(sizes)}

    def _step(self, batch: Batch) -> None:
        if self.steps is not None:
            self._rate = learning_rate(self.config, self._taken, self._taken / self.steps)
        set_learning_rate(self.optimizer, self._rate)
        chance = torch.get_rng_state() if self._looks else None
        with self.precision.products():
            losses = [self._backward(part, share) for part, share in split_batch(batch, self.accumulate)]
            self._mark("optimizer")
            self.scaler.unscale_(self.optimizer)
            loss, norm = torch.stack(losses).sum(), self._clip()
            if chance is not None and not math.isfinite(float(loss + norm)):
                self._bad = ({name: tensor.clone() for name, tensor in batch.items()}, chance)
            if self.precision.scaled or self._bad is None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._mark(END)
        self._recent.append((self._taken, loss, norm, self._rate))
        del self._recent[:-RING]
        self._taken += 1

    def _backward(self, part: Batch, share: float) -> Tensor:
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in part.items()}
        if self._captured:
            torch.compiler.cudagraph_mark_step_begin()
        self._mark("forward")
        with self._casting():
            loss = self._loss(moved) * share
        self._mark("backward")
        self.scaler.scale(loss).backward()
        return loss.detach().float().clone()  # a captured loss lives in memory that the next part overwrites

    def _casting(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def _clip(self) -> Tensor:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.config.clip:
            return nn.utils.clip_grad_norm_(parameters, self.config.clip)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def phases(self, batch: Batch, steps: int = 10) -> dict[str, float]:
        """Median milliseconds of forward, backward and optimizer, measured inside steps on `batch`, which train."""
        self._mark = marks = Marks(self.device, captured=False)
        try:
            return measure(lambda: self(batch), marks, steps)
        finally:
            self._mark = no_mark

    def set_rate(self, rate: float) -> None:
        """See Step."""
        self._rate = rate

    def metrics(self, since: int = 0) -> list[StepMetrics]:
        """See Step."""
        recent = [entry for entry in self._recent if entry[0] >= since]
        if not recent:
            return []
        skips = self.precision.scaled or self._looks
        values = torch.stack([torch.stack([loss, norm]) for _, loss, norm, _ in recent]).tolist()
        return [
            StepMetrics(step, loss, norm, rate, skipped=skips and not math.isfinite(loss + norm))
            for (step, _, _, rate), (loss, norm) in zip(recent, values, strict=True)
        ]

    def check(self) -> None:
        """See Step.

        Raises:
            DivergedError: a loss or gradient that is not finite, and no loss scale to answer it with; on the CPU it
                names the first bad tensor.
        """
        limit = BAD_STEPS if self.precision.scaled else 1
        for entry in self.metrics(self._checked):
            self._bad_in_a_row = 0 if math.isfinite(entry.loss + entry.norm) else self._bad_in_a_row + 1
            if self._bad_in_a_row == limit:
                raise DivergedError(
                    f"training stopped at step {entry.step + 1}: loss {entry.loss:g}, gradient norm {entry.norm:g}"
                    + ("" if self._bad is None else f"; first bad tensor: {self._first_bad(*self._bad)}")
                )
        self._checked = self._taken

    @property
    def _looks(self) -> bool:
        """Whether a step's numbers are there as soon as it is called."""
        return self.device.type == "cpu"

    def _first_bad(self, batch: Batch, chance: Tensor) -> str:
        """What was not finite first in the step on `batch`, which began with the random state `chance`."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        now = torch.get_rng_state()
        torch.set_rng_state(chance)
        try:
            with watched(self.model) as found, self.precision.products():
                for part, share in split_batch(batch, self.accumulate):
                    with self._casting():
                        loss = self.model.loss(part) * share
                    if found or not bool(torch.isfinite(loss)):
                        return found[0] if found else "the loss"
                    gradients = torch.autograd.grad(
                        self.scaler.scale(loss), list(parameters.values()), allow_unused=True
                    )
                    for total, gradient in zip(sums.values(), gradients, strict=True):
                        if gradient is not None:
                            total += gradient
        finally:
            torch.set_rng_state(now)
        return bad_gradient(sums) or NOTHING

    @contextlib.contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """See Step."""
        with self.precision.products(), self._casting():
            yield self.model

    def state_dict(self) -> dict[str, Tensor]:
        """See Step; the names are those of engine.TrainStep."""
        state = {
            **optimizer_tensors(self.optimizer),
            "seed_step": torch.tensor([self.seed, self._taken]),
            "skipped": torch.zeros(2, dtype=torch.int64),
        }
        if self.scaler.is_enabled():
            scale = self.scaler.state_dict()
            state["loss_scale"] = torch.tensor([scale["scale"]])
            state["growth"] = torch.tensor([scale["_growth_tracker"]], dtype=torch.int32)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See Step."""
        load_optimizer_tensors(self.optimizer, state)
        self._taken = self._checked = int(state["seed_step"][1])
        self._bad = None
        if self.scaler.is_enabled() and "loss_scale" in state:
            saved = {"scale": state["loss_scale"].item(), "_growth_tracker": int(state["growth"])}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **saved})


def split_batch(batch: Batch, parts: int) -> list[tuple[Batch, float]]:
    """The batch in equal parts, each with its share of the targets that count."""
    if parts == 1:
        return [(batch, 1.0)]
    pieces = [
        dict(zip(batch, tensors, strict=True))
        for tensors in zip(*(tensor.chunk(parts) for tensor in batch.values()), strict=True)
    ]
    counts = [int((piece["targets"] != IGNORE).sum()) for piece in pieces]
    if not any(counts):
        return [(batch, 1.0)]  # whose loss says why there is none
    return [(piece, count / sum(counts)) for piece, count in zip(pieces, counts, strict=True) if count]


def _loss_of(model: Model, compile: str | None, device: torch.device) -> Callable[[Batch], Tensor]:
    if compile is None:
        return model.loss
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UnsupportedError(f"engine compile needs a C++ compiler on the CPU and {compiler} is missing; use eager")
    return torch.compile(model.loss, mode=compile, dynamic=False)
