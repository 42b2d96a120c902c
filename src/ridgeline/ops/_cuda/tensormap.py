"""Tensor maps: how the bulk copy engine of sm_90 and newer sees a tensor in device memory."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ridgeline.ops._cuda import driver

_DTYPES = {torch.bfloat16: 9, torch.float16: 6, torch.float32: 7, torch.int32: 3, torch.uint8: 0}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTION_256B = 3


@functools.lru_cache(maxsize=8192)
def _encode(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    rank, size = len(shape), dtype.itemsize
    if strides[-1] != 1 or any(stride * size % 16 for stride in strides[:-1]) or address % 16:
        raise ValueError(
            "a tensor map needs an address and row strides that are multiples of 16 bytes and a last stride of 1; "
            f"got address {address:#x}, strides {strides} of {size}-byte elements"
        )
    buffer, start = driver.aligned_buffer(128)
    code = driver.library().cuTensorMapEncodeTiled(
        ctypes.addressof(buffer) + start,
        _DTYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * max(rank - 1, 1))(*[stride * size for stride in strides[-2::-1]]),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLES[swizzle],
        _PROMOTION_256B,
        0,
    )
    driver.check(code, f"cuTensorMapEncodeTiled (shape {shape}, strides {strides}, box {box}, swizzle {swizzle})")
    return buffer.raw[start : start + 128]


def tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128) -> bytes:
    """The 128-byte map of a tensor, for a kernel's parameter of kind M.

    What a copy reads outside the tensor is zero, and what it would write there is dropped.

    Args:
        tensor: rank 1 to 5, bf16, fp16, fp32, int32 or uint8; last stride 1, other strides multiples of 16 bytes.
        box: elements a copy moves along each dimension, in the tensor's order; at most 256 each, and with a swizzle
            the last one spans at most `swizzle` bytes.
        swizzle: 0, 32, 64 or 128 bytes.

    Raises:
        ValueError: the tensor's address or strides are not what the copy engine takes.
    """
    return _encode(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, box, swizzle)
