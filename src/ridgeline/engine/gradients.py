"""The leaves that a module computes with in one lane, and the flat fp32 buffer that their gradients end up in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ridgeline.engine.slots import ALIGN, Slot
from ridgeline.ops import known
from ridgeline.ops.optimizer import KnownSquares
from ridgeline.ops.sink import ATTRIBUTE, GradientSink, Squares, join


class Gradients:
    """One lane's leaves and gradients.

    Args:
        slots: the flat layout.
        copies: flat buffer of the weights that the module computes with; the leaves are views of it.
        world: processes that train together.

    Attributes:
        leaves: parameters in the order of the slots, fresh, so that no autograd node of another stream hangs on them.
        sinks: where each leaf's gradient goes, in the same order.
        buffer: fp32[N + ALIGN], the gradients, then a slot for the loss, one for its weight, and where several
            processes train one for the size of each one's batch; longer where so many do not fit.
    """

    def __init__(self, slots: Sequence[Slot], copies: Tensor, world: int = 1) -> None:
        self.slots, self.size, self._world = slots, copies.numel(), world if world > 1 else 0
        behind = -(-(2 + self._world) // ALIGN) * ALIGN
        self.buffer = torch.zeros(self.size + behind, dtype=torch.float32, device=copies.device)
        self.leaves = [nn.Parameter(slot.of(copies)) for slot in slots]
        self.sinks = [GradientSink(slot.of(self.buffer)) for slot in slots]
        for slot, leaf, sink in zip(slots, self.leaves, self.sinks, strict=True):
            setattr(leaf, ATTRIBUTE, sink)
            if slot.padded != slot.shape:
                wide = copies[slot.offset : slot.offset + slot.padded.numel()].view(slot.padded)
                setattr(leaf, known.ATTRIBUTE, wide)
        self._scratch: Tensor | None = None
        self._squares: Squares | None = None

    def ask_for_squares(self) -> None:
        """From now on kernels that write gradients leave sums of their squares: see `known_squares`."""
        self._squares = Squares(self.buffer.device)
        for sink in self.sinks:
            sink.squares = self._squares

    def known_squares(self) -> KnownSquares | None:
        """What is known of the squares of the last pass, once; None where all gradients are to be read.

        Right where the buffer holds what that pass has written: nothing of other lanes or processes may be added.
        """
        if self._squares is None:
            return None
        partials, known_of = self._squares.settle()
        if not known_of:
            return None
        pairs = zip(self.slots, self.sinks, strict=True)
        return KnownSquares(
            partials, tuple((s.offset, s.offset + s.size) for s, sink in pairs if id(sink) not in known_of)
        )

    def begin(self, *, add: bool) -> None:
        """Starts a pass that adds to the gradients of an earlier one, or replaces them."""
        if self._squares is not None:
            self._squares.begin()
        for sink in self.sinks:
            sink.begin(add=add)

    @torch.no_grad()
    def gather(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes up what autograd gave, beside what ops have written into their sinks.

        Args:
            gradients: in the order of `leaves`, any dtype; None where there is none or its op has written it.
        """
        join(self.sinks)
        fresh: list[tuple[int, Tensor]] = []
        for index, (sink, gradient) in enumerate(zip(self.sinks, gradients, strict=True)):
            if gradient is None:
                if not (sink.written or sink.add):
                    sink.target.zero_()
            elif sink.written or not gradient.is_contiguous():
                sink.put(gradient)  # a strided tensor would send a whole list down the slow path
            else:
                fresh.append((index, gradient))
        if not fresh:
            return
        if not self.sinks[0].add:
            torch._foreach_copy_([self.sinks[i].target for i, _ in fresh], [g for _, g in fresh])
        elif len(fresh) == len(self.slots):
            self._add_all([gradient for _, gradient in fresh])
        else:
            for index, gradient in fresh:
                self.sinks[index].put(gradient)

    def _add_all(self, gradients: list[Tensor]) -> None:
        """Adds a gradient to every slot with few launches: converted to fp32 side by side, then one sum."""
        if self._scratch is None:
            self._scratch = torch.zeros(self.size, dtype=torch.float32, device=self.buffer.device)
        torch._foreach_copy_([slot.of(self._scratch) for slot in self.slots], gradients)
        self.buffer[: self.size].add_(self._scratch)

    def buffers(self) -> list[Tensor]:
        """The device memory it holds."""
        squares = None if self._squares is None else self._squares.partials
        return [tensor for tensor in (self.buffer, self._scratch, squares) if tensor is not None]

    @property
    def loss(self) -> Tensor:
        """fp32[1]: the loss, weighted."""
        return self.buffer[self.size : self.size + 1]

    @property
    def weight(self) -> Tensor:
        """fp32[1]: what loss and gradients are to be divided by."""
        return self.buffer[self.size + 1 : self.size + 2]

    @property
    def sizes(self) -> Tensor:
        """fp32[world], or none of one process alone: the sizes of the batches, zeros in all places but its own."""
        return self.buffer[self.size + 2 : self.size + 2 + self._world]

    @property
    def carried(self) -> Tensor:
        """Gradients, loss, weight and sizes: what is summed over lanes and processes."""
        return self.buffer[: self.size + 2 + self._world]
