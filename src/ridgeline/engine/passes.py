"""Forward and backward of a whole batch: its parts one after another, its lanes beside each other.

A batch is cut into `accumulate` parts, to save memory, and each part into `lanes` pieces that run on streams of their
own, so that one piece's memory-bound kernels hide under another's products. Every piece knows the global number of
its first sample, so dropout masks do not depend on how a batch is cut. Gradients are summed in fp32: within a lane in
the order of the parts, then over the lanes in their order, so the sum is the same every time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.demands import scalar
from ridgeline.engine.feed import Feed, tensors_of
from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.phases import Mark, no_mark
from ridgeline.engine.precision import Precision
from ridgeline.engine.reduction import Reduction
from ridgeline.engine.watch import Watch
from ridgeline.errors import ConfigError
from ridgeline.models.language import IGNORE
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.known import one

LossCall = Callable[[Any, DropoutState], Tensor]


def compiled(call: LossCall, mode: str) -> LossCall:
    """The call by torch.compile, a program for each of its shapes.

    Raises:
        ConfigError: no such mode.
    """
    try:
        return torch.compile(call, mode=mode, dynamic=False)
    except RuntimeError as error:
        raise ConfigError(f"torch.compile: {error}") from error


def targets_that_count(batch: Any) -> Tensor:
    """fp32 scalar: the share of a part's targets that count, 1 where it has none by that name."""
    if isinstance(batch, Mapping) and "targets" in batch:
        return (batch["targets"] != IGNORE).float().mean()
    first = tensors_of(batch)[0][0]
    return torch.ones((), dtype=torch.float32, device=first.device)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a step's samples are cut.

    Attributes:
        accumulate: parts that run one after another.
        lanes: pieces of a part that run beside each other.
        rank: number of this process.
        world: processes, each with a batch of the same size.
        weight: weight(piece) → scalar tensor, what share of the piece's items its loss is a mean of; None for all.
    """

    accumulate: int = 1
    lanes: int = 1
    rank: int = 0
    world: int = 1
    weight: Callable[[Any], Tensor] | None = None

    @property
    def pieces(self) -> int:
        """Pieces of this process' batch."""
        return self.accumulate * self.lanes


