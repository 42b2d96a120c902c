"""Loaded modules and their kernels: packing parameters and launching on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops._cuda import driver
from ridgeline.ops._cuda.compiler import Cubin, Defines, build
from ridgeline.ops.early import early

Argument = Tensor | int | float | bytes | None

# kind of parameter → (struct code, size, alignment) in the kernel's parameter space
_KINDS = {"P": ("Q", 8, 8), "q": ("q", 8, 8), "i": ("i", 4, 4), "I": ("I", 4, 4), "f": ("f", 4, 4)}


def _kind(letter: str, number: str) -> tuple[str, int, int]:
    if letter == "M":
        size = 128 * int(number or 1)
        return f"{size}s", size, 64
    if letter == "B":
        return f"{number}s", int(number), 16
    return _KINDS[letter]


_DEFAULT_SMEM = 48 * 1024


class Kernel:
    """One kernel and its parameter list.

    The list is a string with a letter for each parameter, in order:

        P  pointer: a tensor (its first element's address), None, or an address
        i  int          I  unsigned int          q  long long          f  float
        M  `const __grid_constant__ TensorMap`: what `tensor_map` returns; M4: a struct of four, their bytes joined
        B64  a struct of 64 bytes aligned to 16 (or of another size), as bytes

    A `patient` kernel executes `wait_for_previous()` before it touches what kernels before it write: it is launched
    early (ops/early.py).
    """

    def __init__(self, handle: ctypes.c_void_p, name: str, kinds: str, patient: bool) -> None:
        self.name, self.patient, self._handle = name, patient, handle
        layout, offsets, position = "<", [], 0
        letters = re.findall(r"([A-Za-z])(\d*)", kinds)
        for letter, number in letters:
            code, size, alignment = _kind(letter, number)
            padding = -position % alignment
            layout += f"{padding}x{code}"
            offsets.append(position + padding)
            position += padding + size
        self._layout = struct.Struct(layout)
        self._buffer, self._start = driver.aligned_buffer(position)
        base = ctypes.addressof(self._buffer) + self._start
        self._parameters = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        self._pointers = [index for index, (letter, _) in enumerate(letters) if letter == "P"]
        self._smem_allowed: dict[int, int] = {}
        self._lock = threading.Lock()
        self._launch = driver.library().cuLaunchKernelEx
        self._early = driver.LaunchAttribute(driver.PROGRAMMATIC_SERIALIZATION, 0, 1)
        self._config = driver.LaunchConfig(attributes=ctypes.pointer(self._early))

    def launch(self, grid: Sequence[int], block: int, smem: int, arguments: Sequence[Argument]) -> None:
        """Launch on torch's current stream of the current device.

        Args:
            grid: thread blocks in x, y, z (missing ones are 1).
            block: threads a block.
            smem: dynamic shared memory, bytes.
            arguments: one for each parameter.

        Raises:
            RuntimeError: the driver refused the launch.
        """
        device = torch.cuda.current_device()
        if smem > _DEFAULT_SMEM and smem > self._smem_allowed.get(device, 0):
            driver.allow_dynamic_smem(self._handle, smem, device)
            self._smem_allowed[device] = smem
        values = list(arguments)
        for index in self._pointers:
            value = values[index]
            if isinstance(value, Tensor):
                values[index] = value.data_ptr()
            elif value is None:
                values[index] = 0
        config, starts_early = self._config, self.patient and early(torch.device("cuda", device))
        with self._lock:  # the backward pass may launch from a thread of its own
            config.grid[:] = (*grid, 1, 1)[:3]
            config.block[:] = (block, 1, 1)
            config.smem = smem
            config.stream = torch._C._cuda_getCurrentRawStream(device)
            config.attribute_count = int(starts_early)
            self._layout.pack_into(self._buffer, self._start, *values)
            code = self._launch(ctypes.addressof(config), self._handle, self._parameters, None)
        if code:
            driver.check(code, f"launch of {self.name} (grid {tuple(grid)}, block {block}, {smem} bytes shared)")


class Module:
    """A compiled .cu file, loaded."""

    def __init__(self, cubin: Cubin) -> None:
        self.cubin = cubin
        self._handle = driver.load_library(cubin.image)
        self._kernels: dict[tuple[str, str, bool], Kernel] = {}

    def kernel(self, name: str, kinds: str, *, patient: bool = False) -> Kernel:
        """The `extern "C"` kernel of this name; `kinds` names its parameters as in `Kernel`, as does `patient`."""
        key = (name, kinds, patient)
        if key not in self._kernels:
            self._kernels[key] = Kernel(driver.get_kernel(self._handle, name), name, kinds, patient)
        return self._kernels[key]


def current_arch() -> str:
    """The architecture of torch's current device, on Hopper with its own instructions (wgmma, setmaxnreg).

    Raises:
        UnsupportedError: there is no CUDA device, or it is older than sm_80.
    """
    driver.library()
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise UnsupportedError(f"CUDA C++ kernels need compute capability 8.0; this device has {major}.{minor}")
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@functools.cache
def _load(path: Path, defines: tuple[tuple[str, int | float | str], ...], arch: str) -> Module:
    return Module(build(path, dict(defines), arch))


def load(path: Path, defines: Defines | None = None) -> Module:
    """Compile (or take from the cache) a .cu file for the current device, and load it; each configuration once.

    Raises:
        UnsupportedError: there is no CUDA device or no NVRTC here, or the device is older than sm_80.
    """
    return _load(path, tuple(sorted((defines or {}).items())), current_arch())
