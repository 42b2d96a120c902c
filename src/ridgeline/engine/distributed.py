"""Data parallel training over any number of processes: one all-reduce over the flat gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import ConfigError

BUCKET = 4 * 1024 * 1024  # elements of an all-reduce: 16 MiB of fp32


class Replicas:
    """The processes that train copies of one model on different samples.

    Args:
        group: a process group; None for the default one, or for a single process where there is none.
        bucket: elements of fp32 in one all-reduce.

    Attributes:
        rank: this process' number.
        world: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, bucket: int = BUCKET) -> None:
        if bucket < 1:
            raise ConfigError(f"a bucket needs at least one element, got {bucket}")
        self.group, self.bucket = group, bucket
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)

    def same(self, flat: Tensor) -> None:
        """Gives every process the first one's values."""
        if self.world > 1:
            dist.broadcast(flat, group=self.group, group_src=0)

    @torch.no_grad()
    def sum(self, flat: Tensor) -> None:
        """Replaces `flat` by its sum over the processes, bucket by bucket."""
        if self.world > 1:
            for piece in flat.split(self.bucket):
                dist.all_reduce(piece, group=self.group)
