"""Memory for GELU's derivative in 8 bits, in the order of the Hopper product that writes and reads it.

What a code means: slope_codes.cuh.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops._cuda import tensor_map

TILE = 64  # rows and columns whose codes lie together
LINE = 64  # of 16-bit words: what a copy takes
LINES = TILE * TILE // (2 * LINE)  # of a tile


def codes_empty(like: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialised uint8 [row tiles, column tiles, codes of a tile], an even number of tiles each way."""
    pairs = (-(-rows // (2 * TILE)), -(-columns // (2 * TILE)))
    return like.new_empty(2 * pairs[0], 2 * pairs[1], TILE * TILE, dtype=torch.uint8)


def is_coded(slope: Tensor | None) -> bool:
    """Whether slopes are such codes."""
    return slope is not None and slope.dtype == torch.uint8


def matrix_map(x: Tensor, box: tuple[int, int], lines: int) -> bytes:
    """The copy engine's map of a matrix, a box at a time, or of codes, `lines` lines at a time."""
    if not is_coded(x):
        return tensor_map(x, box)
    return tensor_map(x.view(torch.float16).view(-1, LINE), (lines, LINE))
