"""An MLP's forward pass with the join behind it, for many rows of width 256: launching forward_many.cu.

What two kernels did, up with GELU (ops/linear/stationary) and down with its join (many.py), without reading the hidden
layer in between.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.activation.reference import GeluKind
from ridgeline.ops.linear.codes import is_coded
from ridgeline.ops.mlp.kernels import Join
from ridgeline.ops.mlp.many import TILE_ROWS, WIDTH, blocks

SOURCE = Path(__file__).parent / "forward_many.cu"
THREADS = 640
CHUNK = 64  # inner columns at a time
LEAST_INNER = CHUNK + 1  # two chunks: the first one of a tile is made while its last one waits for rows
UP_REGISTERS = 64
DOWN_PIECES = 2  # of a chunk of down's weights


def boxes() -> tuple[tuple[int, int], ...]:
    """What a copy takes of h, up's and down's weights, a, the residual, r and the next h."""
    rows = (TILE_ROWS, 64)
    return rows, (64, 64), (128, 128 // DOWN_PIECES), (64, 64), rows, (16, 64), (16, 64)


SMEM = 6 * CHUNK * WIDTH + 8 * TILE_ROWS * 128 + 3 * WIDTH * 2 + 320  # as in the kernel
KIND = "MMMMMMMPPPPPPPPfii"


def macros(*, rms: bool, norm_bias: bool, up_bias: bool, branch_bias: bool, gelu: GeluKind) -> dict[str, int]:
    """What the compiler is asked for."""
    return {
        "RMS": int(rms),
        "NORM_BIAS": int(norm_bias),
        "UP_BIAS": int(up_bias),
        "BRANCH_BIAS": int(branch_bias),
        "GELU_TANH": int(gelu == "tanh"),
        "UP_REGISTERS": UP_REGISTERS,
        "DOWN_PIECES": DOWN_PIECES,
    }


def mlp_many_forward_raw(
    h_NC: Tensor, up_FC: Tensor, up_bias_F: Tensor | None, down_CF: Tensor, codes: Tensor, a_NF: Tensor, join: Join,
    *, gelu: GeluKind,
) -> None:  # fmt: skip
    """u = h Wupᵀ + b, a = gelu(u), z = a Wdownᵀ, then the join (which adds the bias).

    Args:
        h_NC, up_FC, up_bias_F, down_CF: bf16; C is 256, F a multiple of 8, at least `LEAST_INNER`.
        codes: written: GELU's derivative (ops/linear/codes). `a_NF`: written.
        join: with a residual, and no dropout.
        gelu: "exact" or "tanh".

    Raises:
        ValueError: slopes in 16 bits, an F below, or a join that the kernel does not know.
    """
    if len(up_FC) < LEAST_INNER:
        raise ValueError(f"the MLP's kernel for many rows takes at least {LEAST_INNER} inner columns, got {len(up_FC)}")
    if h_NC.dtype != torch.bfloat16 or not is_coded(codes):
        raise ValueError("the MLP's kernel for many rows takes bf16 and leaves GELU's derivative in codes")
    if join.masks is not None or join.residual_NC is None:
        raise ValueError("the MLP's kernel for many rows takes a join with a residual and without dropout")
    defines = macros(
        rms=join.kind == "rmsnorm", norm_bias=join.bias_C is not None, up_bias=up_bias_F is not None,
        branch_bias=join.branch_bias_C is not None, gelu=gelu,
    )  # fmt: skip
    arguments = (
        *maps(h_NC, up_FC, down_CF, a_NF, join.residual_NC, join.r_NC, join.h_NC), h_NC, up_bias_F, codes,
        join.weight_C, join.bias_C, join.branch_bias_C, join.mean_N, join.rstd_N, join.eps, len(h_NC), len(up_FC),
    )  # fmt: skip
    kernel = cuda.load(SOURCE, defines).kernel("forward_many", KIND, patient=True)
    kernel.launch((blocks(len(h_NC), h_NC.device),), THREADS, SMEM, arguments)


def maps(*matrices: Tensor) -> tuple[bytes, ...]:
    """The copy engine's maps of the matrices of `boxes`."""
    return tuple(cuda.tensor_map(matrix, box, 2 * box[1]) for matrix, box in zip(matrices, boxes(), strict=True))
