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
_NUMBER, _ONE_HOT, _ONE = (tl.constexpr(kind) for kind in (NUMBER, ONE_HOT, ONE))


@triton.jit(do_not_specialize=["N"])
def input_vector_kernel(
    categories_ptr, numbers_ptr, previous_ptr, tables_ptr, columns_ptr, out_ptr, N,
    K: tl.constexpr, M: tl.constexpr, H: tl.constexpr, W: tl.constexpr, EMBEDDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """columns[w] = (kind, place, start, width): a table's element, a number, whether the class is `start`, or 1.

    The first EMBEDDED columns are tables' elements; an index out of its table's rows (columns[w, 4]) gives NaN. The
    kernel is bound by its instructions: no column goes through what another kind needs.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_R1, there_R1 = row_R.to(tl.int64)[:, None], (row_R < N)[:, None]
    if EMBEDDED > 0:
        column_E = tl.arange(0, BLOCK_E)
        inside_E = column_E < EMBEDDED
        inside_RE = there_R1 & inside_E[None, :]
        place_E = tl.load(columns_ptr + column_E * 5 + 1, mask=inside_E, other=0)
        start_E = tl.load(columns_ptr + column_E * 5 + 2, mask=inside_E, other=0)
        width_E = tl.load(columns_ptr + column_E * 5 + 3, mask=inside_E, other=0)
        rows_E = tl.load(columns_ptr + column_E * 5 + 4, mask=inside_E, other=0)
        id_RE = tl.load(categories_ptr + row_R1 * K + place_E[None, :], mask=inside_RE, other=0).to(tl.int32)
        known_RE = (id_RE >= 0) & (id_RE < rows_E[None, :])
        element_RE = tables_ptr + start_E[None, :] + id_RE * width_E[None, :]
        value_RE = tl.load(element_RE, mask=inside_RE & known_RE, other=0.0).to(tl.float32)
        value_RE = tl.where(known_RE, value_RE, float("nan"))
        tl.store(out_ptr + row_R1 * W + column_E[None, :], value_RE.to(out_ptr.dtype.element_ty), inside_RE)
    column_W = EMBEDDED + tl.arange(0, BLOCK_W)
    inside_W = column_W < W
    inside_RW = there_R1 & inside_W[None, :]
    kind_W = tl.load(columns_ptr + column_W * 5, mask=inside_W, other=3)
    place_W = tl.load(columns_ptr + column_W * 5 + 1, mask=inside_W, other=0)
    x_RW = tl.zeros((ROWS, BLOCK_W), dtype=tl.float32) + (kind_W == _ONE).to(tl.float32)[None, :]
    if numbers_ptr is not None:
        here_RW = inside_RW & (kind_W == _NUMBER)[None, :]
        source_RW = numbers_ptr + row_R1 * M + place_W[None, :]
        x_RW = tl.where(here_RW, tl.load(source_RW, mask=here_RW, other=0.0).to(tl.float32), x_RW)
    if previous_ptr is not None:
        start_W = tl.load(columns_ptr + column_W * 5 + 2, mask=inside_W, other=0)
        here_RW = inside_RW & (kind_W == _ONE_HOT)[None, :]
        source_RW = previous_ptr + row_R1 * H + place_W[None, :]
        hot_RW = tl.load(source_RW, mask=here_RW, other=-1).to(tl.int32) == start_W[None, :]
        x_RW = tl.where(here_RW, hot_RW.to(tl.float32), x_RW)
    tl.store(out_ptr + row_R1 * W + column_W[None, :], x_RW.to(out_ptr.dtype.element_ty), inside_RW)


def input_vector_raw(
    categories_NK: Tensor | None,
    numbers_NM: Tensor | None,
    previous_NH: Tensor | None,
    tables: Tensor,
    columns_W5: Tensor,
    embedded: int,
    out_NW: Tensor,
    config: Launch | None = None,
) -> None:
    """Write the padded input vectors. Allocates nothing.

    Args:
        categories_NK: integers of any width, contiguous, or None. `previous_NH`: the same. `numbers_NM`: any floats.
        tables: all tables' elements, one after the other.
        columns_W5: int32 (kind, place, start, width, rows) of each column; see `input_vector_kernel`.
        embedded: columns of tables' elements, which come first.
        out_NW: contiguous.
        config: launch; None for the frozen one.
    """
    N, W = out_NW.shape
    block_e, block_w = power_of_two(max(embedded, 1)), power_of_two(W - embedded)
    config = config or Launch(rows=max(1, 2048 // power_of_two(block_e + block_w)), warps=4)
    sizes = [0 if part is None else part.shape[1] for part in (categories_NK, numbers_NM, previous_NH)]
    input_vector_kernel[(grid_rows(N, config.rows),)](
        categories_NK, numbers_NM, previous_NH, tables, columns_W5, out_NW, N,
        K=sizes[0], M=sizes[1], H=sizes[2], W=W, EMBEDDED=embedded, ROWS=config.rows, BLOCK_E=block_e, BLOCK_W=block_w,
        num_warps=config.warps,
    )  # fmt: skip
