"""Weight and bias gradients of several layers over the same rows, in two launches: shares, then their sums.

For few rows (a width-256 block at 8,192 tokens) cuBLAS spends a launch and a reduction on each of a block's four weight
gradients; here all of them fill the card at once, and bias gradients come with them. For many rows cuBLAS wins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.gemm import SMEM_LIMIT
from ridgeline.ops.linear.reduce import Job, reduce_raw

SOURCE = Path(__file__).parent / "wgrad_sm90.cu"
MAX_PROBLEMS = 4
CHUNK = 64
TILE_M = 128
THREADS = 384

Share = tuple[int, int, int, int, int, int, int, int, int]  # as the kernel's struct
Shape = tuple[int, int, bool]  # M, K, has a bias gradient


class Gradient(NamedTuple):
    """One layer's operands and results.

    Attributes:
        dy_NM, x_NK: bf16 or fp16, rows at multiples of 16 bytes.
        dweight_MK: fp32 or 16-bit, last stride 1.
        dbias_M: fp32 or 16-bit, or None.
        add_weight, add_bias: add to these instead of overwriting them.
    """

    dy_NM: Tensor
    x_NK: Tensor
    dweight_MK: Tensor
    dbias_M: Tensor | None = None
    add_weight: bool = False
    add_bias: bool = False


class Plan(NamedTuple):
    """How a launch is divided.

    Attributes:
        shares: int32 [blocks, 9], a block's work each.
        paired: two blocks after one another take tiles one below the other and share what they read.
        parts: shares that each dW is the sum of.
        tiles, sums: offsets of each layer's [parts, M, K] and [parts, M] partial sums, and the total, in elements.
    """

    shares: Tensor
    paired: bool
    parts: int
    tiles: list[int]
    sums: list[int]


def tile_width(widths: Sequence[int]) -> int:
    """Columns of a tile for layers with these input widths."""
    return 256 if max(widths) > 128 else 128 if max(widths) > 64 else 64


def stages(tile_n: int) -> int:
    """Ring slots that fit shared memory."""
    slot = (TILE_M + tile_n) * 2 * CHUNK
    return min(8, (SMEM_LIMIT - 2048) // slot)


def share_out(shapes: Sequence[Shape], chunks: int, tile_n: int, blocks: int) -> Plan:
    """Divide tiles and chunks of rows among blocks, each of which takes one tile over one share of the chunks.

    Blocks work in pairs where that does not leave many without work.

    Args:
        shapes: of each layer.
        chunks: 64-row chunks.
        tile_n: columns of a tile.
        blocks: the card's multiprocessors.
    """
    alone, pairs = (
        [
            (layer, row, column)
            for layer, (M, K, _) in enumerate(shapes)
            for column in range(0, K, tile_n)
            for row in range(0, M, step)
        ]
        for step in (TILE_M, 2 * TILE_M)
    )
    paired = tile_n >= 2 * CHUNK and 2 * len(pairs) <= len(alone) * 7 / 6
    places, together = (pairs, 2) if paired else (alone, 1)
    parts = max(1, min(blocks // (together * len(places)), chunks))
    tiles, sums = [0], [0]
    for M, K, bias in shapes:
        tiles.append(tiles[-1] + parts * M * K)
        sums.append(sums[-1] + parts * M * bias)
    shares: list[Share] = []
    for layer, row, column in places:
        M, K, bias = shapes[layer]
        for part in range(parts):
            first, last = part * chunks // parts, (part + 1) * chunks // parts
            sum_at = sums[layer] + part * M if bias and column == 0 else -1
            for tile in range(together):
                place = (layer, row + tile * TILE_M, column)
                shares.append((*place, first, last - first, tiles[layer] + part * M * K, sum_at, M, K))
    return Plan(torch.tensor(shares, dtype=torch.int32), paired, parts, tiles, sums)


@functools.lru_cache(maxsize=128)
def _plan(shapes: tuple[Shape, ...], chunks: int, tile_n: int, device: torch.device) -> Plan:
    plan = share_out(shapes, chunks, tile_n, torch.cuda.get_device_properties(device).multi_processor_count)
    return plan._replace(shares=plan.shares.to(device))


def jobs_of(gradients: Sequence[Gradient], plan: Plan, tiles: Tensor, sums: Tensor) -> list[Job]:
    """The sums that turn partial tiles into gradients."""
    jobs = []
    for layer, gradient in enumerate(gradients):
        part = tiles[plan.tiles[layer] : plan.tiles[layer + 1]].view(plan.parts, *gradient.dweight_MK.shape)
        jobs.append(Job(part, gradient.dweight_MK, gradient.add_weight))
        if gradient.dbias_M is not None:
            row = sums[plan.sums[layer] : plan.sums[layer + 1]].view(plan.parts, 1, len(gradient.dbias_M))
            jobs.append(Job(row, gradient.dbias_M[None], gradient.add_bias))
    return jobs


def weight_gradients_raw(gradients: Sequence[Gradient], *, also: Sequence[Job] = ()) -> None:
    """dW (+)= dYᵀ X and db (+)= column sums of dY for up to four layers over the same rows. Deterministic.

    Args:
        gradients: the layers.
        also: further sums for the second launch, such as a norm's partials.

    Raises:
        ValueError: more than four layers, layers of different row counts, or too many tiles for one launch.
    """
    N = gradients[0].dy_NM.shape[0]
    if len(gradients) > MAX_PROBLEMS or any(g.dy_NM.shape[0] != N or g.x_NK.shape[0] != N for g in gradients):
        raise ValueError(f"one launch takes up to {MAX_PROBLEMS} layers over the same rows")
    device, dtype = gradients[0].dy_NM.device, gradients[0].dy_NM.dtype
    shapes = tuple((g.dy_NM.shape[1], g.x_NK.shape[1], g.dbias_M is not None) for g in gradients)
    tile_n = tile_width([K for _, K, _ in shapes])
    plan = _plan(shapes, -(-N // CHUNK), tile_n, device)
    tiles = torch.empty(plan.tiles[-1], dtype=torch.float32, device=device)
    sums = torch.empty(plan.sums[-1], dtype=torch.float32, device=device)
    empty = bytes(128)
    maps = [
        b"".join(cuda.tensor_map(t, (CHUNK, 64)) for t in side) + empty * (MAX_PROBLEMS - len(gradients))
        for side in ([g.dy_NM for g in gradients], [g.x_NK for g in gradients])
    ]
    macros = {
        "TILE_N": tile_n, "STAGES": stages(tile_n), "PAIRED": int(plan.paired), "RL_FP16": int(dtype == torch.float16),
    }  # fmt: skip
    kernel = cuda.load(SOURCE, macros).kernel("weight_gradients", "M4M4PPP", patient=True)
    smem = stages(tile_n) * (TILE_M + tile_n) * 2 * CHUNK + 2048
    kernel.launch((len(plan.shares),), THREADS, smem, (*maps, plan.shares, tiles, sums))
    reduce_raw([*jobs_of(gradients, plan, tiles, sums), *also])
