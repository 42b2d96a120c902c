"""Launches of the heads' Hopper kernel, which takes a head forward and back. Kernel: heads_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops._triton.support import processors
from ridgeline.ops.linear.products import forward_raw
from ridgeline.ops.policy_heads.launch import HeadProducts, Packed, Passed
from ridgeline.ops.policy_heads.layout import HeadPlace, Layout
from ridgeline.ops.policy_heads.reference import HeadWeights

SOURCE = Path(__file__).parent / "heads_sm90.cu"
KINDS = "MMMPPPPPPPPPPiiiiif"
SMEM_LIMIT = 227 * 1024
THREADS = 512
TILE, GROUPS, WARPS = 64, 2, 8  # rows of a tile, warpgroups that take tiles, warps of those
STEP = 16  # a head's inner width is padded to a multiple of it
LINE = 64  # numbers in 128 bytes: rows start at multiples of these, or every copy of 128 bytes takes parts of two lines
NARROW = 64  # columns of the tile of a head's dl and side


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def side_at(place: HeadPlace) -> int:
    """The first column of [earlier logits | row mean | 1 / row scale] behind the logits' gradients."""
    return _up(place.classes, 8)


def smem(place: HeadPlace) -> int:
    """Bytes of dynamic shared memory of a head's kernel."""
    chunks = -(-place.padded // TILE)
    tile = TILE * 128
    weights = chunks * 128 * (_up(place.classes, 16) + _up(place.earlier, 16))
    vectors, barriers = chunks * 64 * 8 + side_at(place) * 4, 8 * (1 + 3 * GROUPS * (chunks + 1))
    return 2 * GROUPS * chunks * tile + GROUPS * tile + weights + vectors + barriers


def defines(plan: Layout, place: HeadPlace, dtype: torch.dtype, targets: torch.dtype) -> dict[str, int]:
    """The macros that compile a head's kernel."""
    return {
        "RL_FP16": int(dtype == torch.float16),
        "INNER": place.padded,
        "WIDTH": plan.width,
        "V": place.classes,
        "E": place.earlier,
        "HEARD": int(place.index + 1 < len(plan.heads)),
        "TARGET_BYTES": targets.itemsize,
        "TARGET_SIGNED": int(targets.is_signed),
        "CLASS_AT": place.class_at,
        "LOSS_AT": plan.classes + 2 * place.index,
    }


def unfit(plan: Layout, dtype: torch.dtype) -> str | None:
    """Why heads of these sizes and this storage are not for the kernel, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the heads' Hopper kernel takes bfloat16 or float16, got {dtype}"
    for place in plan.heads:
        columns = side_at(place) + _up(place.earlier + 2, 8)
        if columns > NARROW or smem(place) > SMEM_LIMIT:
            return (
                f"the heads' Hopper kernel takes a head whose classes and heard logits are about {NARROW - 8} together "
                f"and whose inner width is up to 320, got {place.classes} + {place.earlier} and {place.inner}"
            )
    return None


@functools.lru_cache(maxsize=64)
def _kernel(device: int, plan: Layout, place: HeadPlace, dtype: torch.dtype, targets: torch.dtype) -> cuda.Kernel:
    """The loaded kernel of a head for the current device."""
    return cuda.load(SOURCE, defines(plan, place, dtype, targets)).kernel("head", KINDS, patient=True)


def forward(
    plan: Layout, packed: Packed, heads: Sequence[HeadWeights], x_NC: Tensor, targets_NK: Tensor, *, eps: float
) -> Passed:
    """All heads, and the row-wise part of their backward pass.

    Args:
        plan, packed, heads: of `launch.layout_of` and `launch.pack`.
        x_NC: contiguous.
        targets_NK: any integer dtype.
        eps: of the norms.
    """
    N, K = targets_NK.shape
    q_NW = x_NC.new_empty(N, _up(plan.inner, LINE))[:, : plan.inner]
    forward_raw(x_NC, packed.a_WC, q_NW, impl="cuda")
    heard_NE = x_NC.new_empty(N, _up(plan.heads[-1].earlier, 8))
    state_2N = x_NC.new_empty(2, N, dtype=torch.float32)
    rows_K2N = x_NC.new_empty(K, 2, N, dtype=torch.float32)
    blocks = min(processors(x_NC.device), -(-N // (TILE * GROUPS)))
    partials = x_NC.new_empty(blocks * WARPS, plan.sums, dtype=torch.float32)
    narrow_PW = x_NC.new_empty(blocks, plan.inner * NARROW, dtype=torch.float32)
    for place, head in zip(plan.heads, heads, strict=True):
        at = slice(place.at, place.at + place.padded)
        targets = targets_NK[:, place.index]
        map_p = cuda.tensor_map(q_NW[:, at], (TILE, 64))
        map_down = cuda.tensor_map(packed.down_VW[:, at], (_up(place.classes, 16), 64))
        map_b = cuda.tensor_map(packed.b_EW[:, at], (_up(place.earlier, 16), 64)) if place.earlier else map_down
        kernel = _kernel(x_NC.get_device(), plan, place, x_NC.dtype, targets.dtype)
        kernel.launch(
            (blocks,), THREADS, smem(place),
            (
                map_p, map_down, map_b, x_NC, heard_NE, state_2N, rows_K2N[place.index], partials,
                narrow_PW[:, place.at * NARROW :], targets, packed.s_W[at], packed.c_W[at], head.down_bias_V,
                N, targets.stride(0), heard_NE.shape[1], plan.sums, plan.inner * NARROW, eps,
            ),
        )  # fmt: skip
    sums = x_NC.new_empty(plan.sums, dtype=torch.float32)
    narrow_WX = x_NC.new_empty(plan.inner, NARROW, dtype=torch.float32)
    column_sums_raw(partials, sums, accumulate=False)
    column_sums_raw(narrow_PW, narrow_WX, accumulate=False)
    return Passed(q_NW, rows_K2N, sums, narrow_WX)


def narrow_products(plan: Layout, narrow_WX: Tensor) -> tuple[HeadProducts, ...]:
    """What the kernel summed over rows, head by head."""
    found = []
    for place in plan.heads:
        mine = narrow_WX[place.at : place.at + place.padded]
        found.append(HeadProducts(mine[:, side_at(place) :], place.earlier, mine[:, : place.classes].t()))
    return tuple(found)
