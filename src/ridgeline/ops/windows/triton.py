"""A batch of training windows in a few launches: which windows a step takes, and their rows, gathered.

The specification is ridgeline.data: the order of samples (order.py) and what a training window is (windows.py). The
number of the step is read from device memory, so a captured step draws the next batch at every replay.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import grid_rows

GATHER_BLOCK, GATHER_WARPS = 1024, 4
IGNORED = -100  # a target that does not count
_IGNORED = tl.constexpr(IGNORED)
_PHILOX_0, _PHILOX_1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)
_SPLIT_0, _SPLIT_1 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


class Drawn(NamedTuple):
    """What decides the windows of a step.

    Attributes:
        seed: of the shuffle.
        windows: in an epoch.
        rows: of the shuffle's table. `columns`: likewise.
        batch: samples a step, in all processes.
        offset: this process' first sample in a batch.
        context: positions a window (T).
        stride: rows of the data from one position to the next.
        offsets: positions among which a text's epoch chooses where its windows begin; 0 for games.
        ends_G, frames_G, first_G: int64, of each training game: windows up to its end, frames that have a target, and
            its first row; None for a text.
    """

    seed: int
    windows: int
    rows: int
    columns: int
    batch: int
    offset: int
    context: int
    stride: int
    offsets: int
    ends_G: Tensor | None
    frames_G: Tensor | None
    first_G: Tensor | None


@triton.jit
def philox(key_0, key_1, counter):
    """Four words of Philox4x64-10 (Salmon et al. 2011) with NumPy's counter, all uint64 scalars."""
    c_0, c_1 = counter, counter * 0
    c_2, c_3 = counter * 0, counter * 0
    m_0, m_1 = tl.full((), _PHILOX_0, tl.uint64), tl.full((), _PHILOX_1, tl.uint64)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(m_0, c_0), m_0 * c_0
        high_1, low_1 = tl.umulhi(m_1, c_2), m_1 * c_2
        c_0, c_1, c_2, c_3 = high_1 ^ c_1 ^ key_0, low_1, high_0 ^ c_3 ^ key_1, low_0
        key_0 += tl.full((), _WEYL_0, tl.uint64)
        key_1 += tl.full((), _WEYL_1, tl.uint64)
    return c_0, c_1, c_2, c_3


@triton.jit
def keyed(value, key, below):
    """A keyed random number below `below`, int64: SplitMix64's finaliser."""
    z = value.to(tl.uint64) * tl.full((), _WEYL_0, tl.uint64) + key
    z = (z ^ (z >> 30)) * tl.full((), _SPLIT_0, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), _SPLIT_1, tl.uint64)
    return ((z ^ (z >> 31)) % below.to(tl.uint64)).to(tl.int64)


@triton.jit
def permute(cell, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, rows, columns):
    """Eight rounds of a Feistel network over rows × columns cells."""
    row, column = cell // columns, cell % columns
    row = (row + keyed(column, w_0, rows)) % rows
    column = (column + keyed(row, w_1, columns)) % columns
    row = (row + keyed(column, w_2, rows)) % rows
    column = (column + keyed(row, w_3, columns)) % columns
    row = (row + keyed(column, w_4, rows)) % rows
    column = (column + keyed(row, w_5, columns)) % columns
    row = (row + keyed(column, w_6, rows)) % rows
    column = (column + keyed(row, w_7, columns)) % columns
    return row * columns + column


