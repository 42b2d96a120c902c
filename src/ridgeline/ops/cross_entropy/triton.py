"""Cross-entropy in Triton: the loss and the gradient of the logits in one pass, in place where wanted.

Up to 2,048 classes a tile holds whole rows; beyond, a program sweeps a row twice (the second time from L2). Bytes a
row: logits once in, gradient once out. The number of valid rows is counted first, as integers, so that it is exact.

Rows whose length is a multiple of 8 are read 16 bytes at a time, others element by element: heads of 37 or 50,257
classes had better be padded. What the padding holds does not matter; its gradient is written as 0.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two, processors
from ridgeline.ops.cross_entropy.cost import WHOLE_ROWS
from ridgeline.ops.cross_entropy.reference import IGNORE

_IGNORE = tl.constexpr(IGNORE)
_LOG2_E = tl.constexpr(1.44269504088896)
_LOWEST = tl.constexpr(-3.0e38)
COUNTS = 64  # partial counts of valid rows
MAX_PROGRAMS = 4096


@triton.jit(do_not_specialize=["N"])
def count_valid_kernel(targets_ptr, counts_ptr, N, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """Valid targets seen by each program."""
    previous_done(EARLY)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        total += (tl.load(targets_ptr + row * stride, mask=row < N, other=_IGNORE) != _IGNORE).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def row_scale(counts_ptr, gradient_scale_ptr, COUNTS: tl.constexpr):
    """1 / #valid, times the scale that the gradient carries (a loss scale); scalars."""
    count = tl.sum(tl.load(counts_ptr + tl.arange(0, COUNTS)), axis=0).to(tl.float32)
    scale = 1.0 / count
    if gradient_scale_ptr is not None:
        scale *= tl.load(gradient_scale_ptr)
    return scale


