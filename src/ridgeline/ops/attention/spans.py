"""Backward of plain attention at head width 32 in one kernel, in CUDA C++ for Hopper.

The plan is in cuda/plain_spans.cuh. Launches that write into given buffers. Where heads are few, several thread blocks
share the keys of a head or the query heads of its keys; a second kernel then adds up what they leave, most of dQ while
the first one still runs.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.attention import hopper

_KINDS, _SUM_KINDS = "MMMMPPPPPPPPPPiiiiiiiiiifiIII", "PPPPPPPPiiiiiiiiif"

WIDTH = 32  # of a head
SPAN, GROUPS = 4, 2  # blocks of 64 keys of a thread block at a time, and warpgroups that compute with them
STAGES = 8  # tiles of queries in a thread block's ring
SQUARES = 3  # tiles whose score gradients wait for dQ's warpgroup
STATISTICS = 4  # tiles whose rows' statistics are held
THREADS = 128 * (GROUPS + 2)
SMEM = (STAGES + 2 * SPAN) * 256 * WIDTH + SQUARES * SPAN * 8192 + 512 * STATISTICS + 16 * (STAGES + SQUARES + 2)


def defines(dtype: torch.dtype, sums: bool) -> dict[str, int]:
    """Macros of the sources: `dtype` of the tensors, and whether there are column sums."""
    return {
        "HEAD_WIDTH": WIDTH, "RING_STAGES": STAGES, "SQUARE_STAGES": SQUARES, "RL_FP16": int(dtype == torch.float16),
        "RL_COLUMN_SUMS": int(sums),
    }  # fmt: skip


class Split(NamedTuple):
    """What a thread block takes at a time.

    Attributes:
        parts: into how many the query heads of a key head are split.
        key_parts: into how many the spans of keys are.
        units: of all samples and key heads.
    """

    parts: int
    key_parts: int
    units: int


def _longest(tiles: range, key_parts: int) -> int:
    """Tiles of queries of the part of a head's spans that has the most; the parts take turns there and back."""
    sums = [0] * key_parts
    for number, length in enumerate(tiles):
        turn, part = divmod(number, key_parts)
        sums[part if turn % 2 == 0 else key_parts - 1 - part] += length
    return max(sums)


