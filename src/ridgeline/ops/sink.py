"""Where the gradient of a weight is wanted: a way past autograd for ops that write it themselves.

A step that owns its gradients hangs a GradientSink on each weight it hands to the model. An op that computes a
weight's gradient with a kernel asks `sink_of(weight)` in its backward pass. Where there is one, it writes or adds the
gradient there in fp32 and returns None to autograd: no tensor of the weight's size is made, rounded to the weight's
dtype and copied. Where there is none, it returns the gradient as usual.

An op may say that what it took is `finished`: the kernel that writes it has been launched, on the stream that is
current. A step on several cards then sends it off while the backward pass goes on. An op that never says so is as
right, its gradient only leaves later.

An op may write on a stream of its own, and say so with `beside`; whoever takes the sink next waits for that stream, and
so does the step before it reads the gradients, by `join`.

A kernel that writes gradients whole may leave sums of their squares (`Squares`), so that the norm of all gradients need
not read them again. That holds for gradients that nothing is added to: whatever else is taken, given or added makes it
void, and then they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError

ATTRIBUTE = "gradient_sink"
ROOM = 1 << 14  # numbers of a pass: a warp's or a block's each, 4,000 at width 256


class GradientSink:
    """The place of one weight's gradient during one pass.

    Args:
        target: fp32 tensor of the weight's shape; a view of a flat buffer.

    Attributes:
        add: the gradient of an earlier part of the batch is there already.
        takes: how often it was taken in this pass.
        finishes: how often it was said to be finished.
        report: called whenever it is said to be finished; None where nobody listens.
        squares: what takes the squares of what is written; None where nobody asks for them.
        streams: those that it is written on beside the backward pass, each with what it reads, kept alive until then.
    """

    def __init__(self, target: Tensor) -> None:
        self.target, self.add = target, False
        self.takes = self.finishes = 0
        self.report: Callable[[], None] | None = None
        self.squares: Squares | None = None
        self.streams: dict[torch.cuda.Stream, list[object]] = {}

    def begin(self, *, add: bool) -> None:
        """Starts a pass; `add` says whether it adds to what is there."""
        self.add, self.takes, self.finishes = add, 0, 0

    @property
    def written(self) -> bool:
        """Whether something has been written in this pass."""
        return self.takes > 0

    def take(self) -> tuple[Tensor, bool]:
        """The target and whether to add to it; a weight that is used twice adds the second time."""
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        add = self.add or self.written
        self.takes += 1
        return self.target, add

    def beside(self, stream: torch.cuda.Stream, *read: object) -> None:
        """What was taken last is written on `stream`; what holds the tensors that are read lives until `join`."""
        self.streams.setdefault(stream, []).extend(read)

    def finished(self) -> None:
        """The write of what was taken last has been launched on the current stream."""
        self.finishes += 1
        if self.report is not None:
            self.report()

    def put(self, gradient: Tensor) -> None:
        """Writes or adds a gradient that exists as a tensor, of any dtype.

        Raises:
            UnsupportedError: it is sparse.
        """
        if gradient.layout != torch.strided:
            raise UnsupportedError(f"gradients must be dense, got {gradient.layout}; build the layer with sparse=False")
        target, add = self.take()
        target.add_(gradient) if add else target.copy_(gradient)
        self.finished()


class Squares:
    """Numbers that add up to the sum of squares of some of a pass' gradients, left by the kernels that write these.

    Args:
        device: where they lie.

    Attributes:
        partials: fp32[ROOM].
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.zeros(ROOM, dtype=torch.float32, device=device)
        self.begin()

    def begin(self) -> None:
        """Forgets the pass before."""
        self._used = 0
        self._sinks: list[GradientSink] = []

    def claim(self, count: int, sinks: Sequence[GradientSink]) -> Tensor | None:
        """fp32[count] for launches that write all of these sinks and nothing else; None if there is no room."""
        start, end = self._used, self._used + count
        if end > len(self.partials):
            return None
        self._used = end
        self._sinks.extend(sinks)
        return self.partials[start:end]

    def settle(self) -> tuple[Tensor, set[int]]:
        """What has been left in this pass, and the ids of the sinks it is of; of none, if one was written twice."""
        kept, sinks = self.partials[: self._used], self._sinks
        self.begin()
        if any(sink.add or sink.takes != 1 for sink in sinks):
            return self.partials[:0], set()
        return kept, {id(sink) for sink in sinks}


def room_for(sinks: Sequence[GradientSink]) -> Callable[[int], Tensor | None] | None:
    """What gives launches that write just these sinks room for squares; None where they add or nobody asks."""
    squares = sinks[0].squares if sinks else None
    if squares is None or any(sink.squares is not squares or sink.add or sink.takes != 1 for sink in sinks):
        return None
    return lambda count: squares.claim(count, sinks)


def join(sinks: Sequence[GradientSink]) -> None:
    """The current stream waits for all that is written into the sinks on others, and what was read there is let go."""
    for stream in {stream for sink in sinks for stream in sink.streams}:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    for sink in sinks:
        sink.streams.clear()


def sink_of(weight: Tensor) -> GradientSink | None:
    """The sink that hangs on a weight, or None."""
    return getattr(weight, ATTRIBUTE, None)


def fp32_place(weight: Tensor) -> tuple[Tensor, bool]:
    """Where a kernel puts a weight's fp32 gradient, and whether it adds: the sink's target, or fresh memory."""
    sink = sink_of(weight)
    return (torch.empty(weight.shape, device=weight.device), False) if sink is None else sink.take()


def written(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """What a backward pass returns for a gradient that it has written where `fp32_place` said: None for a sink's."""
    sink = sink_of(weight)
    if sink is None:
        return gradient.to(weight.dtype)
    sink.finished()
    return None
