"""Products with the join beside them for many rows of width 256: launching project_many.cu and mlp_many.cu.

What kernels.py's projections do for few rows, without dropout and without sums of the branch's gradient. µs at 131,072
rows on an H200, and of the product and the join apart: gpt2-c256's out 80 and 96, down 147 and 176, up's gradient 150
and 189, qkv's 122 and 161; fast-c256's 78 and 95, 94 and 126, 92 and 131, 80 and 117. Both of the MLP's input gradients
by one kernel and by two: 271 and 295, 159 and 167.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.linear.codes import LINES, is_coded, matrix_map
from ridgeline.ops.mlp.kernels import Join, JoinGradient
from ridgeline.ops.scope import product_scope

SOURCE = Path(__file__).parent / "project_many.cu"
WIDTH = 256
TILE_ROWS, THREADS, STAGES = 128, 384, 3
SMEM = STAGES * 3 * 128 * 128 + 128 * WIDTH * 2 + 3 * WIDTH * 2 + 128  # as in the kernel
KINDS = {"project_many_forward": "MMMMMPPPPPfii", "project_many_backward": "MMMMMPPPPqii"}
MLP_SOURCE = Path(__file__).parent / "mlp_many.cu"
MLP_STAGES, WARPS = 4, 8
MLP_SMEM = MLP_STAGES * 64 * WIDTH * 2 + TILE_ROWS * WIDTH * 2 + 4 * 64 * 64 + TILE_ROWS * 64 * 2 + WIDTH * 2 + 256
MLP_KINDS = "MMMMMMMMPPPPqii"
TURNED = 32  # rows that mlp_many.cu takes in an order of its own


def blocks(N: int, device: torch.device) -> int:
    """Thread blocks of a launch: pairs, as many as the card holds and there is work for."""
    return 2 * min(-(-N // (2 * TILE_ROWS)), processors(device) // 2)


def macros(
    dtype: torch.dtype, *, backward: bool, rms: bool, norm_bias: bool, branch_bias: bool = False, normed: bool = True
) -> dict[str, int]:
    """What the compiler is asked for."""
    return {
        "BACKWARD": int(backward),
        "STAGES": STAGES,
        "RMS": int(rms),
        "NORM_BIAS": int(norm_bias),
        "BRANCH_BIAS": int(branch_bias),
        "NORMED": int(normed),
        "RL_FP16": int(dtype == torch.float16),
    }


def _launch(name: str, defines: dict[str, int], x_NK: Tensor, arguments: tuple[cuda.Argument, ...]) -> None:
    kernel = cuda.load(SOURCE, defines).kernel(name, KINDS[name], patient=True)
    kernel.launch((blocks(len(x_NK), x_NK.device),), THREADS, SMEM, arguments)


def _maps(x_NK: Tensor, weight: Tensor, held_NC: Tensor) -> tuple[bytes, ...]:
    return tuple(cuda.tensor_map(matrix, (64, 64)) for matrix in (x_NK, weight, held_NC))


def project_many_forward_raw(x_NK: Tensor, weight_CK: Tensor, join: Join, *, normed: bool = True) -> None:
    """y = x Wᵀ, then the join (which adds the bias).

    Args:
        x_NK: bf16 or fp16, rows at multiples of 16 bytes.
        weight_CK: C is 256.
        join: with a residual, and no dropout.
        normed: without, h is left as it is: r and its norm's statistics are all that is wanted.

    Raises:
        ValueError: a join that the kernel does not know.
    """
    if join.masks is not None or join.residual_NC is None:
        raise ValueError("the kernel for many rows takes a join with a residual and without dropout")
    defines = macros(
        x_NK.dtype, backward=False, rms=join.kind == "rmsnorm", norm_bias=join.bias_C is not None,
        branch_bias=join.branch_bias_C is not None, normed=normed,
    )  # fmt: skip
    arguments = (
        *_maps(x_NK, weight_CK, join.residual_NC), *(cuda.tensor_map(out, (16, 64)) for out in (join.r_NC, join.h_NC)),
        join.weight_C, join.bias_C, join.branch_bias_C, join.mean_N, join.rstd_N, join.eps, len(x_NK),
        -(-x_NK.shape[1] // 64),
    )  # fmt: skip
    with product_scope("forward", len(x_NK), x_NK.shape[1], WIDTH):
        _launch("project_many_forward", defines, x_NK, arguments)


def project_many_backward_raw(dy_NK: Tensor, weight_KC: Tensor, join: JoinGradient) -> None:
    """dh = dy W, then the gradient of the join that made h.

    Args:
        dy_NK: bf16 or fp16, rows at multiples of 16 bytes.
        weight_KC: C is 256.
        join: with a dresidual, without dropout and its branch bias's sums; a row of partial sums for each of `blocks`.

    Raises:
        ValueError: a join that the kernel does not know.
    """
    if join.masks is not None or join.dresidual_NC is None or join.branch_bias:
        raise ValueError("the kernel for many rows takes a join with a residual, without dropout and its branch's sums")
    defines = macros(dy_NK.dtype, backward=True, rms=join.kind == "rmsnorm", norm_bias=join.bias)
    arguments = (
        *_maps(dy_NK, weight_KC, join.r_NC), cuda.tensor_map(join.dresidual_NC, (64, 64)),
        cuda.tensor_map(join.dr_NC, (16, 64)), join.weight_C, join.mean_N, join.rstd_N, join.partials_PW,
        join.partials_PW.stride(0), len(dy_NK), -(-dy_NK.shape[1] // 64),
    )  # fmt: skip
    with product_scope("input_gradient", len(dy_NK), WIDTH, dy_NK.shape[1]):
        _launch("project_many_backward", defines, dy_NK, arguments)


def mlp_macros(dtype: torch.dtype, *, rms: bool, norm_bias: bool) -> dict[str, int]:
    """What the compiler is asked for."""
    return {"STAGES": MLP_STAGES, "RMS": int(rms), "NORM_BIAS": int(norm_bias), "RL_FP16": int(dtype == torch.float16)}


def turned(x_NK: Tensor, rows: int) -> tuple[Tensor, tuple[int, int, int, int]]:
    """A view of a matrix whose rows come as mlp_many.cu has them, and the box of so many of them (16 or 32)."""
    N, K = x_NK.shape
    pitch = x_NK.stride(0)
    view = x_NK.as_strided((N // 2 - 12, 4, 2, K), (2 * pitch, 8 * pitch, pitch, 1))
    return view, (rows // 8, 4, 2, 64)


def mlp_partial_rows(N: int, device: torch.device) -> int:
    """Rows of the partial sums of `mlp_many_backward_raw`."""
    return blocks(N, device) * WARPS


def mlp_many_backward_raw(
    dz_NC: Tensor, down_CF: Tensor, up_FC: Tensor, codes: Tensor, du_NF: Tensor, join: JoinGradient
) -> None:
    """du = (dz Wdown) · gelu'(u) and dh = du Wup, then the gradient of the join that made h.

    Args:
        dz_NC: bf16, contiguous, C 256, N a multiple of 32.
        codes: gelu'(u), as `linear.products` keeps it in codes.
        du_NF: written.
        join: with a dresidual, without dropout and its branch bias's sums; `mlp_partial_rows` rows of partial sums.

    Raises:
        ValueError: rows, slopes or a join that the kernel does not know.
    """
    N, F = len(dz_NC), len(up_FC)
    if join.masks is not None or join.dresidual_NC is None or join.branch_bias or N % TURNED or not is_coded(codes):
        raise ValueError(
            "the MLP's kernel for many rows takes multiples of 32 rows, slopes in codes, and a join with a residual, "
            "without dropout and its branch's sums"
        )
    defines = mlp_macros(dz_NC.dtype, rms=join.kind == "rmsnorm", norm_bias=join.bias)
    kernel = cuda.load(MLP_SOURCE, defines).kernel("mlp_many_backward", MLP_KINDS, patient=True)
    rows, sixteen = (lambda x: cuda.tensor_map(*turned(x, 32))), (lambda x: cuda.tensor_map(*turned(x, 16)))
    arguments = (
        rows(dz_NC), cuda.tensor_map(down_CF, (64, 64)), cuda.tensor_map(up_FC, (64, 64)),
        matrix_map(codes, (0, 0), LINES), rows(join.r_NC), rows(join.dresidual_NC), sixteen(du_NF),
        sixteen(join.dr_NC), join.weight_C, join.mean_N, join.rstd_N, join.partials_PW, join.partials_PW.stride(0),
        N, F,
    )  # fmt: skip
    kernel.launch((blocks(N, dz_NC.device),), THREADS, MLP_SMEM, arguments)
