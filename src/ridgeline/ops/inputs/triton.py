"""The input vector in one launch: a table of what stands in each column drives the gather.

After the vector stands a 1, which the product that follows multiplies with the bias and whose weight's gradient is the
bias's. Rows are padded to a multiple of 8 numbers with zeros, so that the product takes its fast path.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two

CATEGORY, NUMBER, ONE_HOT, PADDING, ONE = range(5)
_CATEGORY, _NUMBER, _ONE_HOT, _ONE = (tl.constexpr(kind) for kind in (CATEGORY, NUMBER, ONE_HOT, ONE))


@triton.jit(do_not_specialize=["N"])
def input_vector_kernel(
    categories_ptr, numbers_ptr, previous_ptr, tables_ptr, columns_ptr, out_ptr, N,
    K: tl.constexpr, M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """columns[w] = (kind, place, start, width): a table's element, a number, whether the class is `start`, or 1.

    An index out of its table's rows (columns[w, 4]) gives NaN.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_W = tl.arange(0, BLOCK_W)
    inside_W, inside_RW = column_W < W, (row_R < N)[:, None] & (column_W < W)[None, :]
    kind_W = tl.load(columns_ptr + column_W * 5, mask=inside_W, other=3)
    place_W = tl.load(columns_ptr + column_W * 5 + 1, mask=inside_W, other=0)
    start_W = tl.load(columns_ptr + column_W * 5 + 2, mask=inside_W, other=0)
    x_RW = tl.zeros((ROWS, BLOCK_W), dtype=tl.float32) + (kind_W == _ONE).to(tl.float32)[None, :]
    if categories_ptr is not None:
        width_W = tl.load(columns_ptr + column_W * 5 + 3, mask=inside_W, other=0)
        rows_W = tl.load(columns_ptr + column_W * 5 + 4, mask=inside_W, other=0)
        here_RW = inside_RW & (kind_W == _CATEGORY)[None, :]
        source_RW = categories_ptr + row_R.to(tl.int64)[:, None] * K + place_W[None, :]
        id_RW = tl.load(source_RW, mask=here_RW, other=0).to(tl.int32)
        known_RW = (id_RW >= 0) & (id_RW < rows_W[None, :])
        element_RW = tables_ptr + start_W[None, :] + id_RW * width_W[None, :]
        value_RW = tl.load(element_RW, mask=here_RW & known_RW, other=0.0).to(tl.float32)
        x_RW = tl.where(here_RW, tl.where(known_RW, value_RW, float("nan")), x_RW)
    if numbers_ptr is not None:
        here_RW = inside_RW & (kind_W == _NUMBER)[None, :]
        source_RW = numbers_ptr + row_R.to(tl.int64)[:, None] * M + place_W[None, :]
        x_RW = tl.where(here_RW, tl.load(source_RW, mask=here_RW, other=0.0).to(tl.float32), x_RW)
    if previous_ptr is not None:
        here_RW = inside_RW & (kind_W == _ONE_HOT)[None, :]
        source_RW = previous_ptr + row_R.to(tl.int64)[:, None] * H + place_W[None, :]
        hot_RW = tl.load(source_RW, mask=here_RW, other=-1).to(tl.int32) == start_W[None, :]
        x_RW = tl.where(here_RW, hot_RW.to(tl.float32), x_RW)
    tl.store(
        out_ptr + row_R.to(tl.int64)[:, None] * W + column_W[None, :], x_RW.to(out_ptr.dtype.element_ty), inside_RW
    )


def input_vector_raw(
    categories_NK: Tensor | None,
    numbers_NM: Tensor | None,
    previous_NH: Tensor | None,
    tables: Tensor,
    columns_W5: Tensor,
    out_NW: Tensor,
    config: Launch | None = None,
) -> None:
    """Write the padded input vectors. Allocates nothing.

    Args:
        categories_NK: integers of any width, contiguous, or None. `previous_NH`: the same. `numbers_NM`: any floats.
        tables: all tables' elements, one after the other.
        columns_W5: int32 (kind, place, start, width, rows) of each column; see `input_vector_kernel`.
        out_NW: contiguous.
        config: launch; None for the frozen one.
    """
    N, W = out_NW.shape
    block_w = power_of_two(W)
    config = config or Launch(rows=max(1, 2048 // block_w), warps=4)
    sizes = [0 if part is None else part.shape[1] for part in (categories_NK, numbers_NM, previous_NH)]
    input_vector_kernel[(grid_rows(N, config.rows),)](
        categories_NK, numbers_NM, previous_NH, tables, columns_W5, out_NW, N,
        K=sizes[0], M=sizes[1], H=sizes[2], W=W, ROWS=config.rows, BLOCK_W=block_w, num_warps=config.warps,
    )  # fmt: skip
