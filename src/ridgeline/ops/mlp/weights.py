"""Weight and bias gradients of up to four layers at once (weights.cu): one launch for products, one for their sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.mlp.kernels import FOLDER, SLOT, THREADS, TILE_ROWS

MAX_LAYERS = 4
BLOCK_TOKENS = 64
MAX_STAGES = 12

Segment = tuple[int, int, int, int, int, int, int, int]  # layer, row, column, slot, first block, blocks, sums?, 0
Tile = tuple[int, int, int, int, int, int, int, int]  # layer, row, column, first slot, slots, sums?, slot step, 0


class Layer(NamedTuple):
    """One layer's gradients: dW = dYᵀ X, db = Σ dY.

    Attributes:
        dy_NM, x_NK: bf16 or fp16; M and K multiples of 8.
        dweight_MK, dbias_M: fp32, contiguous, written or added to; dbias None without a bias.
    """

    dy_NM: Tensor
    x_NK: Tensor
    dweight_MK: Tensor
    dbias_M: Tensor | None


def divide(
    shapes: Sequence[tuple[int, int, bool]], blocks: int, width: int, share: int, programs: int
) -> tuple[list[list[Segment]], list[Tile], int]:
    """Divide the units (tile, block of tokens) of all layers evenly among programs.

    Args:
        shapes: rows, columns and whether there is a bias, of each layer's weight.
        blocks: blocks of tokens. `width`: columns of a tile. `share`: row tiles that a program works on together.
        programs: thread blocks, or pairs of them.

    Returns:
        Each program's segments, the row tiles, and the number of slots of partial sums.
    """
    places = [
        (layer, row, column, int(bias and column == 0))
        for layer, (rows, columns, bias) in enumerate(shapes)
        for row in range(0, rows, TILE_ROWS * share)
        for column in range(0, columns, width)
    ]
    total = len(places) * blocks
    programs = min(programs, total)
    work: list[list[Segment]] = []
    slots: list[int] = [0] * len(places)
    slot = 0
    for program in range(programs):
        begin, end = program * total // programs, (program + 1) * total // programs
        mine: list[Segment] = []
        while begin < end:
            tile, first = divmod(begin, blocks)
            count = min(blocks - first, end - begin)
            layer, row, column, sums = places[tile]
            mine.append((layer, row, column, slot, first, count, sums, 0))
            slots[tile] += 1
            slot += 1
            begin += count
        work.append(mine)
    tiles: list[Tile] = []
    first_slot = 0
    for (layer, row, column, sums), count in zip(places, slots, strict=True):
        for half in range(share):
            tiles.append((layer, row + half * TILE_ROWS, column, first_slot * share + half, count, sums, share, 0))
        first_slot += count
    return work, tiles, slot * share


class Plan(NamedTuple):
    """A divided problem on the device: schedule, segments a program, programs, tiles, and the partial sums' room."""

    schedule: Tensor
    longest: int
    programs: int
    tiles: Tensor
    parts: int


@functools.lru_cache(maxsize=256)
def _plan(shapes: tuple[tuple[int, int, bool], ...], blocks: int, width: int, share: int, device: torch.device) -> Plan:
    programs = torch.cuda.get_device_properties(device).multi_processor_count // share
    work, tiles, slots = divide(shapes, blocks, width, share, programs)
    longest = max(len(mine) for mine in work) + 1
    table = [[*mine, *[(0,) * 8] * (longest - len(mine))] for mine in work]
    tensor = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return Plan(tensor(table), longest, len(work) * share, tensor(tiles), slots)


def tile_width(layers: Sequence[Layer]) -> int:
    """Columns of a tile: 256, or 128 where a layer's columns would leave half of it empty."""
    return 256 if all(layer.x_NK.shape[1] % 256 == 0 for layer in layers) else 128


def row_share(layers: Sequence[Layer]) -> int:
    """Row tiles that a pair of blocks takes together: 2 where no layer's rows would leave one of them empty."""
    return 2 if all(layer.dy_NM.shape[1] % (2 * TILE_ROWS) == 0 for layer in layers) else 1


def macros(width: int, share: int, dtype: torch.dtype) -> dict[str, int]:
    """What compiles the kernels."""
    stages = MAX_STAGES // (1 + width // 128) * (1 + width // 128)
    return {"WIDTH": width, "SPLIT": 1, "SHARE": share, "STAGES": stages, "RL_FP16": int(dtype == torch.float16)}


def smem(stages: int) -> int:
    """Bytes of dynamic shared memory of weight_parts."""
    return stages * SLOT + 2 * 4 * 64 * 4 + 512


def plan_of(layers: Sequence[Layer], share: int | None = None) -> Plan:
    """The division of these layers on their device; kept."""
    shapes = tuple((x.dy_NM.shape[1], x.x_NK.shape[1], x.dbias_M is not None) for x in layers)
    blocks = -(-layers[0].dy_NM.shape[0] // BLOCK_TOKENS)
    return _plan(shapes, blocks, tile_width(layers), share or row_share(layers), layers[0].dy_NM.device)


def workspace_size(layers: Sequence[Layer], share: int | None = None) -> int:
    """Elements of fp32 that `weight_gradients_raw` needs for its partial sums."""
    return plan_of(layers, share).parts * (TILE_ROWS * tile_width(layers) + TILE_ROWS)


def weight_gradients_raw(
    layers: Sequence[Layer],
    workspace: Tensor,
    *,
    accumulate: bool = False,
    share: int | None = None,
    early: bool = False,
) -> None:
    """Write (or add to) the gradients of at most four layers that saw the same tokens. Bitwise the same on every run.

    Args:
        layers: operands and targets.
        workspace: fp32, at least `workspace_size` elements.
        accumulate: add to what the targets hold.
        share: row tiles that share a stream of X, 1 or 2; None for `row_share`.
        early: see `mlp_forward_raw`.
    """
    share = share or row_share(layers)
    plan, width = plan_of(layers, share), tile_width(layers)
    compiled = macros(width, share, layers[0].dy_NM.dtype)
    module = cuda.load(FOLDER / "weights.cu", compiled)
    padded = [*layers, *[layers[0]] * (MAX_LAYERS - len(layers))]
    maps = [cuda.tensor_map(x, (BLOCK_TOKENS, 64)) for layer in padded for x in (layer.dy_NM, layer.x_NK)]
    parts = workspace[: plan.parts * TILE_ROWS * width]
    sums = workspace[plan.parts * TILE_ROWS * width :]
    arguments: tuple[cuda.Argument, ...] = (*maps, plan.schedule, plan.longest, parts, sums)
    kernel = module.kernel("weight_parts", "M" * 8 + "PiPP")
    kernel.launch((plan.programs,), THREADS, smem(compiled["STAGES"]), arguments, early=early)
    totals: tuple[cuda.Argument, ...] = (
        plan.tiles, parts, sums, *[x.dweight_MK for x in padded], *[x.dbias_M for x in padded],
        *[x.dy_NM.shape[1] for x in padded], *[x.x_NK.shape[1] for x in padded], int(accumulate),
    )  # fmt: skip
    kernel = module.kernel("weight_totals", "P" * 11 + "i" * 9)
    kernel.launch((8 * len(plan.tiles),), 256, 0, totals, early=True)