@triton.jit(do_not_specialize=["N"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, dlogits_ptr, losses_ptr, counts_ptr, gradient_scale_ptr, N, stride, dstride,
    targets_stride, partials_ptr, partials_stride,
    V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, COUNTS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Whole rows in a tile. This program's sum of losses and, where wanted, of the gradient's columns.

    Columns V … WIDTH − 1 of the gradient become 0.
    """
    previous_done(EARLY)
    scale = row_scale(counts_ptr, gradient_scale_ptr, COUNTS)
    column_V = tl.arange(0, BLOCK_V)
    loss_R = tl.zeros((ROWS,), dtype=tl.float32)
    if partials_ptr is not None:
        sum_RV = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row_R = tile * ROWS + tl.arange(0, ROWS)
        address_RV = logits_ptr + (row_R.to(tl.int64) * stride)[:, None] + column_V[None, :]
        mask_RV = (row_R < N)[:, None] & (column_V < WIDTH)[None, :]
        x_RV = tl.load(address_RV, mask=mask_RV, other=0.0).to(tl.float32)
        x_RV = tl.where((column_V < V)[None, :], x_RV, float("-inf"))
        target_R = tl.load(targets_ptr + row_R * targets_stride, mask=row_R < N, other=_IGNORE).to(tl.int32)
        highest_R = tl.max(x_RV, axis=1)
        e_RV = tl.exp2((x_RV - highest_R[:, None]) * _LOG2_E)
        sum_R = tl.sum(e_RV, axis=1)
        hit_RV = column_V[None, :] == target_R[:, None]
        chosen_R = tl.sum(tl.where(hit_RV, x_RV, 0.0), axis=1)
        chosen_R = tl.where((target_R >= 0) & (target_R < V), chosen_R, float("nan"))
        valid_R = target_R != _IGNORE
        loss_R += tl.where(valid_R, highest_R + tl.log(sum_R) - chosen_R, 0.0)
        if dlogits_ptr is not None:
            gradient_RV = e_RV * (1.0 / sum_R)[:, None] - hit_RV.to(tl.float32)
            gradient_RV = tl.where(valid_R[:, None] & (column_V < V)[None, :], gradient_RV * scale, 0.0)
            out_RV = dlogits_ptr + (row_R.to(tl.int64) * dstride)[:, None] + column_V[None, :]
            tl.store(out_RV, gradient_RV.to(dlogits_ptr.dtype.element_ty), mask=mask_RV)
            if partials_ptr is not None:
                sum_RV += gradient_RV
    if partials_ptr is not None:
        address_V = partials_ptr + tl.program_id(0) * partials_stride + column_V
        tl.store(address_V, tl.sum(sum_RV, axis=0), mask=column_V < V)
    tl.store(losses_ptr + tl.program_id(0), tl.sum(loss_R, axis=0))


@triton.jit(do_not_specialize=["N"])
def cross_entropy_wide_kernel(
    logits_ptr, targets_ptr, dlogits_ptr, losses_ptr, counts_ptr, gradient_scale_ptr, N, stride, dstride,
    targets_stride,
    V: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BLOCK_V: tl.constexpr, COUNTS: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One row at a time, two sweeps: each lane's running maximum and sum, then the gradient.

    A lane takes DEPTH elements a turn, so that it rescales its sum once for all of them.
    """
    previous_done(EARLY)
    scale = row_scale(counts_ptr, gradient_scale_ptr, COUNTS)
    column_DV = (tl.arange(0, DEPTH) * BLOCK_V)[:, None] + tl.arange(0, BLOCK_V)[None, :]
    loss = 0.0
    for row in tl.range(tl.program_id(0), N, tl.num_programs(0)):
        row_ptr = logits_ptr + tl.cast(row, tl.int64) * stride
        target = tl.load(targets_ptr + row * targets_stride).to(tl.int32)
        known = (target >= 0) & (target < V)
        # read before the reductions below, whose barriers keep it ahead of a gradient written in place
        chosen = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
        highest_V = tl.full((BLOCK_V,), _LOWEST, dtype=tl.float32)
        sum_V = tl.zeros((BLOCK_V,), dtype=tl.float32)
        for first in range(0, WIDTH, DEPTH * BLOCK_V):
            place_DV = first + column_DV
            x_DV = tl.load(row_ptr + place_DV, mask=place_DV < WIDTH, other=0.0).to(tl.float32)
            x_DV = tl.where(place_DV < V, x_DV, float("-inf"))
            raised_V = tl.maximum(highest_V, tl.max(x_DV, axis=0))
            e_DV = tl.exp2((x_DV - raised_V[None, :]) * _LOG2_E)
            sum_V = sum_V * tl.exp2((highest_V - raised_V) * _LOG2_E) + tl.sum(e_DV, axis=0)
            highest_V = raised_V
        highest = tl.max(highest_V, axis=0)
        total = tl.sum(sum_V * tl.exp2((highest_V - highest) * _LOG2_E), axis=0)
        valid = target != _IGNORE
        loss += tl.where(valid, highest + tl.log(total) - chosen, 0.0)
        if dlogits_ptr is not None:
            factor = scale / total
            out_ptr = dlogits_ptr + tl.cast(row, tl.int64) * dstride
            for first in range(0, WIDTH, DEPTH * BLOCK_V):
                place_DV = first + column_DV
                x_DV = tl.load(row_ptr + place_DV, mask=place_DV < WIDTH, other=0.0).to(tl.float32)
                gradient_DV = tl.exp2((x_DV - highest) * _LOG2_E) * factor - tl.where(place_DV == target, scale, 0.0)
                gradient_DV = tl.where((place_DV < V) & valid, gradient_DV, 0.0)
                tl.store(out_ptr + place_DV, gradient_DV.to(dlogits_ptr.dtype.element_ty), mask=place_DV < WIDTH)
    tl.store(losses_ptr + tl.program_id(0), loss)


@triton.jit(do_not_specialize=["P"])
def mean_loss_kernel(
    losses_ptr, counts_ptr, loss_ptr, P, BLOCK: tl.constexpr, COUNTS: tl.constexpr, EARLY: tl.constexpr = False
):
    """loss = Σ partial losses / #valid, in a fixed order."""
    previous_done(EARLY)
    rows = tl.arange(0, BLOCK)
    total_B = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, P, BLOCK):
        total_B += tl.load(losses_ptr + first + rows, mask=first + rows < P, other=0.0)
    tl.store(loss_ptr, tl.sum(total_B, axis=0) * row_scale(counts_ptr, None, COUNTS))


def config(N: int, V: int) -> Launch:
    """The launch for N rows of V classes."""
    if V > WHOLE_ROWS:
        return Launch(rows=4, columns=2048, warps=8, per_processor=4)
    if V <= 16:
        return Launch(rows=64, warps=4, per_processor=4)
    return Launch(rows=max(1, min(16, 1024 // power_of_two(V))), warps=1, per_processor=16)


def loss_partials(N: int, V: int, tensor: Tensor, launch: Launch | None = None) -> int:
    """Partial losses (programs) of a launch on the tensor's card."""
    launch = launch or config(N, V)
    tiles = N if V > WHOLE_ROWS else grid_rows(N, launch.rows)
    return min(tiles, launch.per_processor * processors(tensor.device), MAX_PROGRAMS)


def count_valid_raw(targets_N: Tensor, counts: Tensor) -> None:
    """Write the number of valid targets, in `COUNTS` parts, into int32 `counts`."""
    N, stride = targets_N.shape[0], targets_N.stride(0)
    count_valid_kernel[(counts.shape[0],)](
        targets_N, counts, N, stride, BLOCK=1024, num_warps=4, **early_launch(counts.device)
    )


def cross_entropy_raw(
    logits_NW: Tensor,
    targets_N: Tensor,
    dlogits_NW: Tensor | None,
    losses_P: Tensor,
    counts: Tensor,
    *,
    classes: int,
    gradient_scale: Tensor | None = None,
    partials_PV: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Losses and the gradient of the logits. Allocates nothing.

    Args:
        logits_NW: any storage dtype, W ≥ classes; rows may be strided, columns are contiguous.
        targets_N: signed integers, −100 where ignored, may be strided; a class out of range makes the loss NaN.
        dlogits_NW: gradient; may be the logits' own memory, or None for the loss alone. Columns from `classes` on
            become 0.
        losses_P: fp32 partial sums of losses, `loss_partials` of them.
        counts: int32, a power of two of them, whose sum is the number of rows that the mean is over.
        classes: V.
        gradient_scale: fp32[1] that multiplies the gradient (a loss scale), or None.
        partials_PV: fp32, one row for each of `losses_P`: column sums of the gradient before it is rounded, for a
            bias; up to 2,048 classes. None where not wanted.
        launch: None for the frozen one; beyond 2,048 classes its rows are the depth of a lane's turn.
    """
    N, W = logits_NW.shape
    launch = launch or config(N, classes)
    arguments = (
        logits_NW, targets_N, dlogits_NW, losses_P, counts, gradient_scale,
        N, logits_NW.stride(0), 0 if dlogits_NW is None else dlogits_NW.stride(0), targets_N.stride(0),
    )  # fmt: skip
    sizes = {
        "V": classes,
        "WIDTH": W,
        "COUNTS": counts.shape[0],
        "num_warps": launch.warps,
        **early_launch(counts.device),
    }
    if classes > WHOLE_ROWS:
        cross_entropy_wide_kernel[(losses_P.shape[0],)](*arguments, DEPTH=launch.rows, BLOCK_V=launch.columns, **sizes)
        return
    cross_entropy_kernel[(losses_P.shape[0],)](
        *arguments, partials_PV, 0 if partials_PV is None else partials_PV.stride(0),
        ROWS=launch.rows, BLOCK_V=power_of_two(W), **sizes,
    )  # fmt: skip


def mean_loss_raw(losses_P: Tensor, counts: Tensor, loss: Tensor) -> None:
    """Write the mean loss into fp32[1] `loss`. Partial losses of several launches may lie one after the other."""
    mean_loss_kernel[(1,)](
        losses_P, counts, loss, losses_P.shape[0], BLOCK=1024, COUNTS=counts.shape[0], num_warps=4,
        **early_launch(loss.device),
    )  # fmt: skip
