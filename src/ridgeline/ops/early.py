"""Early launches: a kernel's blocks start while the kernel before still runs, and wait for its end before they read.

On cards from sm_90 on, a kernel that begins by waiting for the one before it may be launched with a programmatic
dependency: its launch, and whatever it sets up first, hide under the other's end. The wait covers all work that came
before on the stream, because the kernel before has waited likewise. In a captured step the dependency becomes an edge
of the graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

_on = True


@functools.cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def early(device: torch.device) -> bool:
    """Whether kernels that wait for the one before them are launched early on `device`."""
    if not _on or device.type != "cuda":
        return False
    return _capable(torch.cuda.current_device() if device.index is None else device.index)


@contextlib.contextmanager
def early_launches(on: bool) -> Iterator[None]:
    """Early launches or none for the duration, to measure and to look for faults; applies to every thread."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before
