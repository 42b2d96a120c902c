"""The Hopper GEMM: choosing a configuration, dividing the work among blocks, launching. Kernel: gemm_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.dropout import quantise
from ridgeline.ops.linear.codes import is_coded, matrix_map
from ridgeline.ops.linear.reference import GeluKind, Masks

SOURCE = Path(__file__).parent / "gemm_sm90.cu"
SMEM_LIMIT = 227 * 1024
THREADS = 384
CHUNK_K = 64
SMALL_TILES = 600  # fewer 128-row tiles than this, and 64-row tiles spread better
PANEL_LINES = 8  # of codes: 16 rows of 64
KINDS = "MMMMMPiPPPiIIfii"  # the parameters that both Hopper products have
Epilogue = Literal["plain", "bias", "gelu", "residual", "factor", "terms"]

Segment = tuple[int, int, int, int]  # column tile + 65536 · row of partial sums, first row tile, step, count


class Config(NamedTuple):
    """A configuration of the kernel.

    Attributes:
        tile_m, tile_n: a warpgroup's output tile.
        stages: ring slots; 0 takes as many as fit, up to 16.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 0

    def smem(self, reads_c: bool, stages: int) -> int:
        """Bytes of dynamic shared memory."""
        panels = self.tile_m * self.tile_n // 1024 if reads_c else 16
        return stages * (self.tile_m + self.tile_n) * 128 + panels * 2048 + 1024

    def fitted(self, reads_c: bool) -> Config:
        """The same with as many stages as fit."""
        if self.stages:
            return self
        return self._replace(stages=max(n for n in range(2, 17) if self.smem(reads_c, n) <= SMEM_LIMIT))


