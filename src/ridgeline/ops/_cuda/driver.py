"""The few calls of the CUDA driver that loading and launching a kernel take, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p

import torch

from ridgeline.errors import UnsupportedError

MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_SIGNATURES: dict[str, list[object]] = {
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuLibraryLoadData": [POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint],
    "cuLibraryGetKernel": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuKernelSetAttribute": [c_int, c_int, c_void_p, c_int],
    "cuLaunchKernelEx": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuTensorMapEncodeTiled": [
        c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32),
        POINTER(c_uint32), c_int, c_int, c_int, c_int,
    ],
}  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier, padding, and a union of 64 bytes of which an int is used."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("smem", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda with the argument types of what is used, after torch has made its context.

    Raises:
        UnsupportedError: there is no CUDA device or driver here.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("CUDA C++ kernels need a CUDA device and a CUDA build of torch; neither was found here")
    torch.cuda.init()
    loaded = ctypes.CDLL("libcuda.so.1")
    for name, argtypes in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = argtypes, c_int
    return loaded


def check(code: int, call: str) -> None:
    """Raise RuntimeError, with the driver's name and words, for a code that is not success."""
    if code:
        name, words = c_char_p(), c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        library().cuGetErrorString(code, ctypes.byref(words))
        raise RuntimeError(f"{call} failed: {(name.value or b'?').decode()}, {(words.value or b'?').decode()}")


def load_library(image: bytes) -> c_void_p:
    """Load a cubin; usable from every device's context."""
    handle = c_void_p()
    code = library().cuLibraryLoadData(ctypes.byref(handle), image, None, None, 0, None, None, 0)
    check(code, "cuLibraryLoadData")
    return handle


def get_kernel(handle: c_void_p, name: str) -> c_void_p:
    """A kernel of a loaded library, by its unmangled name."""
    kernel = c_void_p()
    check(library().cuLibraryGetKernel(ctypes.byref(kernel), handle, name.encode()), f"cuLibraryGetKernel({name})")
    return kernel


def allow_dynamic_smem(kernel: c_void_p, size: int, device: int) -> None:
    """Let a kernel ask for `size` bytes of dynamic shared memory on a device."""
    code = library().cuKernelSetAttribute(MAX_DYNAMIC_SMEM, size, kernel, device)
    check(code, f"cuKernelSetAttribute(dynamic shared memory, {size} bytes)")


def aligned_buffer(size: int, alignment: int = 64) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A host buffer and the offset in it at which `size` bytes aligned to `alignment` begin."""
    buffer = ctypes.create_string_buffer(size + alignment)
    return buffer, -ctypes.addressof(buffer) % alignment
