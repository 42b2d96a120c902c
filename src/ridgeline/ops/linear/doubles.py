"""Products of fp32 matrices by the tensor cores in fp64, with what follows them in a block (doubles.cu).

An fp32 number is an fp64 number, and so is the product of two of them: only sums round, in fp64, and the result is
rounded to fp32 once. So these are at least as exact as any product in IEEE fp32; no TF32 is involved. An H200's fp64
tensor cores make 67 TFLOP/s, as its ordinary lanes do in fp32, with far fewer instructions and loads for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._triton.support import processors
from ridgeline.ops.linear.reduce import Job, reduce_raw
from ridgeline.ops.linear.reference import GeluKind
from ridgeline.ops.linear.wgrad import CHUNK, MAX_PROBLEMS, TILE_M, Gradient, jobs_of, launch_plan

PRODUCT = Path(__file__).parent / "doubles.cu"
GRADIENTS = Path(__file__).parent / "doubles_gradients.cu"
SLAB = 16  # columns of K at a time, as in the kernels
STAGES = 4
PLAIN, GELU, FACTOR, RESIDUAL = range(4)  # epilogues, as in the kernel
ADD_WEIGHT, ADD_BIAS = 1, 2
_PROBLEM = struct.Struct("<QQQQiiiiii")


class Tile(NamedTuple):
    """A thread block's part of the result: 128 rows, `warps` times `width` columns; blocks a multiprocessor."""

    warps: int = 1
    width: int = 64
    blocks: int = 2

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.warps * self.width

    @property
    def threads(self) -> int:
        """Of a thread block: four warps one below the other, `warps` times."""
        return 128 * self.warps

    def macros(self) -> dict[str, int]:
        """What the kernels are compiled with."""
        return {"WARPS_M": 4, "WARPS_N": self.warps, "WARP_N": self.width, "BLOCKS": self.blocks, "STAGES": STAGES}

    def smem(self, a_by_rows: bool, b_by_rows: bool) -> int:
        """Bytes of the ring of slabs."""
        floats = (
            length * (SLAB + 4) if by_rows else SLAB * (length + 8)
            for length, by_rows in ((TILE_M, a_by_rows), (self.columns, b_by_rows))
        )
        return 4 * STAGES * sum(floats)


TILE = Tile()  # the fastest of three on an H200


def misplaced(name: str, x: Tensor) -> str | None:
    """Why a matrix cannot be an operand or a result, or None."""
    if x.dtype != torch.float32:
        return f"{name} must be float32, got {x.dtype}"
    if x.shape[1] % 4 or x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 16:
        return (
            f"{name} must have a multiple of 4 columns and rows at multiples of 16 bytes, got shape {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
    return None


def _check(**matrices: Tensor | None) -> None:
    for name, x in matrices.items():
        if x is not None and (reason := misplaced(name, x)) is not None:
            raise ValueError(reason)


def product(
    a_MK: Tensor,
    b: Tensor,
    out_MN: Tensor,
    *,
    transposed_b: bool = False,
    bias_N: Tensor | None = None,
    gelu: GeluKind | None = None,
    slope_MN: Tensor | None = None,
    factor_MN: Tensor | None = None,
    residual_MN: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """out = a bᵀ + bias; or its GELU, with the derivative in `slope_MN` if given; or times factor, or plus residual.

    Args:
        a_MK: fp32, rows at multiples of 16 bytes, as all matrices here.
        b: (N, K), or (K, N) with `transposed_b`.
        out_MN: the result.
        slope_MN, factor_MN, residual_MN: at most one, laid out as `out_MN`.

    Raises:
        ValueError: a matrix that lies otherwise.
    """
    _check(a=a_MK, b=b, out=out_MN)
    other, epilogue = next(
        ((x, kind) for x, kind in ((slope_MN, GELU), (factor_MN, FACTOR), (residual_MN, RESIDUAL)) if x is not None),
        (None, PLAIN if gelu is None else GELU),
    )
    _check(other=other)
    if other is not None and other.stride() != out_MN.stride():
        raise ValueError(f"the other matrix must lie as out, got strides {other.stride()}")
    tile = tile or TILE
    (M, K), N = a_MK.shape, out_MN.shape[1]
    macros = {"A_ROWS": 1, "B_ROWS": int(not transposed_b), "EPILOGUE": epilogue, "TANH": int(gelu == "tanh")}
    macros["BIAS"] = int(bias_N is not None)
    kernel = cuda.load(PRODUCT, tile.macros() | macros).kernel("product_of_floats", "PPPPPiiiiii", patient=True)
    grid = -(-M // TILE_M) * -(-N // tile.columns)
    kernel.launch(
        (grid,), tile.threads, tile.smem(True, not transposed_b),
        (a_MK, b, out_MN, bias_N, other, M, N, K, a_MK.stride(0), b.stride(0), out_MN.stride(0)),
    )  # fmt: skip


def pack(gradients: Sequence[Gradient]) -> bytes:
    """The gradient kernel's parameter."""
    packed = b""
    for g in gradients:
        (M, K), how = g.dweight_MK.shape, ADD_WEIGHT * g.add_weight | ADD_BIAS * g.add_bias
        bias = 0 if g.dbias_M is None else g.dbias_M.data_ptr()
        packed += _PROBLEM.pack(
            g.dy_NM.data_ptr(), g.x_NK.data_ptr(), g.dweight_MK.data_ptr(), bias, M, K, g.dy_NM.stride(0),
            g.x_NK.stride(0), g.dweight_MK.stride(0), how,
        )  # fmt: skip
    return packed.ljust(MAX_PROBLEMS * _PROBLEM.size, b"\0")


def weight_gradients(gradients: Sequence[Gradient], *, also: Sequence[Job] = (), tile: Tile | None = None) -> None:
    """dW (+)= dYᵀ X and db (+)= column sums of dY for up to 64 layers over the same rows, all fp32. Deterministic.

    Args:
        gradients: the layers.
        also: further sums for the second launch, of what was there before, such as norms' partials.

    Raises:
        ValueError: more layers than that, layers of different row counts, or a matrix that lies otherwise.
    """
    N, device = gradients[0].dy_NM.shape[0], gradients[0].dy_NM.device
    if len(gradients) > MAX_PROBLEMS or any(g.dy_NM.shape[0] != N or g.x_NK.shape[0] != N for g in gradients):
        raise ValueError(f"one launch takes up to {MAX_PROBLEMS} layers over the same rows")
    for g in gradients:
        _check(dy=g.dy_NM, x=g.x_NK, dweight=g.dweight_MK)
    tile = tile or TILE
    shapes = tuple((g.dy_NM.shape[1], g.x_NK.shape[1], g.dbias_M is not None) for g in gradients)
    plan, starts, shares = launch_plan(shapes, -(-N // CHUNK), tile.columns, tile.blocks * processors(device), device)
    tiles = torch.empty(plan.parts, TILE_M, tile.columns, device=device)
    sums = torch.empty(plan.parts, TILE_M, device=device)
    macros = tile.macros() | {"MAX_PROBLEMS": MAX_PROBLEMS}
    kinds = f"B{MAX_PROBLEMS * _PROBLEM.size}PPPPi"
    kernel = cuda.load(GRADIENTS, macros).kernel("gradients_of_floats", kinds, patient=True)
    kernel.launch(
        (len(plan.work),), tile.threads, tile.smem(False, False), (pack(gradients), starts, shares, tiles, sums, N)
    )
    reduce_raw([*also, *jobs_of(gradients, plan, tiles, sums)], ready=len(also))
