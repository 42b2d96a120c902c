"""Cross-entropy of long rows with their gradient, on Hopper: each logit is read once. Kernel: rows_sm90.cu."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.cross_entropy.reference import IGNORE

SOURCE = Path(__file__).parent / "rows_sm90.cu"
KINDS = "PPPPPPiiqq"
THREADS = 1024
PIECE = 8  # logits that a thread takes at a time
FEWEST = 2048  # classes, beyond which a row is worth a block
MOST_PIECES = 7  # of a thread, which has 64 registers
EXCHANGE_BYTES = 2 * 4 * THREADS // 32


def fits(device: torch.device, dtype: torch.dtype, classes: int) -> bool:
    """Whether rows of so many classes, padded to a multiple of 8, are for this kernel, on this device."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and FEWEST < classes <= MOST_PIECES * PIECE * THREADS
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def defines(classes: int, width: int, counts: int, dtype: torch.dtype, targets: torch.dtype) -> dict[str, int]:
    """The macros that compile the kernel."""
    return {
        "RL_FP16": int(dtype == torch.float16),
        "V": classes,
        "WIDTH": width,
        "COUNTS": counts,
        "TARGET_BYTES": targets.itemsize,
        "IGNORE": IGNORE,
    }


def smem(width: int) -> int:
    """Bytes of dynamic shared memory."""
    return -(-width // (PIECE * THREADS)) * 16 * THREADS + EXCHANGE_BYTES


def loss_partials(N: int, tensor: Tensor) -> int:
    """Partial losses (blocks) of a launch on the tensor's card."""
    return min(N, processors(tensor.device))


@functools.lru_cache(maxsize=64)
def _kernel(
    device: int, classes: int, width: int, counts: int, dtype: torch.dtype, targets: torch.dtype
) -> cuda.Kernel:
    """The loaded kernel for the current device."""
    macros = defines(classes, width, counts, dtype, targets)
    return cuda.load(SOURCE, macros).kernel("cross_entropy", KINDS, patient=True)


def cross_entropy_raw(
    logits_NW: Tensor,
    targets_N: Tensor,
    dlogits_NW: Tensor,
    losses_P: Tensor,
    counts: Tensor,
    *,
    classes: int,
    gradient_scale: Tensor | None = None,
) -> None:
    """Losses and the gradient of the logits, as the function of this name in triton.py, without column sums.

    Args:
        logits_NW, dlogits_NW: bf16 or fp16, W a multiple of 8, as are the strides of their rows.
        losses_P: fp32, `loss_partials` of them.
    """
    N, W = logits_NW.shape
    kernel = _kernel(logits_NW.get_device(), classes, W, counts.shape[0], logits_NW.dtype, targets_N.dtype)
    arguments = (
        logits_NW, targets_N, dlogits_NW, losses_P, counts, gradient_scale, N, targets_N.stride(0),
        logits_NW.stride(0), dlogits_NW.stride(0),
    )  # fmt: skip
    kernel.launch((losses_P.shape[0],), THREADS, smem(W), arguments)
