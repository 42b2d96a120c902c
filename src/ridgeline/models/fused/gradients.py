"""Weight gradients: into the sinks that a step hangs on its weights, or back to autograd where there are none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.fused.choices import Choices
from ridgeline.models.plan import GATHERED_BYTES
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.linear import doubles, products
from ridgeline.ops.linear.folded import FoldedNorm
from ridgeline.ops.linear.folded_triton import folded_gradient_raw
from ridgeline.ops.linear.reduce import Job, reduce_raw
from ridgeline.ops.linear.wgrad import MAX_PROBLEMS, Gradient, weight_gradients_raw
from ridgeline.ops.sink import GradientSink, room_for, sink_of
from ridgeline.ops.streams import side_stream


class Place(NamedTuple):
    """Where a gradient goes, and whether to add it to what is there."""

    target: Tensor
    add: bool


class WeightGradients:
    """The gradients of a stack's weights, beside its backward pass, none of which waits for them.

    They may take a stream of their own (in a captured step a parallel branch), or be gathered until there are many, or
    until `finish`, and launched as one group; the sinks' owner waits for the last: what comes after the stack runs
    beside it. Whatever they read is kept alive until then: memory freed on one stream could be handed out again while
    the other still reads it.

    Attributes:
        deferred: what a call has been given may be read after the call, so nothing may be written over it.
    """

    def __init__(self, device: torch.device, choices: Choices) -> None:
        self._device, self._grouped = device, choices.grouped
        self._gathers_sums = choices.grouped or choices.sums_at_once
        self.deferred = choices.grouped or choices.side_stream
        self._stream = None
        if choices.side_stream:
            self._stream = side_stream(device)
        self._kept: list[object] = []
        self._group: list[Gradient] = []
        self._sums: list[Job] = []
        self._gathered: set[int] = set()  # weights that group and sums write
        self._bytes = 0  # of the gradients that the group keeps alive
        self._taken: list[GradientSink] = []
        self._results: dict[int, Tensor] = {}

    def unsummed(self, bias_M: Tensor | None) -> Tensor | None:
        """The bias if its gradient is to be left as partial sums by another kernel; None if `product` sums it."""
        return None if self._grouped else bias_M

    def product(
        self, weight_MK: Tensor, dy_NM: Tensor, x_NK: Tensor, bias_M: Tensor | None, partials_PM: Tensor | None = None,
        norm: FoldedNorm | None = None,
    ) -> None:  # fmt: skip
        """The gradients of y = x Wᵀ + b: dyᵀ x, and the column sums of dy (or of partial sums over its rows).

        With a `norm`, which goes without groups, y = norm(x) Wᵀ + b, and dy comes divided by σ, but not its sums.
        """
        if norm is not None and partials_PM is not None:
            self._beside(self._folded_product, weight_MK, dy_NM, x_NK, bias_M, partials_PM, norm)
            return
        if bias_M is not None and partials_PM is not None:
            self.sums(partials_PM, [bias_M])
            bias_M = None
        if self._grouped:
            if len(self._group) == MAX_PROBLEMS or self._bytes > GATHERED_BYTES:
                self._flush()
            self._apart(weight_MK, bias_M)
            weight = self._place(weight_MK)
            bias = self._place(bias_M) if bias_M is not None else Place(None, False)  # type: ignore[arg-type]
            self._group.append(Gradient(dy_NM, x_NK, weight.target, bias.target, weight.add, bias.add))
            self._bytes += dy_NM.numel() * dy_NM.element_size()
            return
        self._beside(self._product, weight_MK, dy_NM, x_NK)

    def sums(self, partials_PW: Tensor, weights: Sequence[Tensor]) -> None:
        """Column sums of fp32 partials, split among one-dimensional weights that lie side by side in its columns."""
        if not self._gathers_sums:
            self._beside(self._column_sums, partials_PW, weights)
            return
        self._apart(*weights)
        parts = partials_PW[:, None].split([weight.numel() for weight in weights], dim=2)
        for part, weight in zip(parts, weights, strict=True):
            target, add = self._place(weight)
            self._sums.append(Job(part, target[None], add))

    def deliver(self, weight: Tensor | None, gradient: Tensor | None) -> None:
        """A gradient that exists as a tensor."""
        if weight is not None and gradient is not None:
            self._beside(self._deliver, weight, gradient)

    def finish(self) -> None:
        """Launches what has been gathered; the current stream waits for everything that is not in sinks alone."""
        if self._grouped and self._taken and not self._results and self._device.type == "cuda":
            self._leave()
        self._flush()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()

    def take(self, weight: Tensor | None) -> Tensor | None:
        """The gradient to hand to autograd: None where a sink has it. A weight that is used twice has it once."""
        return None if weight is None else self._results.pop(id(weight), None)

    def _leave(self) -> None:
        """Launches the group on a stream that nobody waits for here; the sinks know of it."""
        stream = side_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._launch_group(self._group, self._sums, self._taken)
        for sink in self._taken:
            sink.beside(stream)
        self._taken[0].beside(stream, self._group, self._sums)
        self._group, self._sums, self._taken = [], [], []

    def _flush(self) -> None:
        if self._group or self._sums:
            self._beside(self._launch_group, self._group, self._sums, self._taken)
            self._group, self._sums, self._taken = [], [], []
        self._gathered.clear()
        self._bytes = 0

    def _apart(self, *weights: Tensor | None) -> None:
        """A weight that is used twice is written by one launch and added to by a later one."""
        if any(id(weight) in self._gathered for weight in weights):
            self._flush()
        self._gathered.update(id(weight) for weight in weights if weight is not None)

    def _beside(self, function: Callable[..., None], *arguments: object) -> None:
        """`function(*arguments)` after all that the current stream has been given; on the side stream, if any."""
        if self._stream is None:
            function(*arguments)
            return
        self._kept.append(arguments)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            function(*arguments)

    def _place(self, weight: Tensor) -> Place:
        sink = sink_of(weight)
        if sink is not None:
            self._taken.append(sink)
            return Place(*sink.take())
        before = self._results.get(id(weight))
        if before is None:
            self._results[id(weight)] = torch.empty_like(weight)
        return Place(self._results[id(weight)], before is not None)

    def _product(self, weight_MK: Tensor, dy_NM: Tensor, x_NK: Tensor) -> None:
        sink = sink_of(weight_MK)
        if sink is None:
            self._deliver(weight_MK, dy_NM.t() @ x_NK)
            return
        target, add = sink.take()
        products.weight_gradient_raw(dy_NM, x_NK, target, accumulate=add)
        sink.finished()

    def _folded_product(
        self, weight_MK: Tensor, dy_NM: Tensor, r_NK: Tensor, bias_M: Tensor | None, sums_PM: Tensor, norm: FoldedNorm
    ) -> None:
        product_MK = torch.empty(weight_MK.shape, dtype=torch.float32, device=weight_MK.device)
        products.weight_gradient_raw(dy_NM, r_NK, product_MK, accumulate=False)
        gathered = len(self._taken)
        weights = [weight for weight in (weight_MK, bias_M) if weight is not None]
        places = [self._place(weight) for weight in weights]
        bias = places[1] if bias_M is not None else Place(None, False)  # type: ignore[arg-type]
        folded_gradient_raw(
            product_MK, sums_PM, norm, places[0].target, bias.target, add_weight=places[0].add, add_bias=bias.add
        )
        for sink in self._taken[gathered:]:
            sink.finished()
        del self._taken[gathered:]

    def _deliver(self, weight: Tensor, gradient: Tensor) -> None:
        sink = sink_of(weight)
        if sink is not None:
            sink.put(gradient)
        else:
            before = self._results.get(id(weight))
            self._results[id(weight)] = gradient if before is None else before + gradient

    def _column_sums(self, partials_PW: Tensor, weights: Sequence[Tensor]) -> None:
        """One launch writes all of them, also into sinks that are views of one flat buffer."""
        sinks = [sink for sink in map(sink_of, weights) if sink is not None]
        buffers = {(sink.target.untyped_storage().data_ptr(), sink.add or sink.written) for sink in sinks}
        if len(sinks) < len(weights) or len(buffers) > 1:
            out_W = partials_PW.new_empty(partials_PW.shape[1])
            column_sums_raw(partials_PW, out_W, accumulate=False)
            for weight, part in zip(weights, out_W.split([weight.numel() for weight in weights]), strict=True):
                self._deliver(weight, part)
            return
        targets = [sink.take() for sink in sinks]
        first, add = targets[0]
        flat = first.as_strided((first.untyped_storage().nbytes() // 4,), (1,), 0)
        places = tuple((target.storage_offset(), target.numel()) for target, _ in targets)
        column_sums_raw(partials_PW, flat, _index(places, first.device), accumulate=add)
        for sink in sinks:
            sink.finished()

    def _launch_group(self, group: Sequence[Gradient], sums: Sequence[Job], taken: Sequence[GradientSink]) -> None:
        if group and group[0].dy_NM.dtype == torch.float32:
            doubles.weight_gradients(group, also=sums)
        elif group:
            results = len(group) + sum(gradient.dbias_M is not None for gradient in group) + len(sums)
            weight_gradients_raw(group, also=sums, room=room_for(taken) if results == len(taken) else None)
        else:
            reduce_raw(sums)
        for sink in taken:
            sink.finished()


@functools.lru_cache(maxsize=1024)
def _index(places: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Position in the flat buffer of every column, int32; made before a capture, kept for it."""
    return torch.cat([torch.arange(start, start + size) for start, size in places]).to(device, torch.int32)