@functools.lru_cache(maxsize=256)
def best_split(B: int, T: int, H: int, G: int, at_once: int) -> Split:
    """The split whose last thread block is done first, so many at once; of equal ones that with the fewest parts."""
    tiles = range(-(-T // 64), 0, -SPAN)  # of each span
    found = []
    for parts, key_parts in itertools.product(range(1, H // G + 1), range(1, len(tiles) + 1)):
        if H // G % parts == 0:
            units = B * G * parts * key_parts
            time = -(-units // at_once) * _longest(tiles, key_parts) * (H // (G * parts))
            found.append((time, parts * key_parts, Split(parts, key_parts, units)))
    return min(found)[-1]


def split(q_BTHD: Tensor, k_BTGD: Tensor) -> Split:
    """The best split on the card where the tensors are."""
    B, T, H, _ = q_BTHD.shape
    return best_split(B, T, H, k_BTGD.shape[2], processors(q_BTHD.device))


def partial_sums(B: int, T: int, H: int, G: int, at_once: int) -> tuple[int, int]:
    """Numbers of fp32 that dQ's sums take, of all units where several share a head's keys, else of those at once; and
    those of dK and dV each, where several thread blocks share the query heads of a key head."""
    (parts, key_parts, units), blocks = best_split(B, T, H, G, at_once), -(-T // 64)
    places = units if key_parts > 1 else min(at_once, units) if blocks > SPAN else 0
    return places * (H // (G * parts)) * blocks * 64 * WIDTH, B * G * parts * T * WIDTH if parts > 1 else 0


def _grid(units: int, device: torch.device) -> int:
    return min(processors(device), units)


def column_sum_rows(q_BTHD: Tensor, k_BTGD: Tensor) -> int:
    """Rows of the partial column sums that `backward` can leave."""
    shares = split(q_BTHD, k_BTGD)
    summed = q_BTHD.shape[0] * -(-q_BTHD.shape[1] // 64) if shares.key_parts > 1 else 0
    return 4 * max(GROUPS * _grid(shares.units, q_BTHD.device), summed)


def backward(
    d_out_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse_BHT: Tensor,
    dq_BTHD: Tensor,
    dk_BTGD: Tensor,
    dv_BTGD: Tensor,
    *,
    scale: float,
    column_sums: Tensor | None = None,
) -> None:
    """All gradients of plain attention, in a fixed order of summation.

    Args:
        d_out_BTHD: gradient of the output, same dtype, strided as the inputs.
        q_BTHD, k_BTGD, v_BTGD, out_BTHD, lse_BHT: as in plain.forward.
        dq_BTHD, dk_BTGD, dv_BTGD: gradients; heads are neighbours, any row pitch (dk's and dv's the same).
        scale: of the scores.
        column_sums: fp32 (`column_sum_rows`, (H + 2 G) · D), contiguous, or None: partial sums over all rows of dq, dk
            and dv, side by side; their sum over the first axis is the gradient of the joint projection's bias.
            Those of dk are zeros, as they would be without rounding.

    Raises:
        UnsupportedError: out or a gradient is not laid out so, or out's rows do not begin at multiples of 16 bytes.
    """
    (B, T, H, D), G, device = q_BTHD.shape, k_BTGD.shape[2], q_BTHD.device
    (parts, key_parts, units), blocks = split(q_BTHD, k_BTGD), -(-T // 64)
    grid, shared = _grid(units, device), H // (G * parts)
    of_queries, of_keys = partial_sums(B, T, H, G, processors(device))
    dq_sums = torch.empty(of_queries, device=device)
    notes = torch.empty(units * shared * -(-blocks // SPAN) * (key_parts > 1), dtype=torch.int32, device=device)
    heads = torch.empty(2, of_keys, device=device)
    sum_rows = 0 if column_sums is None else len(column_sums)
    q_pitch, kv_pitch = hopper.pitch("dq", dq_BTHD), hopper.common_pitch(dk_BTGD, dv_BTGD)
    o_pitch = hopper.pitch("out", out_BTHD)
    if o_pitch % 8 or out_BTHD.data_ptr() % 16:
        raise UnsupportedError(f"out must begin at a multiple of 16 bytes with rows of such a pitch, got {o_pitch}")
    arguments: tuple[cuda.Argument, ...] = (
        *(hopper.tiles(x) for x in (q_BTHD, k_BTGD, v_BTGD, d_out_BTHD)), out_BTHD, lse_BHT, dq_BTHD, dk_BTGD, dv_BTGD,
        dq_sums, heads[0], heads[1], column_sums, notes, T, H, shared, parts, key_parts, units, o_pitch, q_pitch,
        kv_pitch, sum_rows, scale, G * parts, *(hopper.inverse(x) for x in (key_parts, G * parts, parts)),
    )  # fmt: skip
    macros = defines(q_BTHD.dtype, column_sums is not None)
    module = cuda.load(hopper.SOURCES / "plain_backward.cu", macros)
    module.kernel("attention_plain_backward", _KINDS, patient=True).launch((grid,), THREADS, SMEM, arguments)
    if key_parts > 1:
        module = cuda.load(hopper.SOURCES / "plain_sum.cu", macros)
        arguments = (
            dq_sums, dq_BTHD, column_sums, notes, heads[0], heads[1], dk_BTGD, dv_BTGD, T, H, shared, parts, key_parts,
            B, q_pitch, kv_pitch, (H + 2 * G) * D, scale,
        )  # fmt: skip
        kernel = module.kernel("attention_plain_sum", _SUM_KINDS, patient=True)
        for_keys = -(-2 * B * T * G * D // (4 * 128)) if parts > 1 else 0
        kernel.launch((blocks * B * H + for_keys,), 128, 0, arguments)
    elif parts > 1:
        hopper.sum_groups((heads[0], heads[1]), (dk_BTGD, dv_BTGD), parts, kv_pitch)
