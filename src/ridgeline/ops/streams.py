"""Streams beside the current one, for kernels that nothing waits for at once and that leave part of the card free."""

from __future__ import annotations

import functools

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one that belongs to the stream that is current: the same for every call, in a captured step a branch."""
    return _beside(device, torch.cuda.current_stream(device).stream_id)


@functools.cache
def _beside(device: torch.device, stream_id: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
