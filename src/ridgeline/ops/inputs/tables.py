"""Gradients of the input layer's tables, all at once where they fit shared memory on Hopper. Kernel: tables_sm90.cu."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops._triton.support import processors
from ridgeline.ops.inputs.reference import InputColumns

SOURCE = Path(__file__).parent / "tables_sm90.cu"
KINDS = "PPPPiii"
SMEM_LIMIT = 227 * 1024
MOST_WARPS = 8
LANES = 32

Shapes = tuple[tuple[int, int], ...]
Place = tuple[int, int, int, int, int]
NOTHING: Place = (0, 0, 0, 0, 0)  # of no table: it has no rows


def length_of(shapes: Shapes) -> int:
    """Numbers in all tables."""
    return sum(rows * width for rows, width in shapes)


def warps_of(shapes: Shapes) -> int:
    """Warps of a block, each with the tables in shared memory; 0 where they do not fit."""
    return min(MOST_WARPS, SMEM_LIMIT // max(4 * length_of(shapes), 1))


@functools.lru_cache(maxsize=64)
def rounds(columns: InputColumns, shapes: Shapes) -> tuple[tuple[Place, ...], ...]:
    """What each lane adds in each round: column of the vector, category column, first number of the table, width, rows.

    Two category columns of one table may name the same row, so they never share a round.
    """
    starts = [length_of(shapes[:index]) for index in range(len(shapes))]
    found: list[tuple[dict[int, int], list[Place]]] = []  # category column of each table that a round has; lanes
    source = 0
    for category, table in enumerate(columns.tables):
        rows, width = shapes[table]
        for d in range(width):
            lane = (source + d, category, starts[table] + d, width, rows)
            for present, lanes in found:
                if present.get(table, category) == category and len(lanes) < LANES:
                    break
            else:
                present, lanes = {}, []
                found.append((present, lanes))
            present[table] = category
            lanes.append(lane)
        source += width
    return tuple((*lanes, *[NOTHING] * (LANES - len(lanes))) for _, lanes in found)


def defines(columns: InputColumns, shapes: Shapes, dtype: torch.dtype, ids: torch.dtype) -> dict[str, int]:
    """The macros that compile the kernel."""
    return {
        "RL_FP16": int(dtype == torch.float16),
        "WARPS": warps_of(shapes),
        "LENGTH": length_of(shapes),
        "ROUNDS": len(rounds(columns, shapes)),
        "ID_BYTES": ids.itemsize,
        "ID_SIGNED": int(ids.is_signed),
    }


def fits(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel serves these tables on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not length_of(shapes):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and warps_of(shapes) >= 1


@functools.lru_cache(maxsize=64)
def _places(columns: InputColumns, shapes: Shapes, device: torch.device) -> Tensor:
    """The rounds on a device; made before a capture, kept for it."""
    return torch.tensor(rounds(columns, shapes), dtype=torch.int32).to(device)


def table_gradients_raw(
    dvector_NE: Tensor, categories_NK: Tensor, columns: InputColumns, shapes: Shapes, dtables: Tensor
) -> None:
    """Write the gradients of all tables, one after the other, into the flat fp32 `dtables`: two launches.

    Args:
        dvector_NE: gradient of the vector's first columns; bf16 or fp16.
        categories_NK: any integer dtype; an index out of its table counts nowhere.
        columns, shapes: what stands in the vector, and each table's (rows, width).
    """
    N = len(dvector_NE)
    macros = defines(columns, shapes, dvector_NE.dtype, categories_NK.dtype)
    warps = macros["WARPS"]
    blocks = min(processors(dvector_NE.device), -(-N // warps))
    partials = dvector_NE.new_empty(blocks, macros["LENGTH"], dtype=torch.float32)
    kernel = cuda.load(SOURCE, macros).kernel("tables", KINDS, patient=True)
    kernel.launch(
        (blocks,), 32 * warps, 4 * warps * macros["LENGTH"],
        (
            dvector_NE, categories_NK, _places(columns, shapes, dvector_NE.device), partials,
            N, dvector_NE.stride(0), categories_NK.stride(0),
        ),
    )  # fmt: skip
    column_sums_raw(partials, dtables, accumulate=False)
