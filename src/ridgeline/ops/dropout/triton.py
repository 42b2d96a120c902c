"""The dropout mask in Triton: device functions that other kernels call, and dropout of a hidden tensor alone.

Bit for bit the masks of `reference.py`. Everything is unsigned 32-bit; one widening multiplication gives both halves.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two
from ridgeline.ops.dropout.reference import CHAIN_0, CHAIN_1, MULTIPLIER_0, MULTIPLIER_1, DropoutState, quantise

_CHAIN_0, _CHAIN_1 = tl.constexpr(CHAIN_0), tl.constexpr(CHAIN_1)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(MULTIPLIER_0), tl.constexpr(MULTIPLIER_1)


@triton.jit
def mix(x):
    """Murmur3's finaliser without its last multiplication's sibling: uint32 → uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def site_keys(seed_step_ptr, site):
    """Both keys of a site before the stream is mixed in: two uint32 scalars. Once a program."""
    seed = tl.load(seed_step_ptr).to(tl.uint64, bitcast=True)
    step = tl.load(seed_step_ptr + 1).to(tl.uint32)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    place = site.to(tl.uint32)
    key_0 = mix(mix(mix(mix(low ^ _CHAIN_0) ^ high) ^ step) ^ place)
    key_1 = mix(mix(mix(mix(low ^ _CHAIN_1) ^ high) ^ step) ^ place)
    return key_0, key_1


@triton.jit
def multiply_wide(x, constant):
    """High and low 32 bits of a uint32 times a uint32 constant."""
    product = x.to(tl.uint64) * constant
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def random_words(counter, key_0, key_1):
    """64 random bits of each uint32 counter: two uint32 of the counter's shape. Keys are the stream's."""
    high, low = multiply_wide(counter ^ key_0, _MULTIPLIER_0)
    middle = high ^ low ^ key_1
    high, low = multiply_wide(middle, _MULTIPLIER_1)
    return high ^ low, middle + ((low << 15) | (low >> 17))


@triton.jit
def hidden_keep_tile(
    site_key_0, site_key_1, sample_offset, row_R, column_C, T, C: tl.constexpr, THRESHOLD: tl.constexpr
):
    """Which elements of rows `row_R` (of B·T) and columns `column_C` of a (B, T, C) tensor are kept: bool[R, C]."""
    stream_R = (row_R // T + sample_offset).to(tl.uint32)
    key_0, key_1 = mix(site_key_0 ^ stream_R)[:, None], mix(site_key_1 ^ stream_R)[:, None]
    counter_RC = ((row_R % T) * (C // 4))[:, None] + (column_C // 4)[None, :]
    word_0, word_1 = random_words(counter_RC.to(tl.uint32), key_0, key_1)
    lane_C = column_C % 4
    word_RC = tl.where((lane_C < 2)[None, :], word_0, word_1)
    bits_RC = (word_RC >> ((lane_C % 2) * 16)[None, :].to(tl.uint32)) & 0x7FFF
    return bits_RC >= THRESHOLD


@triton.jit(do_not_specialize=["site", "sample_offset", "N"])
def dropout_kernel(
    x_ptr, out_ptr, seed_step_ptr, site, sample_offset, N, T, scale,
    C: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = x · keep · scale over rows of C; the backward pass is the same kernel on the gradient."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row_R = first.to(tl.int32) + tl.arange(0, ROWS)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    key_0, key_1 = site_keys(seed_step_ptr, site)
    keep_RC = hidden_keep_tile(key_0, key_1, sample_offset, row_R, column_C, T, C, THRESHOLD)
    offset_RC = (tl.arange(0, ROWS) * C)[:, None] + column_C[None, :]
    inside_RC = (row_R < N)[:, None] & (column_C < C)[None, :]
    x_RC = tl.load(x_ptr + first * C + offset_RC, mask=inside_RC, other=0.0).to(tl.float32)
    out_RC = tl.where(keep_RC, x_RC * scale, 0.0)
    tl.store(out_ptr + first * C + offset_RC, out_RC.to(out_ptr.dtype.element_ty), mask=inside_RC)


def dropout_raw(
    x_NC: Tensor, out_NC: Tensor, T: int, p: float, state: DropoutState, site: int, config: Launch | None = None
) -> None:
    """Write the dropped `x_NC` into `out_NC` (which may be `x_NC`); N = B · T rows, both contiguous."""
    N, C = x_NC.shape
    threshold, scale = quantise(p)
    block_c = min(power_of_two(C), 1024)
    config = config or Launch(rows=2048 // max(block_c, 8), warps=4)
    grid = (grid_rows(N, config.rows), triton.cdiv(C, block_c))
    dropout_kernel[grid](
        x_NC, out_NC, state.seed_step, site, state.sample_offset, N, T, scale,
        C=C, THRESHOLD=threshold, ROWS=config.rows, BLOCK_C=block_c, num_warps=config.warps,
    )  # fmt: skip