def divide(row_tiles: int, columns: int, units: int) -> tuple[list[list[Segment]], int]:
    """Divide row tiles × column tiles among blocks.

    A unit (a block) keeps to one column as far as possible (its part of B stays in shared memory), and units of
    different columns walk the same rows at the same time (A is read from memory once). What does not divide evenly
    goes, column after column, to the units left over.

    Returns:
        Each unit's segments, and the number of rows of partial sums that a column can have.
    """
    work: list[list[Segment]] = []
    slots = [0] * columns

    def segment(column: int, first: int, step: int, count: int) -> Segment:
        slots[column] += 1
        return (column + 65536 * (slots[column] - 1), first, step, count)

    share = max(units // columns, 1)
    spare = max(units - share * columns, 0)
    quota = -(-row_tiles // share)
    if units >= columns and spare:
        quota = next(q for q in range(1, quota + 1) if max(row_tiles - share * q, 0) * columns <= spare * q)
    elif units < columns:
        quota, spare, share = 0, units, 0
    taken = min(share * quota, row_tiles)
    for first in range(min(share, row_tiles)):
        count = len(range(first, taken, share))
        work += [[segment(column, first, share, count)] for column in range(columns)] if count else []
    rest = row_tiles - taken
    if rest and spare:
        total = rest * columns
        for unit in range(spare):
            begin, end = unit * total // spare, (unit + 1) * total // spare
            mine = []
            while begin < end:
                column, row = divmod(begin, rest)
                count = min(rest - row, end - begin)
                mine.append(segment(column, taken + row, 1, count))
                begin += count
            work += [mine] if mine else []
    return work, max(slots)


class Plan(NamedTuple):
    """A divided problem on a device: the schedule, segments a unit, units, rows of partial sums."""

    schedule: Tensor
    segments: int
    units: int
    slots: int


@functools.lru_cache(maxsize=512)
def plan_of(row_tiles: int, columns: int, device: torch.device) -> Plan:
    """The division of row tiles × column tiles among all multiprocessors; made before a capture, kept for it."""
    blocks = processors(device)
    work, slots = divide(row_tiles, columns, blocks)
    longest = max(len(mine) for mine in work) + 1
    table = [[*mine, *[(0, 0, 0, 0)] * (longest - len(mine))] for mine in work]
    return Plan(torch.tensor(table, dtype=torch.int32, device=device), longest, len(work), slots)


def choose(M: int, N: int, epilogue: Epilogue) -> Config | None:
    """The configuration for a product of M × N that `stationary` does not take; None where cuBLAS is taken.

    By measurement on an H200: without an epilogue to ride on, or with a bias alone, cuBLAS is as fast or faster.
    """
    if epilogue in ("plain", "bias"):
        return None
    small = -(-M // 128) * -(-N // 128) < SMALL_TILES
    return Config(tile_m=64 if small else 128)


class RowTerms(NamedTuple):
    """factor · acc + α + β c, with α and β of a row.

    Attributes:
        c_MN: of the product's dtype.
        terms_2M: α and β; fp32, contiguous.
        factor_1: fp32.
    """

    c_MN: Tensor
    terms_2M: Tensor
    factor_1: Tensor


class Form(NamedTuple):
    """What a kernel is compiled to do around its product.

    Attributes:
        dtype: bf16 or fp16.
        transposed_b, bias, gelu, slope, residual, dropout, factor, terms: what there is of `gemm`'s arguments.
        coded: the slope or factor is in codes.
    """

    dtype: torch.dtype = torch.bfloat16
    transposed_b: bool = False
    bias: bool = False
    gelu: GeluKind | None = None
    slope: bool = False
    residual: bool = False
    dropout: bool = False
    factor: bool = False
    terms: bool = False
    coded: bool = False

    @property
    def reads_c(self) -> bool:
        """Whether the epilogue reads a matrix."""
        return self.residual or self.factor or self.terms

    def macros(self) -> dict[str, int]:
        """The macros that compile it, without sizes."""
        return {
            "RL_FP16": int(self.dtype == torch.float16),
            "B_TRANSPOSED": int(self.transposed_b),
            "EPILOGUE": 4 if self.terms else 3 if self.factor else 2 if self.residual else 1 if self.gelu else 0,
            "HAS_BIAS": int(self.bias),
            "GELU_TANH": int(self.gelu == "tanh"),
            "STORE_U": int(self.slope),
            "DROPOUT": int(self.dropout),
            "CODED": int(self.coded),
        }


def defines(config: Config, K: int, form: Form) -> dict[str, int]:
    """The macros that compile the kernel for a configuration, an inner size and a form."""
    return form.macros() | {
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "STAGES": config.fitted(form.reads_c).stages,
        "K_CHUNKS": -(-K // CHUNK_K),
    }


@functools.lru_cache(maxsize=512)
def _kernel(device: int, config: Config, K: int, form: Form) -> tuple[cuda.Kernel, int]:
    """The loaded kernel for the current device, and its bytes of dynamic shared memory."""
    macros = defines(config, K, form)
    kernel = cuda.load(SOURCE, macros).kernel("gemm", KINDS + "PPi", patient=True)
    return kernel, config.smem(form.reads_c, macros["STAGES"])


def mask_arguments(masks: Masks | None, N: int) -> tuple[cuda.Argument, ...]:
    """The kernels' last parameters: where seed and step lie, N, site, threshold, scale, rows and number of samples."""
    if masks is None:
        return None, N, 0, 0, 1.0, 1, 0
    return masks.state.seed_step, N, masks.site, *quantise(masks.p), masks.T, masks.state.sample_offset


def gemm(
    a_MK: Tensor,
    b: Tensor,
    out_MN: Tensor,
    config: Config,
    *,
    transposed_b: bool = False,
    bias_N: Tensor | None = None,
    gelu: GeluKind | None = None,
    slope_MN: Tensor | None = None,
    residual_MN: Tensor | None = None,
    masks: Masks | None = None,
    factor_MN: Tensor | None = None,
    terms: RowTerms | None = None,
) -> Tensor | None:
    """out = epilogue(A · Bᵀ), fp32 accumulators.

    The epilogue is one of: acc + bias; gelu(acc + bias), with gelu'(acc + bias) written to `slope_MN` if given;
    residual + dropout(acc + bias); acc · factor, with column sums; `terms`.

    Args:
        a_MK: bf16 or fp16.
        b: [N, K], or [K, N] with `transposed_b`.
        out_MN: written.
        config: how.
        slope_MN, factor_MN: fp16 whatever a has, or codes (codes.py).

    Returns:
        With `factor_MN`, fp32 partial column sums [rows, N] of out; else None.
    """
    M, K = a_MK.shape
    N = out_MN.shape[1]
    form = Form(
        a_MK.dtype, transposed_b, bias_N is not None, gelu, slope_MN is not None, residual_MN is not None,
        masks is not None, factor_MN is not None, terms is not None,
        coded=is_coded(slope_MN) or is_coded(factor_MN),
    )  # fmt: skip
    kernel, smem = _kernel(a_MK.get_device(), config, K, form)
    plan = plan_of(-(-M // config.tile_m), -(-N // config.tile_n), a_MK.device)
    panel = (16, 64)
    map_a = cuda.tensor_map(a_MK, (config.tile_m, CHUNK_K))
    map_b = cuda.tensor_map(b, (CHUNK_K, 64) if transposed_b else (config.tile_n, CHUNK_K))
    map_d = cuda.tensor_map(out_MN, panel)
    reads = terms.c_MN if terms is not None else residual_MN if factor_MN is None else factor_MN
    map_c, map_u = (map_d if x is None else matrix_map(x, panel, PANEL_LINES) for x in (reads, slope_MN))
    sums = a_MK.new_zeros((plan.slots * 8, N), dtype=torch.float32) if factor_MN is not None else None
    arguments: Sequence[cuda.Argument] = (
        map_a, map_b, map_c, map_d, map_u, plan.schedule, plan.segments, bias_N, sums, *mask_arguments(masks, N),
        *((None, None) if terms is None else (terms.factor_1, terms.terms_2M)), M,
    )  # fmt: skip
    kernel.launch((plan.units,), THREADS, smem, arguments)
    return sums
