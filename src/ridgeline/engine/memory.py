"""What a step keeps in memory, by name, and what it says when there is no more."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.engine.feed import Feed
from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.update import Update
from ridgeline.errors import OutOfMemoryError, lacks_memory

GIB = 2**30


def kept(flat: FlatParameters, update: Update, feeds: Iterable[Feed]) -> dict[str, int]:
    """Bytes that lie at fixed addresses from the first step on, by what they are for."""
    buffers = {
        "master weights": [flat.masters],
        "weight copies": [] if flat.copies is flat.masters else [flat.copies],
        "gradients": [tensor for lane in flat.lanes for tensor in lane.buffers()],
        "optimiser moments": [update.first, update.second, *update.workspace()],
        "batches": [tensor for feed in feeds for tensor in feed.buffers()],
    }
    return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in buffers.items()}


def _needs(keeps: Mapping[str, int], device: torch.device) -> str:
    """What needs how much, where a step on `device` found no more."""
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in keeps.items() if size)
    if device.type != "cuda":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return f"of the machine's {total / GIB:.1f} GiB the step keeps {sizes}, and found no more for its activations"
    total, peak = torch.cuda.get_device_properties(device).total_memory, torch.cuda.max_memory_allocated(device)
    return (
        f"of the card's {total / GIB:.1f} GiB the step keeps {sizes}, and with its activations and workspace held "
        f"{peak / GIB:.1f} when it found no more"
    )


def described(leaves: Sequence[Tensor]) -> str:
    """Shapes and dtypes of a batch's tensors, in words."""
    return ", ".join(f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves)


@contextlib.contextmanager
def enough(leaves: Sequence[Tensor], device: torch.device, keeps: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Around what a batch needs memory for.

    Args:
        leaves: tensors of the batch.
        device: where the step runs.
        keeps: gives the bytes that it holds anyway, by what they are for.

    Raises:
        OutOfMemoryError: there is too little; says what needs how much.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = (
            f"out of memory on a batch of {described(leaves)}: {_needs(keeps(), device)} ({said}); lower the batch or "
            "raise accumulate"
        )
        traceback.clear_frames(error.__traceback__)  # which hold the pass's activations
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemoryError(message) from error
