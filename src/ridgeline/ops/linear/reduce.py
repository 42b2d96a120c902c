"""Many small sums over shares in one launch: the last stage of weight gradients and of every column sum."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda

SOURCE = Path(__file__).parent / "reduce.cu"
MAX_JOBS = 128  # of a launch: 7 KB of parameters
THREADS = 256
MANY = 24  # shares from which a block's warps split them, as in the kernel
Room = Callable[[int], Tensor | None]  # hands out so many fp32 numbers for sums of squares; None if it has not as many
_JOB = struct.Struct("<QQqiiiiiiii")


class Job(NamedTuple):
    """dst (+)= Σ over the first axis of `shares`.

    Attributes:
        shares_SRC: fp32 [S, R, C], last stride 1; a column sum's partials [P, C] come as [P, 1, C].
        dst_RC: fp32 or the activations' 16-bit dtype, [R, C], last stride 1.
        accumulate: add to dst instead of overwriting it.
    """

    shares_SRC: Tensor
    dst_RC: Tensor
    accumulate: bool = False


def _blocks(S: int, R: int, C: int) -> int:
    if S < MANY:
        quads = 1 if S > 3 else 2  # that a thread has under way, as in the kernel
        return max(1, min(R * ((C + 3) // 4) // (quads * THREADS), 128))
    return R * ((C + 31) // 32)


def pack(jobs: Sequence[Job], ready: int = 0) -> tuple[bytes, int, int]:
    """The kernel's first parameter, the number of blocks, and how many of these are of the first `ready` jobs."""
    packed, grid, early = b"", 0, 0
    for number, (shares_SRC, dst_RC, accumulate) in enumerate(jobs):
        S, R, C = shares_SRC.shape
        if shares_SRC.dtype != torch.float32 or shares_SRC.stride(2) != 1 or dst_RC.stride(-1) != 1:
            raise ValueError(f"shares must be float32 with contiguous columns, got {shares_SRC.dtype}")
        if tuple(dst_RC.shape) != (R, C):
            raise ValueError(f"destination must have shape {(R, C)}, got {tuple(dst_RC.shape)}")
        blocks = _blocks(S, R, C)
        packed += _JOB.pack(
            shares_SRC.data_ptr(), dst_RC.data_ptr(), shares_SRC.stride(0), S, R, C, shares_SRC.stride(1),
            dst_RC.stride(0), int(accumulate), int(dst_RC.dtype != torch.float32), grid,
        )  # fmt: skip
        grid += blocks
        early += blocks * (number < ready)
    return packed.ljust(MAX_JOBS * _JOB.size, b"\0"), grid, early


def blocks_of(jobs: Sequence[Job]) -> int:
    """Of all launches."""
    return sum(_blocks(*shares_SRC.shape) for shares_SRC, _, _ in jobs)


def reduce_raw(jobs: Sequence[Job], *, ready: int = 0, squares: Tensor | None = None) -> None:
    """Run the jobs, up to 128 a launch; bitwise the same on every run.

    Args:
        jobs: the sums.
        ready: so many of the first jobs sum what was there before the last kernel on the stream began.
        squares: fp32, a number for every block of all launches; they add up to the squares of all sums, without what
            these are added to, before they are rounded.

    Raises:
        ValueError: a job whose tensors do not fit together.
    """
    fp16 = any(job.dst_RC.dtype == torch.float16 for job in jobs)
    module = cuda.load(SOURCE, {"MAX_JOBS": MAX_JOBS, "RL_FP16": int(fp16)})
    kernel = module.kernel("reduce", f"B{MAX_JOBS * _JOB.size}iiP", patient=True)
    done = 0
    for first in range(0, len(jobs), MAX_JOBS):
        part = jobs[first : first + MAX_JOBS]
        packed, grid, early = pack(part, ready - first)
        left = None if squares is None else squares[done:]
        kernel.launch((grid,), THREADS, 0, (packed, len(part), early, left))
        done += grid
