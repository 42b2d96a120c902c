"""The gradients of a narrow head and of the norm before it from what the blocks of head.cu leave. Triton."""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch, power_of_two

LAUNCH = Launch(rows=64, warps=8)


class Place(NamedTuple):
    """Where an fp32 gradient goes, and whether to add it to what is there."""

    target: Tensor
    add: bool


@triton.jit
def column_of_sums(partials_ptr, stride, P, column_V, inside_V, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr):
    """Σ_p partials[p, column_V], in a fixed order."""
    row_P = tl.arange(0, BLOCK_P)
    sum_PV = tl.zeros((BLOCK_P, BLOCK_V), dtype=tl.float32)
    for first in range(0, P, BLOCK_P):
        place_PV = ((first + row_P) * stride)[:, None] + column_V[None, :]
        sum_PV += tl.load(partials_ptr + place_PV, mask=(first + row_P < P)[:, None] & inside_V[None, :], other=0.0)
    return tl.sum(sum_PV, axis=0)


@triton.jit
def put(pointer, value, mask, ADD: tl.constexpr):
    """value, or added to what is there."""
    if ADD:
        value += tl.load(pointer, mask=mask, other=0.0)
    tl.store(pointer, value, mask=mask)


@triton.jit(do_not_specialize=["P"])
def head_gradients_kernel(
    partials_ptr, stride, P, weight_ptr, scale_ptr, shift_ptr, factor_ptr, dweight_ptr, dscale_ptr, dshift_ptr,
    C: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, ADD_WEIGHT: tl.constexpr, ADD_SCALE: tl.constexpr,
    ADD_SHIFT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Of one column c, with N = Σ n g and G = Σ g of each class: dW = w N + b G, dw = Σ W N, db = Σ W G."""
    previous_done(EARLY)
    c = tl.program_id(0)
    class_V = tl.arange(0, BLOCK_V)
    inside_V = class_V < V
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    weight_V = tl.load(weight_ptr + class_V * C + c, mask=inside_V, other=0.0).to(tl.float32)
    normal_V = factor * column_of_sums(partials_ptr, stride, P, c * COLUMNS + class_V, inside_V, BLOCK_P, BLOCK_V)
    dweight_V = normal_V * tl.load(scale_ptr + c).to(tl.float32)
    put(dscale_ptr + c, tl.sum(weight_V * normal_V, axis=0), True, ADD_SCALE)
    if shift_ptr is not None:
        plain_V = factor * column_of_sums(partials_ptr, stride, P, C * COLUMNS + class_V, inside_V, BLOCK_P, BLOCK_V)
        dweight_V += plain_V * tl.load(shift_ptr + c).to(tl.float32)
        put(dshift_ptr + c, tl.sum(weight_V * plain_V, axis=0), True, ADD_SHIFT)
    put(dweight_ptr + class_V * C + c, dweight_V, inside_V, ADD_WEIGHT)


def head_gradients_raw(
    partials_PS: Tensor,
    weight_VC: Tensor,
    scale_C: Tensor,
    shift_C: Tensor | None,
    factor: Tensor | None,
    weight: Place,
    scale: Place,
    shift: Place | None,
    *,
    columns: int,
) -> None:
    """Adds up what blocks have left. Allocates nothing; the same on every run.

    Args:
        partials_PS: fp32, `head.partial_columns` of them a row.
        weight_VC, scale_C, shift_C: the head's weight and the norm's; the shift or None.
        factor: fp32[1] that multiplies the gradients, or None.
        weight, scale, shift: where they go; no shift's where there is none.
        columns: numbers that a column of the norm has there: V rounded up to a multiple of 8.
    """
    V, C = weight_VC.shape
    head_gradients_kernel[(C,)](
        partials_PS, partials_PS.stride(0), len(partials_PS), weight_VC, scale_C, shift_C, factor,
        weight.target, scale.target, None if shift is None else shift.target,
        C=C, V=V, COLUMNS=columns, ADD_WEIGHT=weight.add, ADD_SCALE=scale.add,
        ADD_SHIFT=shift is not None and shift.add, BLOCK_P=LAUNCH.rows, BLOCK_V=power_of_two(columns),
        num_warps=LAUNCH.warps, **early_launch(partials_PS.device),
    )  # fmt: skip
