"""Matrix products on a rung: forward, input gradient, weight gradient, and the bias's column sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.models.rungs.ladder import Rung
from ridgeline.models.rungs.run import Run
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.linear.tiled import PLAIN, Epilogue, Tile, product_raw, segments_of
from ridgeline.ops.scope import scope

MANY_ROWS = 4096  # of a matrix whose column sums PyTorch's reduction makes faster
TILES = {
    "16x64": Tile(rows=16, columns=64, depth=64, warps=2, stages=1),
    "128x128": Tile(rows=128, columns=128, depth=64, warps=8, stages=1),
    "pipelined": Tile(rows=128, columns=128, depth=64, warps=8, stages=3),
}


def tile_of(rung: Rung) -> Tile:
    """The tile of every product on a rung."""
    return TILES[rung.tiles]


def product(run: Run, name: str, x_NK: Tensor, weight_MK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """x Wᵀ, behind an epilogue."""
    out_NM = run.buffers.new(x_NK, x_NK.shape[0], weight_MK.shape[0])
    with scope(name):
        product_raw(x_NK, weight_MK.t(), out_NM, tile_of(run.rung), epilogue=epilogue)
    return out_NM


def input_gradient(run: Run, name: str, dy_NM: Tensor, weight_MK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """dy W, behind an epilogue."""
    dx_NK = run.buffers.new(dy_NM, dy_NM.shape[0], weight_MK.shape[1])
    with scope(f"{name}.input_gradient"):
        product_raw(dy_NM, weight_MK, dx_NK, tile_of(run.rung), epilogue=epilogue)
    return dx_NK


def reduce_rows(run: Run, a_UNM: Tensor, b_UNK: Tensor, out_MK: Tensor, *, accumulate: bool) -> None:
    """out (+)= Σ over u and n of aᵀ b: whole sums, or segments and a second kernel that adds them."""
    (U, N, M), K = a_UNM.shape, b_UNK.shape[2]
    tile = tile_of(run.rung)
    pieces, segment = segments_of(M, K, N, tile, a_UNM, U) if run.rung.split else (1, N)
    if pieces * U == 1:
        product_raw(a_UNM[0].t(), b_UNK[0], out_MK, tile, accumulate=accumulate)
        return
    parts = run.buffers.new(a_UNM, U, pieces, M, K, dtype=torch.float32)
    product_raw(a_UNM.transpose(1, 2), b_UNK, parts, tile, segment=segment)
    column_sums_raw(parts.view(U * pieces, M * K), out_MK.view(-1), accumulate=accumulate)
    run.buffers.done(parts)


def weight_gradient(run: Run, name: str, weight_MK: Tensor, dy_NM: Tensor, x_NK: Tensor) -> None:
    """dyᵀ x to where the weight's gradient goes."""
    with scope(f"{name}.weight_gradient"), run.gradient(weight_MK) as (target_MK, add):
        reduce_rows(run, dy_NM[None], x_NK[None], target_MK, accumulate=add)


def bias_gradient(run: Run, bias_M: Tensor | None, dy_NM: Tensor, name: str = "bias gradients") -> None:
    """Column sums of dy, or of partial sums over its rows, to where the bias's gradient goes.

    The kernel for partial sums takes a program a few columns and all rows; for as many rows as there are tokens
    PyTorch's reduction, which splits them, is eight times as fast.
    """
    if bias_M is None:
        return
    with scope(name), run.gradient(bias_M) as (target_M, add):
        if len(dy_NM) < MANY_ROWS:
            column_sums_raw(dy_NM, target_M, accumulate=add)
            return
        sums_M = torch.sum(dy_NM, 0, dtype=torch.float32)
        target_M.add_(sums_M) if add else target_M.copy_(sums_M)


def add_bias(run: Run, name: str, y_NM: Tensor, bias_M: Tensor | None) -> Tensor:
    """y + b as a pass of its own."""
    if bias_M is None:
        return y_NM
    out_NM = run.buffers.new(y_NM, *y_NM.shape)
    with scope(f"{name}.bias"):
        torch.add(y_NM, bias_M, out=out_NM)
    run.buffers.done(y_NM)
    return out_NM


def project(run: Run, name: str, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    """x Wᵀ + b, the bias in the epilogue or as a pass of its own."""
    if run.rung.pointwise == "epilogue":
        return product(run, name, x_NK, weight_MK, Epilogue(bias_N=bias_M))
    return add_bias(run, name, product(run, name, x_NK, weight_MK), bias_M)
