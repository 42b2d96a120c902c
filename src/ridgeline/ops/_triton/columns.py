"""The second stage of a column sum: partials, one row a program, added in a fixed order into a flat buffer.

A backward kernel that sums over rows (scale, bias, table gradients) leaves its program's part in one row of
`partials_PW`. Several kernels may fill different columns of one such matrix, so that a whole block needs one launch
of this; `index_W` then says where each column belongs in the flat gradient.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch


@triton.jit(do_not_specialize=["P", "W"])
def column_sums_kernel(
    partials_ptr, out_ptr, index_ptr, stride, P, W,
    ACCUMULATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """out[index[w]] (+)= Σ_p partials[p, w]."""
    previous_done(EARLY)
    column = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = column < W
    rows = tl.arange(0, BLOCK_P)
    sums = tl.zeros((BLOCK_P, BLOCK_W), dtype=tl.float32)
    for first in tl.range(0, P, BLOCK_P, num_stages=STAGES):
        row = first + rows
        address = partials_ptr + (row.to(tl.int64) * stride)[:, None] + column[None, :]
        sums += tl.load(address, mask=(row < P)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)
    target = column
    if index_ptr is not None:
        target = tl.load(index_ptr + column, mask=inside, other=0)
    if ACCUMULATE:
        total += tl.load(out_ptr + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=inside)


def config(P: int, W: int) -> Launch:
    """The launch for P rows of W columns.

    Up to a few thousand columns a program waits for memory once a tile (0.27 µs on an H200): tall sums take tall tiles.
    """
    if W > 4096:
        return Launch(rows=32, columns=128, warps=4)
    return Launch(rows=64, columns=16, warps=4) if P <= 256 else Launch(rows=256, columns=16, warps=8)


def column_sums_raw(
    partials_PW: Tensor,
    out: Tensor,
    index_W: Tensor | None = None,
    *,
    accumulate: bool = True,
    launch: Launch | None = None,
) -> None:
    """Add (or write) the column sums of `partials_PW` into `out`. Bitwise the same on every run; allocates nothing.

    Args:
        partials_PW: fp32, or any storage; rows may be strided, columns are contiguous.
        out: contiguous, any storage dtype; sums are fp32 until they are stored.
        index_W: int32, the element of `out` where each column's sum belongs; None for the first W.
        accumulate: add to `out` instead of writing it.
        launch: None for the frozen one.
    """
    P, W = partials_PW.shape
    launch = launch or config(P, W)
    column_sums_kernel[(triton.cdiv(W, launch.columns),)](
        partials_PW, out, index_W, partials_PW.stride(0), P, W,
        ACCUMULATE=accumulate, BLOCK_P=launch.rows, BLOCK_W=launch.columns, STAGES=launch.stages,
        num_warps=launch.warps, **early_launch(out.device),
    )  # fmt: skip
