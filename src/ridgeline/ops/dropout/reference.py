"""The dropout mask as a function: the specification that every kernel repeats bit for bit.

A mask belongs to (seed, step, site, stream, counter):

    site     which dropout of the model (layer and place), an integer
    stream   the sample's global index in the step's whole batch; for attention, sample · H + head
    counter  the place inside the stream, 32 bits; one counter yields 64 bits for four elements

so lanes, gradient accumulation and several GPUs draw the same masks, the backward pass draws the forward's again
instead of storing it, and a captured step stays right because seed and step are read from device memory.

The generator is two 32×32→64 multiplications on a counter, with keys mixed by murmur3's finaliser. Measured over
2^18 counters and 40 keys: means, pairwise lane correlations, lags to 16,384 and block variances all within what
chance allows. (Dropping the rotation below left neighbouring lanes correlated at 0.06: 31 standard errors.)

Four elements share a counter, each taking 15 bits:

    hidden tensors (T, C)     the four consecutive columns 4m … 4m+3 of a row; counter = t · (C / 4) + m
    attention (T, T)          (r, c), (r+8, c+8), (r, c+8), (r+8, c) of a 16×16 tile with r, c < 8, so that a
                              matrix-unit fragment holds all four of a group in one thread, transposed or not;
                              counter = ((i // 16) · ceil(T / 16) + j // 16) · 64 + (i % 8) · 8 + j % 8
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError

MASK32 = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
CHAIN_0, CHAIN_1 = 0x243F6A88, 0x85A308D3
LEVELS = 1 << 15  # a keep decision compares 15 bits with a threshold


class DropoutState(NamedTuple):
    """What a step needs to draw its masks.

    Attributes:
        seed_step: int64[2] on the model's device: the run's seed and the step's number.
        sample_offset: global index of this batch's first sample in the step's whole batch.
    """

    seed_step: Tensor
    sample_offset: int = 0


def quantise(p: float) -> tuple[int, float]:
    """Drop probability as (threshold out of 2^15, scale of what is kept).

    Raises:
        UnsupportedError: it is below 0, or so high that it drops everything.
    """
    if not 0 <= p <= 1 - 1 / LEVELS:
        raise UnsupportedError(f"p must be from 0 to 1 − 2^−15, got {p}")
    threshold = round(p * LEVELS)
    return threshold, LEVELS / (LEVELS - threshold)


def check_dropping(p: float, state: DropoutState | None, device: torch.device) -> None:
    """That elements on `device` can be dropped with probability p by masks of `state`; None drops nothing.

    Raises:
        UnsupportedError: p is no such probability, or seed and step are not where and what kernels read.
    """
    quantise(p)
    if state is None:
        return
    found = state.seed_step
    if found.dtype != torch.int64 or found.shape != (2,) or not found.is_contiguous() or found.device != device:
        raise UnsupportedError(
            f"seed_step must be int64[2], contiguous, on {device}, got {found.dtype} of shape {tuple(found.shape)} "
            f"and strides {found.stride()} on {found.device}"
        )


def _mix(x: Tensor) -> Tensor:
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def stream_keys(seed_step: Tensor, site: int, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit keys of each stream, as int64 tensors of the stream's shape."""
    seed, step = seed_step[0], seed_step[1]
    keys = []
    for chain in (CHAIN_0, CHAIN_1):
        key = _mix(chain ^ (seed & MASK32))
        key = _mix(key ^ ((seed >> 32) & MASK32))
        key = _mix(key ^ (step & MASK32))
        key = _mix(key ^ site)
        keys.append(_mix(key ^ stream))
    return keys[0], keys[1]


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x · constant, kept clear of int64's sign bit."""
    low = x * (constant & 0xFFFF)
    high = x * (constant >> 16)
    low_sum = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (low_sum >> 32)) & MASK32, low_sum & MASK32


def random_words(counter: Tensor, key_0: Tensor, key_1: Tensor) -> tuple[Tensor, Tensor]:
    """64 random bits of each counter, as two int64 tensors that hold 32 bits each."""
    high, low = _multiply((counter ^ key_0) & MASK32, MULTIPLIER_0)
    middle = high ^ low ^ key_1
    high, low = _multiply(middle, MULTIPLIER_1)
    rotated = ((low << 15) | (low >> 17)) & MASK32
    return high ^ low, (middle + rotated) & MASK32


def _lanes(word_0: Tensor, word_1: Tensor) -> Tensor:
    """The four 15-bit numbers of each counter: low and high half of each word, stacked last."""
    return torch.stack([word_0 & 0x7FFF, (word_0 >> 16) & 0x7FFF, word_1 & 0x7FFF, (word_1 >> 16) & 0x7FFF], -1)


def hidden_keep(state: DropoutState, site: int, shape: tuple[int, int, int], p: float, device: torch.device) -> Tensor:
    """Which elements of a (B, T, C) tensor are kept: bool[B, T, C]; C is a multiple of 4."""
    B, T, C = shape
    stream_B = torch.arange(B, device=device) + state.sample_offset
    key_0, key_1 = stream_keys(state.seed_step.to(device), site, stream_B)
    counter = torch.arange(T * C // 4, device=device)
    words = random_words(counter[None], key_0[:, None], key_1[:, None])
    return (_lanes(*words) >= quantise(p)[0]).view(B, T, C)


def attention_keep(
    state: DropoutState, site: int, shape: tuple[int, int, int], p: float, device: torch.device
) -> Tensor:
    """Which attention probabilities are kept: bool[B, H, T, T] for shape (B, H, T)."""
    B, H, T = shape
    stream_BH = (torch.arange(B, device=device)[:, None] + state.sample_offset) * H + torch.arange(H, device=device)
    key_0, key_1 = stream_keys(state.seed_step.to(device), site, stream_BH)
    i, j = torch.arange(T, device=device)[:, None], torch.arange(T, device=device)[None]
    counter_TT = ((i // 16) * ((T + 15) // 16) + j // 16) * 64 + (i % 8) * 8 + j % 8
    words = random_words(counter_TT, key_0[..., None, None], key_1[..., None, None])
    row_high, column_high = (i // 8) % 2, (j // 8) % 2
    lane_TT = torch.where(row_high == column_high, row_high, 2 + row_high)
    lanes = _lanes(*words)
    chosen = lanes.gather(-1, lane_TT[None, None, :, :, None].expand(B, H, T, T, 1)).squeeze(-1)
    return chosen >= quantise(p)[0]
