"""Weight and bias gradients of many layers over the same rows, in two launches: tiles, then sums of divided ones.

For few rows (a width-256 model at 8,192 tokens) cuBLAS spends a launch and a reduction on each weight gradient; here
all of a model's fill the card at once, and bias gradients come with them: 26 against 75 µs a block on an H200. At
131,072 rows it is 2 % of a width-256 block (2,007 against 2,042 µs; with tiles side by side 3 % more, divided with what
deliveries and biases take another 1.5 %), and at width 512 cuBLAS is ahead (1,490, 1,600).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.linear.gemm import SMEM_LIMIT
from ridgeline.ops.linear.reduce import Job, Room, blocks_of, reduce_raw

SOURCE = Path(__file__).parent / "wgrad_sm90.cu"
MAX_PROBLEMS = 64  # layers of a launch: 18 KB of parameters
CHUNK = 64
TILE_M = 128
THREADS = 384
CONSUMERS = 8  # warps of a block that write results
DELIVERY = 8  # chunks that are done while a tile is brought to its place, 9,000 cycles
BIASED = 1.125  # what a chunk takes with a bias gradient, where it takes 1 without
SHORTEST = 4  # chunks: a share of fewer costs more than it takes off others
ADD_WEIGHT, ADD_BIAS, HALF_WEIGHT, HALF_BIAS, PAIRS = 1, 2, 4, 8, 16  # as in the kernel
_PROBLEM = struct.Struct("<QQiiii")
KINDS = f"M{MAX_PROBLEMS * (256 + _PROBLEM.size) // 128}PPPPP"  # of the kernel's parameters

Shape = tuple[int, int, bool]  # M, K, has a bias gradient
Piece = tuple[int, int, int, int]  # worker, tile, first chunk, count


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


class Share(NamedTuple):
    """Some of a block's work, as the kernel's struct: a tile of a layer's dW over some chunks of rows."""

    layer: int
    row: int
    column: int
    first: int
    chunks: int
    part: int  # number of this partial sum; −1: all there is
    bias: int


class Plan(NamedTuple):
    """How a launch is divided.

    Attributes:
        work: a list of shares for each block. Paired, two blocks after one another take tiles one below the other and
            share what they read.
        paired: whether blocks work in pairs.
        parts: number of partial sums, of 128 × `tile_n` elements each.
        divided: tiles that several shares make, each with the numbers of its partial sums.
    """

    work: list[list[Share]]
    paired: bool
    parts: int
    divided: list[tuple[Share, range]]


def tile_width(widths: Sequence[int]) -> int:
    """Columns of a tile for layers with these input widths."""
    return 256 if max(widths) > 128 else 128 if max(widths) > 64 else 64


