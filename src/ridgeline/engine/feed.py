"""The batch at fixed addresses: where a captured step reads it, and how the next one gets there in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import ConfigError

CHUNK = 1 << 16  # elements that a block of PyTorch's kernels for lists of tensors takes

Signature = tuple[pytree.TreeSpec, tuple[tuple[torch.Size, torch.dtype], ...]]


def tensors_of(batch: Any) -> tuple[list[Tensor], pytree.TreeSpec]:
    """The tensors of a nest of dicts, lists and tuples, and how to put it together again.

    Raises:
        ConfigError: something in it is no tensor of numbers side by side, the tensors do not share their first
            dimension, or there is nothing in them.
    """
    leaves, spec = pytree.tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            raise ConfigError(
                f"a batch holds tensors whose first dimension is the sample, got {type(leaf).__name__} "
                f"{'of no dimension' if isinstance(leaf, Tensor) else repr(leaf)[:40]}"
            )
        if leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta:
            kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else str(leaf.layout).removeprefix("torch.")
            raise ConfigError(f"a batch holds dense tensors with values, got a {kind} one; convert or pad it first")
    samples = {len(leaf) for leaf in leaves}
    if len(samples) != 1:
        raise ConfigError(f"a batch needs tensors with one common number of samples, got {sorted(samples)}")
    if not any(leaf.numel() for leaf in leaves):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ConfigError(f"a batch of {shapes} is empty; there is nothing to learn from it")
    return leaves, spec


def signature(leaves: list[Tensor], spec: pytree.TreeSpec) -> Signature:
    """What a captured step depends on: the nest, shapes and dtypes."""
    return spec, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@runtime_checkable
class Source(Protocol):
    """Batches that the device draws itself, as ridgeline.data's ResidentBatches does.

    Attributes:
        tensors: the batch, at fixed addresses on the step's device.
    """

    tensors: Mapping[str, Tensor]

    def draw(self, seed_step: Tensor) -> None:
        """Fills `tensors` for a step, whose number is the second of `seed_step`, int64[2] on the device."""


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies small tensors by one kernel, in which a block has a whole chunk of one, and large ones each by itself."""
    if max(source.numel() for source in sources) <= CHUNK:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class _Slot:
    """A pinned copy of a batch on its way to the device."""

    def __init__(self, like: list[Tensor]) -> None:
        self.tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in like]
        self.sent = torch.cuda.Event()


class Feed:
    """Static tensors of one batch signature.

    A batch on the host is copied to pinned memory (unless it is pinned already), sent to a staging buffer on a
    stream of its own while the previous step runs, and moved from there into the static tensors on the caller's
    stream, ordered before the step. The host returns at once; it waits only when it is two batches ahead. A pinned
    batch must not be overwritten before the second next call.

    Args:
        leaves: tensors of the first batch, for shapes and dtypes.
        spec: how they nest.
        device: where the step runs.
        prefetch: False to copy from the host straight into the static tensors, in the step's own order.

    Attributes:
        static: tensors that the step reads, in the order of the leaves.
    """

    def __init__(
        self, leaves: list[Tensor], spec: pytree.TreeSpec, device: torch.device, *, prefetch: bool = True
    ) -> None:
        self.spec, self.device, self._prefetch = spec, device, prefetch
        self.static = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves]
        self._staging: list[Tensor] | None = None
        self._turn = 0

    def _open(self) -> list[Tensor]:
        """Staging buffers, pinned slots and the copy stream, made when the first batch comes from the host."""
        if self._staging is None:
            self._staging = [torch.empty_like(t) for t in self.static]
            self._slots = [_Slot(self.static), _Slot(self.static)]
            self._stream = torch.cuda.Stream(self.device)
            self._taken = torch.cuda.Event()
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._staging

    def draw(self, seed_step: Tensor) -> None:
        """The first call of a step's program: nothing, where `load` has brought the batch."""

    @torch.no_grad()  # a batch that a model has made must not bring its graph along
    def load(self, leaves: list[Tensor]) -> None:
        """Makes `leaves` the batch of the next step. Asynchronous on CUDA; see the class for the contract."""
        if self.device.type == "cpu" or all(leaf.device == self.device for leaf in leaves):
            _copy_all(self.static, leaves)
            return
        if not self._prefetch:
            for target, leaf in zip(self.static, leaves, strict=True):
                target.copy_(leaf)
            return
        staging = self._open()
        slot, self._turn = self._slots[self._turn], 1 - self._turn
        slot.sent.synchronize()
        sources = [
            leaf if leaf.is_cuda or leaf.is_pinned() else pinned.copy_(leaf)
            for leaf, pinned in zip(leaves, slot.tensors, strict=True)
        ]
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken)
            for target, source in zip(staging, sources, strict=True):
                target.copy_(source, non_blocking=True)
            slot.sent.record(self._stream)
        current.wait_event(slot.sent)
        _copy_all(self.static, staging)
        self._taken.record(current)

    def buffers(self) -> list[Tensor]:
        """The device memory it holds."""
        return [*self.static, *(self._staging or [])]

    def batch(self, part: int = 0, parts: int = 1, dtype: torch.dtype | None = None) -> Any:
        """The static batch, or one of `parts` equal pieces of it, as the nest it came in.

        Args:
            part: which piece.
            parts: into how many the samples are split.
            dtype: what floating-point tensors are converted to; None leaves them.
        """
        size = len(self.static[0]) // parts
        pieces = [t[part * size : (part + 1) * size] for t in self.static]
        if dtype is not None:
            pieces = [t.to(dtype) if t.is_floating_point() else t for t in pieces]
        return pytree.tree_unflatten(pieces, self.spec)


class DrawnFeed(Feed):
    """The static tensors of a source, which fills them inside the step."""

    def __init__(self, source: Source, device: torch.device) -> None:
        leaves, spec = tensors_of(dict(source.tensors))
        if any(leaf.device != device for leaf in leaves):
            raise ConfigError(f"the source's batch is on {leaves[0].device}, the step on {device}")
        self.spec, self.device, self.static, self.source = spec, device, leaves, source
        self._staging = None

    def draw(self, seed_step: Tensor) -> None:
        """Has the source draw the step's batch."""
        self.source.draw(seed_step)

    def load(self, leaves: list[Tensor]) -> None:
        """Nothing: the batch is drawn inside the step."""
