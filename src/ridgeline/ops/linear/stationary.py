"""The Hopper product with its weights in registers: launching. Kernel: stationary_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.codes import LINES, is_coded, matrix_map
from ridgeline.ops.linear.folded import FoldedNorm, FoldedWeights
from ridgeline.ops.linear.gemm import KINDS as SHARED_KINDS
from ridgeline.ops.linear.gemm import Form, mask_arguments, plan_of
from ridgeline.ops.linear.reference import GeluKind, Masks

SOURCE = Path(__file__).parent / "stationary_sm90.cu"
SMEM_LIMIT = 227 * 1024
THREADS = 384
TILE = 64  # rows and columns of a tile in shared memory
TILE_BYTES = TILE * TILE * 2
COLUMNS = 2 * TILE  # of a block
LARGEST_K = 768
HELD = 8  # chunks of K whose part of B fits the registers; of more, every third chunk's stays in shared memory
LEAST_SAMPLE = TILE  # rows of a sample under dropout: a tile meets two samples at most
BARRIER_BYTES = 2048  # and the rows' numbers of a norm
KINDS = SHARED_KINDS + "PPPi"


def _beside(macros: Mapping[str, int], k_chunks: int) -> int:
    """Bytes in shared memory beside the ring: two buffers an output, and two of C, for each warpgroup.

    Slopes in codes take half a tile. Beyond K 512 there is B that stays, too.
    """
    other = TILE_BYTES >> macros["CODED"]  # slopes or C
    buffers = 4 * (TILE_BYTES + other * (macros["STORE_U"] + (macros["EPILOGUE"] >= 2)))
    return buffers + 2 * TILE_BYTES * (k_chunks // 3 if k_chunks > HELD else 0) + BARRIER_BYTES


def smem(macros: Mapping[str, int]) -> int:
    """Bytes of dynamic shared memory of the kernel that `macros` of `defines` make."""
    return macros["LAPS"] * macros["K_CHUNKS"] * TILE_BYTES + _beside(macros, macros["K_CHUNKS"])


def defines(K: int, form: Form, folded: bool = False) -> dict[str, int]:
    """The macros that compile the kernel for an inner size, a form, and a part in a folded norm."""
    k_chunks, macros = -(-K // TILE), form.macros()
    laps = (SMEM_LIMIT - _beside(macros, k_chunks)) // (k_chunks * TILE_BYTES)
    part = {
        "STATS": int(folded and form.residual),
        "NORM": int(folded and not form.reads_c),
        "SCALED": int(folded and form.factor),
    }
    return macros | part | {"K_CHUNKS": k_chunks, "LAPS": laps}


@functools.lru_cache(maxsize=256)
def _kernel(device: int, K: int, form: Form, folded: bool) -> tuple[cuda.Kernel, int]:
    """The loaded kernel for the current device, and its bytes of dynamic shared memory."""
    macros = defines(K, form, folded)
    return cuda.load(SOURCE, macros).kernel("stationary", KINDS, patient=True), smem(macros)


def stationary(
    a_MK: Tensor,
    b: Tensor,
    out_MN: Tensor,
    *,
    transposed_b: bool = False,
    bias_N: Tensor | None = None,
    gelu: GeluKind | None = None,
    slope_MN: Tensor | None = None,
    residual_MN: Tensor | None = None,
    masks: Masks | None = None,
    factor_MN: Tensor | None = None,
    norm: FoldedNorm | None = None,
    folded: FoldedWeights | None = None,
    summed: bool = True,
) -> Tensor | None:
    """out = epilogue(A · Bᵀ), fp32 accumulators, K up to 768.

    The epilogue is one of: acc + bias; gelu(acc + bias), with gelu'(acc + bias) written to `slope_MN` if given;
    residual + dropout(acc + bias); acc · factor, with column sums.

    Args:
        a_MK: bf16 or fp16.
        b: [N, K], or [K, N] with `transposed_b`.
        out_MN: written.
        masks: dropout of samples of at least 64 rows.
        slope_MN, factor_MN: fp16 whatever a has, or codes (codes.py).
        norm: one that no pass of its own makes. With a residual, its shares are left beside `out_MN`; with a factor,
            out is divided by each row's σ; else A is the residual stream, and norm(A) is what is multiplied, by weights
            and a bias that `folded` has in place of `b` and `bias_N`.
        summed: with a factor, the column sums are wanted.

    Returns:
        With `factor_MN` and `summed`, fp32 partial column sums [rows, N] of out (with a `norm` too, of out · σ).
    """
    M, K = a_MK.shape
    N = out_MN.shape[1]
    b = b if folded is None else folded.scaled_MK
    reads = residual_MN if factor_MN is None else factor_MN
    form = Form(
        a_MK.dtype, transposed_b, bias_N is not None, gelu, slope_MN is not None, residual_MN is not None,
        masks is not None, factor_MN is not None, coded=is_coded(slope_MN) or is_coded(factor_MN),
    )  # fmt: skip
    kernel, size = _kernel(a_MK.get_device(), K, form, norm is not None)
    plan = plan_of(-(-M // TILE), -(-N // COLUMNS), a_MK.device)
    map_a, map_b, map_d = (cuda.tensor_map(x, (TILE, TILE)) for x in (a_MK, b, out_MN))
    map_c, map_u = (map_d if x is None else matrix_map(x, (TILE, TILE), LINES) for x in (reads, slope_MN))
    sums = None if factor_MN is None else a_MK.new_empty((plan.slots, N), dtype=torch.float32)
    if sums is not None and summed:
        sums.zero_()  # units that have nothing of a column leave its place as it is
    beside: Sequence[cuda.Argument] = (None, None, None, M)
    if norm is not None:
        beside = (norm.shares_SM2, norm.rstd_M, None if folded is None else folded.bias_M, M)
    arguments: Sequence[cuda.Argument] = (
        map_a, map_b, map_c, map_d, map_u, plan.schedule, plan.segments, bias_N, sums, *mask_arguments(masks, N),
        *beside,
    )  # fmt: skip
    kernel.launch((plan.units,), THREADS, size, arguments)
    return sums if summed else None