@triton.jit
def place_kernel(
    seed_step_ptr, start_ptr, count_ptr, ends_ptr, frames_ptr, first_ptr, seed, count, rows, columns, batch, offset,
    context, stride, offsets, games,
):  # fmt: skip
    """Row of the first position, and number of positions with a target, of one sample's window."""
    sample = tl.program_id(0)
    number = tl.load(seed_step_ptr + 1) * batch + offset + sample
    count_64, rows_64, columns_64 = tl.cast(count, tl.int64), tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
    epoch = number // count_64
    key_0, key_1 = tl.cast(seed, tl.int64).to(tl.uint64), epoch.to(tl.uint64)
    one = (key_1 * 0 + 1).to(tl.uint64)
    w_0, w_1, w_2, w_3 = philox(key_0, key_1, one)
    w_4, w_5, w_6, w_7 = philox(key_0, key_1, one + 1)
    word, _, _, _ = philox(key_0, key_1, one + 2)
    index = permute(number % count_64, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, rows_64, columns_64)
    while index >= count_64:  # a cell past the count: walk on until one falls inside
        index = permute(index, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, rows_64, columns_64)
    if ends_ptr is None:
        begin = (word % tl.cast(offsets, tl.uint64)).to(tl.int64)
        tl.store(start_ptr + sample, index * context + begin)
        tl.store(count_ptr + sample, tl.cast(context, tl.int64))
    else:
        low, high = tl.full((), 0, tl.int64), tl.cast(games, tl.int64)
        while low < high:  # the first game whose windows end behind this one
            middle = (low + high) // 2
            beyond = tl.load(ends_ptr + middle) > index
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, middle + 1)
        frames = tl.load(frames_ptr + low)
        newest = index - (tl.load(ends_ptr + low) - frames)
        start = newest - stride * (context - 1)
        start = tl.where(start < 0, newest % stride, start)
        tl.store(start_ptr + sample, tl.load(first_ptr + low) + start)
        tl.store(count_ptr + sample, tl.minimum((frames - start + stride - 1) // stride, context))


@triton.jit
def gather_kernel(
    data_ptr, out_ptr, start_ptr, count_ptr, context, stride, shift, INNER: tl.constexpr, TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tensor of a batch, (B, T, INNER): the windows' rows, `shift` rows later; absent targets do not count."""
    sample = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position, column = element // INNER, element % INNER
    count = tl.load(count_ptr + sample)
    last = tl.maximum(count - 1, 0)
    row = tl.load(start_ptr + sample) + stride * tl.minimum(position.to(tl.int64), last) + shift
    inside = element < context * INNER
    value = tl.load(data_ptr + row * INNER + column, mask=inside, other=0).to(out_ptr.dtype.element_ty)
    if TARGETS:
        value = tl.where(position < count, value, _IGNORED)
    tl.store(out_ptr + tl.cast(sample, tl.int64) * context * INNER + element, value, mask=inside)


def place_raw(drawn: Drawn, seed_step: Tensor, start_B: Tensor, count_B: Tensor) -> None:
    """The windows of the step that `seed_step` (int64[2], seed of the run and step) names: both int64[B]."""
    games = 0 if drawn.ends_G is None else len(drawn.ends_G)
    place_kernel[(len(start_B),)](
        seed_step, start_B, count_B, drawn.ends_G, drawn.frames_G, drawn.first_G, drawn.seed, drawn.windows, drawn.rows,
        drawn.columns, drawn.batch, drawn.offset, drawn.context, drawn.stride, drawn.offsets, games, num_warps=1,
    )  # fmt: skip


def gather_raw(
    data_NK: Tensor, out_BTK: Tensor, start_B: Tensor, count_B: Tensor, *, stride: int, shift: int, targets: bool
) -> None:
    """One tensor of the batch from its rows: out[b, t] = data[start_b + stride · t + shift], converted."""
    B, T, K = out_BTK.shape
    gather_kernel[(B, grid_rows(T * K, GATHER_BLOCK))](
        data_NK, out_BTK, start_B, count_B, T, stride, shift,
        INNER=K, TARGETS=targets, BLOCK=GATHER_BLOCK, num_warps=GATHER_WARPS,
    )  # fmt: skip


def place_buffers(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Start and count of each window, int64[B]."""
    start_B, count_B = torch.zeros(2, batch, dtype=torch.int64, device=device).unbind()
    return start_B, count_B
