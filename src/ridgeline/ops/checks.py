"""What the public functions of ops demand of their tensors; None is right wherever a tensor may be missing.

Each check raises UnsupportedError with the name of the tensor, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError

STORAGE = (torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*STORAGE, torch.float64)  # the last for the plain implementations


def _given(tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def floats(**tensors: Tensor | None) -> None:
    """Each holds floats and has an axis."""
    for name, tensor in _given(tensors):
        if tensor.dtype not in FLOATS:
            raise UnsupportedError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dim() == 0:
            raise UnsupportedError(f"{name} must have at least one axis, got a scalar")


def storage(**tensors: Tensor | None) -> None:
    """Each is contiguous and of a storage dtype (fp32, bf16, fp16)."""
    for name, tensor in _given(tensors):
        if tensor.dtype not in STORAGE:
            raise UnsupportedError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise UnsupportedError(
                f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}"
            )


def alike(like: str, x: Tensor, *, strict: bool, **tensors: Tensor | None) -> None:
    """Each has the dtype of `x`, which is called `like`; any where autocast casts it, unless `strict`."""
    for name, tensor in _given(tensors):
        if tensor.dtype != x.dtype and (strict or not torch.is_autocast_enabled(x.device.type)):
            raise UnsupportedError(f"{name} must be {x.dtype} like {like}, got {tensor.dtype}")


def axes(count: int, **tensors: Tensor | None) -> None:
    """Each has this many axes."""
    for name, tensor in _given(tensors):
        if tensor.dim() != count:
            raise UnsupportedError(f"{name} must have {count} axes, got shape {tuple(tensor.shape)}")


def devices(device: torch.device, **tensors: Tensor | None) -> None:
    """Each is on `device`."""
    for name, tensor in _given(tensors):
        if tensor.device != device:
            raise UnsupportedError(f"{name} must be on {device}, got {tensor.device}")


def shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    """The tensor has the expected shape."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise UnsupportedError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
