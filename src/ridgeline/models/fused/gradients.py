"""Weight gradients: into the sinks that a step hangs on its weights, or back to autograd where there are none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.linear import products
from ridgeline.ops.sink import sink_of

Result = TypeVar("Result")


class Side:
    """Gradients of weights beside the backward pass: nothing in it waits for them, so they take their own stream.

    In a captured step the two streams become parallel branches. Whatever a call reads is kept alive until `join`,
    because memory freed on one stream could be handed out again while the other still reads it.
    """

    def __init__(self, device: torch.device, *, apart: bool) -> None:
        self.apart = apart
        self.stream = _side_stream(device, torch.cuda.current_stream(device).stream_id) if apart else None
        self._kept: list[tuple[object, ...]] = []

    def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)` on the side stream, after all that the current stream has been given."""
        if self.stream is None:
            return function(*arguments)
        self._kept.append(arguments)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            return function(*arguments)

    def join(self) -> None:
        """The current stream waits for everything on the side."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._kept.clear()


@functools.cache
def _side_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """One side stream for each stream of a device."""
    return torch.cuda.Stream(device)


def matrix_gradient(weight_MK: Tensor, dy_NM: Tensor, x_NK: Tensor) -> Tensor | None:
    """dyᵀ x: written or added in fp32 to the weight's sink (None), else in the storage dtype."""
    sink = sink_of(weight_MK)
    if sink is None:
        return dy_NM.t() @ x_NK
    target, add = sink.take()
    products.weight_gradient_raw(dy_NM, x_NK, target, accumulate=add)
    return None


def column_gradients(partials_PW: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Column sums of fp32 partials, split among one-dimensional weights that lie side by side in its columns.

    One launch writes all of them, also into sinks that are views of one flat buffer.
    """
    sinks = [sink for sink in map(sink_of, weights) if sink is not None]
    buffers = {(sink.target.untyped_storage().data_ptr(), sink.add or sink.written) for sink in sinks}
    if len(sinks) < len(weights) or len(buffers) > 1:
        out_W = partials_PW.new_empty(partials_PW.shape[1])
        column_sums_raw(partials_PW, out_W, accumulate=False)
        parts = out_W.split([weight.numel() for weight in weights])
        return [deliver(weight, part) for weight, part in zip(weights, parts, strict=True)]
    targets = [sink.take() for sink in sinks]
    first, add = targets[0]
    flat = first.as_strided((first.untyped_storage().nbytes() // 4,), (1,), 0)
    places = tuple((target.storage_offset(), target.numel()) for target, _ in targets)
    column_sums_raw(partials_PW, flat, _index(places, first.device), accumulate=add)
    return [None] * len(weights)


@functools.lru_cache(maxsize=1024)
def _index(places: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Position in the flat buffer of every column, int32; made before a capture, kept for it."""
    return torch.cat([torch.arange(start, start + size) for start, size in places]).to(device, torch.int32)


def deliver(weight: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient that exists as a tensor: into the weight's sink (None), or back where there is none."""
    if weight is None or gradient is None:
        return None
    sink = sink_of(weight)
    if sink is None:
        return gradient
    sink.put(gradient)
    return None