class Passes:
    """The first half of a step.

    Args:
        loss: loss(piece, dropout state) → scalar; reads the weights that are swapped in.
        flat: leaves and gradient buffers, one a lane.
        precision: of the forward pass.
        cut: how the batch is cut.
        seed_step: int64[2], seed and step of the dropout masks.
        loss_scale: fp32[1].
        own: the loss is this package's: nobody else writes to the memory of what it returns, or to its gradient.

    Attributes:
        loss: as given.
        whole: fp32[1], the own loss of a batch in one piece; None where the loss lies in the lanes' slots.
        watch: makes what watches the forward pass of a lane, as the first one of each batch shape is; else None.
    """

    def __init__(
        self,
        loss: LossCall,
        flat: FlatParameters,
        precision: Precision,
        cut: Cut,
        *,
        seed_step: Tensor,
        loss_scale: Tensor,
        own: bool = False,
    ) -> None:
        self.loss, self.flat, self.precision, self.cut = loss, flat, precision, cut
        self.seed_step, self.loss_scale = seed_step, loss_scale
        self.mark: Mark = no_mark
        self.whole: Tensor | None = None
        self.watch: Callable[[int], Watch] | None = None
        # the loss's own gradient: for a stranger, who might write to it, it is filled anew in every step
        self._one = one(flat.device) if own else None
        self._streams: list[torch.cuda.Stream] = []
        if flat.device.type == "cuda":
            self._streams = [torch.cuda.Stream(flat.device) for _ in range(cut.lanes - 1)]

    def __call__(self, feed: Feed, reduction: Reduction | None = None) -> None:
        """Gradients, loss and weight of the batch in `feed`, in the first lane's buffer.

        The gradients may leave by `reduction` while the last part's backward pass goes on; its `finish` is to follow.
        """
        if reduction is not None:
            reduction.tell()
        beside = self.cut.lanes > 1  # then a lane's forward may run under another's backward
        for part in range(self.cut.accumulate):
            self.mark("forward and backward" if beside else "forward")
            self._fork()
            targets = []
            for lane in range(self.cut.lanes):
                with self._in(lane):
                    targets.append(self.forward(feed, part, lane))
            if not beside:
                self.mark("backward")
                if reduction is not None and part == self.cut.accumulate - 1:
                    reduction.begin()
            for lane in range(self.cut.lanes):
                with self._in(lane):
                    self.backward(targets[lane], part, lane)
            del targets
            self._join()
        self.flat.merge()
        self.watch = None

    def _in(self, lane: int) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[lane - 1]) if lane and self._streams else contextlib.nullcontext()

    def _fork(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.flat.device))

    def _join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self.flat.device).wait_stream(stream)

    def forward(self, feed: Feed, part: int, lane: int) -> Tensor:
        """The piece's share of the step's loss, scaled, with its graph; notes the loss and its weight.

        Raises:
            ConfigError: the loss is no real scalar, has no gradient, or has some that goes past the leaves.
        """
        convert = None if self.precision.compute == torch.float32 else self.precision.compute
        number, pieces = part * self.cut.lanes + lane, self.cut.pieces
        piece = feed.batch(number, pieces, convert)
        samples = len(feed.static[0]) // pieces
        dropout = DropoutState(self.seed_step, (self.cut.rank * pieces + number) * samples)
        with self.flat.swapped(lane), self.precision.products(), torch.enable_grad():
            watch = self.watch(lane) if self.watch is not None and part == 0 else None
            with self.precision.forward(self.flat.device):
                loss = scalar(self.loss(piece, dropout), "the loss must be a scalar tensor, a mean over the samples")
            if not loss.requires_grad:
                raise ConfigError(
                    "the loss has no gradient: it was detached, computed under no_grad, or comes from no weight that "
                    "trains"
                )
            if watch is not None:
                watch.over(loss)
            target = self._weighted(loss.float(), piece, part, lane, first=watch is not None)
            return target * self.loss_scale.view(()) if self.precision.scaled else target

    def _weighted(self, loss: Tensor, piece: Any, part: int, lane: int, *, first: bool) -> Tensor:
        """The loss times its share of the whole batch; adds both to the lane's slots, unless it is all of it."""
        gradients = self.flat.lanes[lane]
        share: Tensor | float = 1.0 / (self.cut.pieces * self.cut.world)
        if self._one is not None and share == 1.0 and self.cut.weight is None:
            self.whole = loss.detach().view(1)
            return loss
        if self.cut.weight is not None:
            own = scalar(self.cut.weight(piece), "weight must return a scalar tensor").detach().float()
            if first and bool(own < 0):
                raise ConfigError(f"weight must return what share of all a loss is a mean of, got {own.item():g}")
            share = own * share
        target = loss * share if isinstance(share, Tensor) or share != 1.0 else loss
        with torch.no_grad():
            noted = target.detach().view(1)
            if isinstance(share, Tensor):
                noted = torch.where(share > 0, noted, 0.0)  # a piece without a target has a loss of 0 / 0
                gradients.weight.copy_(share.view(1)) if part == 0 else gradients.weight.add_(share.view(1))
            gradients.loss.copy_(noted) if part == 0 else gradients.loss.add_(noted)
        return target

    def backward(self, target: Tensor, part: int, lane: int) -> None:
        """Gradients of the lane's leaves into its buffer."""
        gradients = self.flat.lanes[lane]
        gradients.begin(add=part > 0)
        with self.flat.swapped(lane), self.precision.products():
            gradients.gather(torch.autograd.grad(target, gradients.leaves, self._one, allow_unused=True))
