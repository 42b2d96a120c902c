"""Whether Triton can run here, and the arithmetic of launches. Does not import Triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch

from ridgeline.errors import UnsupportedError, nearest

INTERPRETED_PROGRAMS = 3  # "processors" of the interpreter: few, and odd, so that work divides unevenly in tests


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        rows: rows of a tile.
        warps: warps of a program.
        per_processor: programs a multiprocessor, where a kernel loops over tiles.
        columns: columns of a tile, where a tile does not hold a whole row.
        stages: tiles in flight, where a loop's loads are pipelined; 1 for none.
    """

    rows: int
    warps: int
    per_processor: int = 4
    columns: int = 1024
    stages: int = 1


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it with: pip install triton"
    if interpreting():
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA card, got device {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton kernels need compute capability 8.0 or newer, this card has {major}.{minor}"
    return None


def availability(impl: str, known: tuple[str, ...], device: torch.device) -> str | None:
    """Why an op with the implementations `known` cannot run `impl` on `device`, or None when it can."""
    if impl not in known:
        return nearest(impl, known, "implementation")
    return triton_missing(device) if impl == "triton" else None


def demand(impl: str, known: tuple[str, ...], device: torch.device) -> None:
    """Nothing, where `impl` can run on `device`.

    Raises:
        UnsupportedError: it cannot, with the reason.
    """
    reason = availability(impl, known, device)
    if reason is not None:
        raise UnsupportedError(f"impl={impl!r} cannot run: {reason}")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def grid_rows(n: int, rows: int) -> int:
    """Programs that cover `n` rows, `rows` each."""
    return -(-n // rows)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def processors(device: torch.device) -> int:
    """Multiprocessors of a card; a small odd number where kernels are interpreted."""
    return INTERPRETED_PROGRAMS if device.type != "cuda" else _processors(_index(device))


@functools.cache
def _program_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin  # type: ignore[attr-defined]


def program_bytes(device: torch.device) -> int:
    """Shared memory that a program can have; none is counted where kernels are interpreted."""
    return 0 if device.type != "cuda" else _program_bytes(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