def stages(tile_n: int) -> int:
    """Ring slots that fit shared memory."""
    slot = (TILE_M + tile_n) * 2 * CHUNK
    return min(8, (SMEM_LIMIT - 2048) // slot)


def _pieces(costs: Sequence[float], chunks: int, workers: int, delivery: int) -> list[Piece]:
    """Divides tiles of `chunks` that take `costs` each evenly among workers; a tile's pieces come one after the other.

    As many workers as there are tiles go through about the same rows side by side, each with a tile, so that what tiles
    share comes from memory once. As many such fronts as there are workers for share the rows; workers left over share
    the last rows of all tiles, less than others have of one: they deliver more pieces.
    """
    places = len(costs)
    if places == 0:
        return []
    fronts, time = workers // places, sum(costs) * chunks / workers
    if workers == fronts * places or time / max(costs) < SHORTEST:
        fronts = min(fronts, max(1, chunks // SHORTEST))
        return sorted(_fronts([1.0] * places, chunks, workers, fronts, chunks / fronts), key=lambda piece: piece[1:])
    divisions = [_fronts(costs, chunks, workers, fronts, time + more) for more in range(2 * delivery + 1)]

    def slowest(pieces: Iterable[Piece]) -> float:
        times = [0.0] * workers
        for worker, tile, _, count in pieces:
            times[worker] += count * costs[tile] + delivery
        return max(times)

    return sorted(min(divisions, key=slowest), key=lambda piece: piece[1:])


def _fronts(costs: Sequence[float], chunks: int, workers: int, fronts: int, time: float) -> list[Piece]:
    """Fronts that take `time` each, as far as there are so many chunks, and the rest."""
    places = len(costs)
    bounds = [[min(chunks, round(front * time / cost)) for front in range(fronts + 1)] for cost in costs]
    pieces = [
        (front * places + tile, tile, bounds[tile][front], bounds[tile][front + 1] - bounds[tile][front])
        for front in range(fronts)
        for tile in range(places)
    ]
    busy, done = fronts * places, [ends[-1] for ends in bounds]
    rest = _in_a_row([chunks - first for first in done], costs, workers - busy) if min(done) < chunks else []
    pieces += [(busy + worker, tile, done[tile] + first, count) for worker, tile, first, count in rest]
    return [piece for piece in pieces if piece[3] > 0]


def _in_a_row(counts: Sequence[int], costs: Sequence[float], workers: int) -> list[Piece]:
    """Divides tiles of so many chunks evenly, one tile after the other."""
    ends = list(itertools.accumulate(count * cost for count, cost in zip(counts, costs, strict=True)))
    bounds = [(0, 0)]
    for worker in range(1, workers):
        at = worker * ends[-1] / workers
        tile = bisect.bisect_left(ends, at)
        past = counts[tile] - round((ends[tile] - at) / costs[tile])
        if past < SHORTEST or counts[tile] - past < SHORTEST:
            tile, past = tile + (2 * past >= counts[tile]), 0
        bounds.append((tile, past))
    bounds.append((len(counts), 0))
    return [
        (worker, tile, first, last - first)
        for worker, ((start, begin), (end, until)) in enumerate(itertools.pairwise(bounds))
        for tile in range(start, min(end + 1, len(counts)))
        for first, last in [(begin if tile == start else 0, until if tile == end else counts[tile])]
        if last > first
    ]


def share_out(
    shapes: Sequence[Shape], chunks: int, tile_n: int, blocks: int, delivery: int = 0, biased: float = 1.0
) -> Plan:
    """Divide tiles and chunks of rows among blocks: as many whole tiles for each as there are, the rest evenly.

    Tiles go through the same rows at the same time as far as that can be (`_pieces`). Blocks work in pairs where that
    does not leave many without work.

    Args:
        shapes: of each layer.
        chunks: 64-row chunks.
        tile_n: columns of a tile.
        blocks: the card's multiprocessors.
        delivery: what it takes to bring a tile to its place, in chunks.
        biased: what a chunk takes with a bias gradient, in those without.
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
    workers = blocks // together
    whole = len(places) // workers * workers
    work: list[list[Share]] = [[] for _ in range(workers * together)]
    divided: list[tuple[Share, range]] = []

    def give(worker: int, place: tuple[int, int, int], first: int, count: int, piece: int = -1) -> None:
        layer, row, column = place
        for tile in range(together):
            part = piece if piece < 0 else together * piece + tile
            bias = int(shapes[layer][2] and column == 0)
            share = Share(layer, row + tile * TILE_M, column, first, count, part, bias)
            work[together * worker + tile].append(share)

    costs = [biased if shapes[layer][2] and column == 0 else 1.0 for layer, _, column in places[whole:]]
    pieces = _pieces(costs, chunks, workers, delivery)
    for piece, (worker, tile, first, count) in enumerate(pieces):
        alone_here = count == chunks
        give(worker, places[whole + tile], first, count, -1 if alone_here else piece)
    for index in range(whole):
        give(index % workers, places[index], 0, chunks)
    for tile, place in enumerate(places[whole:]):
        numbers = [piece for piece, (_, of, _, count) in enumerate(pieces) if of == tile and count < chunks]
        for below in range(together * bool(numbers)):
            share = Share(place[0], place[1] + below * TILE_M, place[2], 0, chunks, -1, 0)
            first_part = together * numbers[0] + below
            divided.append((share, range(first_part, together * numbers[-1] + below + 1, together)))
    return Plan(work, paired, together * len(pieces), divided)


class Launch(NamedTuple):
    """A plan on a card: int32 tables of where each block's shares begin, and of the shares."""

    plan: Plan
    starts: Tensor
    shares: Tensor


@functools.lru_cache(maxsize=128)
def launch_plan(
    shapes: tuple[Shape, ...], chunks: int, tile_n: int, blocks: int, device: torch.device, delivery: int = 0,
    biased: float = 1.0,
) -> Launch:  # fmt: skip
    """How to divide these layers among so many blocks, with the tables on the card; each once."""
    plan = share_out(shapes, chunks, tile_n, blocks, delivery, biased)
    starts, shares = tables(plan)
    return Launch(plan, starts.to(device), shares.to(device))


def tables(plan: Plan) -> tuple[Tensor, Tensor]:
    """The kernel's tables of a plan: where each block's shares begin (and the last one's end), and the shares."""
    starts = [0]
    for shares in plan.work:
        starts.append(starts[-1] + len(shares))
    rows = [tuple(share) for shares in plan.work for share in shares]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)


def pack(gradients: Sequence[Gradient], maps: Sequence[bytes]) -> bytes:
    """The kernel's parameter: maps of all dY, then of all X, then the results."""
    half, packed = len(maps) // 2, b""
    for side in (maps[:half], maps[half:]):
        packed += b"".join(side).ljust(MAX_PROBLEMS * 128, b"\0")
    for g in gradients:
        (M, K), pitch, bias = g.dweight_MK.shape, g.dweight_MK.stride(0), g.dbias_M
        fp32 = g.dweight_MK.dtype == torch.float32
        pairs = fp32 and not g.add_weight and pitch % 2 == 0 and g.dweight_MK.data_ptr() % 8 == 0
        how = ADD_WEIGHT * g.add_weight | ADD_BIAS * g.add_bias | HALF_WEIGHT * (not fp32) | PAIRS * pairs
        how |= HALF_BIAS * (bias is not None and bias.dtype != torch.float32)
        packed += _PROBLEM.pack(g.dweight_MK.data_ptr(), 0 if bias is None else bias.data_ptr(), M, K, pitch, how)
    return packed.ljust(MAX_PROBLEMS * (256 + _PROBLEM.size), b"\0")


def jobs_of(gradients: Sequence[Gradient], plan: Plan, tiles: Tensor, sums: Tensor) -> list[Job]:
    """The sums that turn partial tiles into gradients.

    Args:
        gradients: the layers.
        plan: how they were divided.
        tiles: fp32 [parts, 128, tile columns], the partial sums of dW. `sums`: fp32 [parts, 128], of db.
    """
    jobs = []
    for (layer, row, column, *_), parts in plan.divided:
        gradient = gradients[layer]
        target = gradient.dweight_MK[row : row + TILE_M, column : column + tiles.shape[2]]
        if len(target) == 0:  # the lower tile of a pair may lie below the matrix
            continue
        chosen = slice(parts.start, parts.stop, parts.step)
        jobs.append(Job(tiles[chosen, : len(target), : target.shape[1]], target, gradient.add_weight))
        if gradient.dbias_M is not None and column == 0:
            bias = gradient.dbias_M[row : row + TILE_M]
            jobs.append(Job(sums[chosen, None, : len(bias)], bias[None], gradient.add_bias))
    return jobs


def macros(plan: Plan, tile_n: int, dtype: torch.dtype) -> dict[str, int]:
    """What a plan asks of the compiler."""
    return {
        "TILE_N": tile_n,
        "STAGES": stages(tile_n),
        "PAIRED": int(plan.paired),
        "MAX_PROBLEMS": MAX_PROBLEMS,
        "RL_FP16": int(dtype == torch.float16),
    }


def weight_gradients_raw(gradients: Sequence[Gradient], *, also: Sequence[Job] = (), room: Room | None = None) -> None:
    """dW (+)= dYᵀ X and db (+)= column sums of dY for up to 64 layers over the same rows. Deterministic.

    Args:
        gradients: the layers.
        also: further sums for the second launch, of what was there before, such as norms' partials.
        room: gives memory in which both launches leave numbers that add up to the squares of all gradients, without
            what these are added to, before they are rounded; None where nobody asks for them.

    Raises:
        ValueError: more layers than that, or layers of different row counts.
    """
    N = gradients[0].dy_NM.shape[0]
    if len(gradients) > MAX_PROBLEMS or any(g.dy_NM.shape[0] != N or g.x_NK.shape[0] != N for g in gradients):
        raise ValueError(f"one launch takes up to {MAX_PROBLEMS} layers over the same rows")
    device, dtype = gradients[0].dy_NM.device, gradients[0].dy_NM.dtype
    shapes = tuple((g.dy_NM.shape[1], g.x_NK.shape[1], g.dbias_M is not None) for g in gradients)
    tile_n = tile_width([K for _, K, _ in shapes])
    plan, starts, shares = launch_plan(shapes, -(-N // CHUNK), tile_n, processors(device), device, DELIVERY, BIASED)
    tiles = torch.empty(plan.parts, TILE_M, tile_n, dtype=torch.float32, device=device)
    sums = torch.empty(plan.parts, TILE_M, dtype=torch.float32, device=device)
    maps = [cuda.tensor_map(t, (CHUNK, 64)) for t in (*(g.dy_NM for g in gradients), *(g.x_NK for g in gradients))]
    kernel = cuda.load(SOURCE, macros(plan, tile_n, dtype)).kernel("weight_gradients", KINDS, patient=True)
    smem = stages(tile_n) * (TILE_M + tile_n) * 2 * CHUNK + 2048
    jobs = [*also, *jobs_of(gradients, plan, tiles, sums)]
    own = CONSUMERS * len(plan.work)
    squares = room(own + blocks_of(jobs)) if room is not None else None
    kernel.launch((len(plan.work),), THREADS, smem, (pack(gradients, maps), starts, shares, tiles, sums, squares))
    reduce_raw(jobs, ready=len(also), squares=None if squares is None else squares[own:])
