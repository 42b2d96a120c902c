"""The Hopper product with its weights in registers: launching. Kernel: stationary_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.gemm import mask_arguments, plan_of
from ridgeline.ops.linear.reference import GeluKind, Masks

SOURCE = Path(__file__).parent / "stationary_sm90.cu"
SMEM_LIMIT = 227 * 1024
THREADS = 384
TILE = 64  # rows and columns of a tile in shared memory
TILE_BYTES = TILE * TILE * 2
COLUMNS = 2 * TILE  # of a block
LARGEST_K = 512
LEAST_SAMPLE = TILE  # rows of a sample under dropout: a tile meets two samples at most
BARRIER_BYTES = 1024


def _beside(outputs: int, reads_c: bool) -> int:
    """Tiles in shared memory beside the ring: two buffers an output, and two of C, for each warpgroup."""
    return 4 * outputs + (4 if reads_c else 0)


def fitting_laps(k_chunks: int, outputs: int, reads_c: bool) -> int:
    """Tiles of A that fit the ring."""
    return ((SMEM_LIMIT - BARRIER_BYTES) // TILE_BYTES - _beside(outputs, reads_c)) // k_chunks


def smem(macros: Mapping[str, int]) -> int:
    """Bytes of dynamic shared memory of the kernel that `macros` of `defines` make."""
    tiles = macros["LAPS"] * macros["K_CHUNKS"] + _beside(1 + macros["STORE_U"], macros["EPILOGUE"] >= 2)
    return tiles * TILE_BYTES + BARRIER_BYTES


def defines(
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    transposed_b: bool = False,
    bias: bool = False,
    gelu: GeluKind | None = None,
    pre: bool = False,
    residual: bool = False,
    dropout: bool = False,
    derivative: bool = False,
    cluster: int = 1,
) -> dict[str, int]:
    """The macros that compile the kernel for an inner size and an epilogue (see `stationary`)."""
    k_chunks = -(-K // TILE)
    return {
        "K_CHUNKS": k_chunks,
        "LAPS": fitting_laps(k_chunks, 1 + pre, residual or derivative),
        "RL_FP16": int(dtype == torch.float16),
        "B_TRANSPOSED": int(transposed_b),
        "EPILOGUE": 3 if derivative else 2 if residual else 1 if gelu else 0,
        "HAS_BIAS": int(bias),
        "GELU_TANH": int(gelu == "tanh"),
        "STORE_U": int(pre),
        "DROPOUT": int(dropout),
        "CLUSTER": cluster,
    }


@functools.lru_cache(maxsize=256)
def _kernel(
    device: int,
    K: int,
    dtype: torch.dtype,
    transposed_b: bool,
    bias: bool,
    gelu: GeluKind | None,
    pre: bool,
    residual: bool,
    dropout: bool,
    derivative: bool,
    cluster: int,
) -> tuple[cuda.Kernel, int]:
    """The loaded kernel for the current device, and its bytes of dynamic shared memory."""
    macros = defines(
        K, dtype,
        transposed_b=transposed_b, bias=bias, gelu=gelu, pre=pre, residual=residual, dropout=dropout,
        derivative=derivative, cluster=cluster,
    )  # fmt: skip
    kernel = cuda.load(SOURCE, macros).kernel("stationary", "MMMMMPiPPPiIIfii", patient=True)
    return kernel, smem(macros)


def stationary(
    a_MK: Tensor,
    b: Tensor,
    out_MN: Tensor,
    *,
    transposed_b: bool = False,
    bias_N: Tensor | None = None,
    gelu: GeluKind | None = None,
    pre_MN: Tensor | None = None,
    residual_MN: Tensor | None = None,
    masks: Masks | None = None,
    gelu_input_MN: Tensor | None = None,
    cluster: int = 1,
) -> Tensor | None:
    """out = epilogue(A · Bᵀ), fp32 accumulators, K up to 512.

    The epilogue is one of: acc + bias; gelu(acc + bias), with acc + bias also written to `pre_MN` if given;
    residual + dropout(acc + bias); acc · gelu'(gelu_input), with column sums.

    Args:
        a_MK: bf16 or fp16.
        b: [N, K], or [K, N] with `transposed_b`.
        out_MN: written.
        masks: dropout of samples of at least 64 rows.
        cluster: 2 makes pairs of blocks share the rows of A.

    Returns:
        With `gelu_input_MN`, fp32 partial column sums [rows, N] of out; else None.
    """
    M, K = a_MK.shape
    N = out_MN.shape[1]
    reads = residual_MN if gelu_input_MN is None else gelu_input_MN
    kernel, size = _kernel(
        a_MK.get_device(), K, a_MK.dtype, transposed_b, bias_N is not None, gelu, pre_MN is not None,
        residual_MN is not None, masks is not None, gelu_input_MN is not None, cluster,
    )  # fmt: skip
    plan = plan_of(-(-M // TILE), -(-N // (COLUMNS * cluster)), a_MK.device, cluster)
    map_a = cuda.tensor_map(a_MK, (TILE // cluster, TILE))
    map_b, map_c, map_d, map_u = (
        cuda.tensor_map(out_MN if x is None else x, (TILE, TILE)) for x in (b, reads, out_MN, pre_MN)
    )
    sums = a_MK.new_zeros((plan.slots, N), dtype=torch.float32) if gelu_input_MN is not None else None
    arguments: Sequence[cuda.Argument] = (
        map_a, map_b, map_c, map_d, map_u, plan.schedule, plan.segments, bias_N, sums, *mask_arguments(masks, N)
    )  # fmt: skip
    kernel.launch((plan.units * cluster,), THREADS, size, arguments)
    return sums
