"""Where results go, as a policy of a rung: fresh memory or memory that an earlier result has left, zeroed or not."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from ridgeline.ops.scope import scope


class Buffers:
    """Hands out a buffer for every result of a pass.

    Without reuse a buffer comes from PyTorch's allocator, which keeps what is freed and rarely asks the driver. With
    reuse the first step allocates, and every later one finds the same buffers: one goes back to the shelf when the
    last kernel that reads it has been launched, which on one stream is before any kernel that overwrites it. A captured
    step goes on writing to the buffers that it was captured with, so none of them may ever be freed: what leaves the
    pass, for autograd to keep and to drop, is `lasting` and comes from PyTorch's allocator, where a graph owns it.

    Args:
        zero_fill: fill each buffer with zeros before it is handed out.
        reuse: keep buffers that are done with for later results of the same shape and dtype.

    Attributes:
        allocated: buffers asked of the allocator so far.
    """

    def __init__(self, *, zero_fill: bool, reuse: bool) -> None:
        self._zero_fill, self._reuse = zero_fill, reuse
        self._shelves: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self.allocated = 0

    def new(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None, lasting: bool = False) -> Tensor:
        """A contiguous buffer on the device of `like`, in its dtype unless told otherwise.

        With `lasting` it leaves the pass, and must not be given back.
        """
        dtype = like.dtype if dtype is None else dtype
        shelf = self._shelves[torch.Size(shape), dtype] if self._reuse and not lasting else []
        if shelf:
            x = shelf.pop()
        else:
            x = torch.empty(shape, dtype=dtype, device=like.device)
            self.allocated += 1
        if self._zero_fill:
            with scope("copies and fills"):
                x.zero_()
        return x

    def done(self, *buffers: Tensor | None) -> None:
        """The last kernel that reads these has been launched; each must have come from `new`, once."""
        if self._reuse:
            for x in buffers:
                if x is not None:
                    self._shelves[x.shape, x.dtype].append(x)
