"""The gradient of a large embedding table in Triton, without atomics: a segmented sum over sorted indices.

The sort is stable, and a chunk of 64 sorted rows holds few runs of equal indices: a run inside a chunk belongs to one
program alone and is added straight to the table; the runs at a chunk's two ends are left as partials, which one program
a run adds in order.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two

CHUNK = 64  # sorted indices of a chunk
SORTED = Launch(rows=CHUNK, warps=8, columns=128)  # of their gradient


@triton.jit(do_not_specialize=["N"])
def table_gradient_sorted_kernel(
    dout_ptr, order_ptr, sorted_ptr, dtable_ptr, ends_ptr, N, K, stride, V,
    C: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of the runs of one chunk: inner runs are added to the table, first and last are left in `ends`.

    Programs of a chunk follow each other, so that memory is read a row at a time.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    chunk = tl.program_id(0) // blocks
    column_C = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = column_C < C
    lane_R = tl.arange(0, CHUNK)
    place_R = chunk * CHUNK + lane_R
    inside_R = place_R < N * K
    id_R = tl.load(sorted_ptr + place_R, mask=inside_R, other=-1)
    before_R = tl.load(sorted_ptr + place_R - 1, mask=inside_R & (lane_R > 0), other=-1)
    run_R = tl.cumsum(((id_R != before_R) & (lane_R > 0)).to(tl.int32), axis=0)
    item_R = tl.load(order_ptr + place_R, mask=inside_R, other=0)
    source_RC = dout_ptr + ((item_R // K) * stride + (item_R % K) * C)[:, None] + column_C[None, :]
    dout_RC = tl.load(source_RC, mask=inside_R[:, None] & inside_C[None, :], other=0.0)
    member_RR = (lane_R[:, None] == run_R[None, :]) & inside_R[None, :]
    sum_RC = tl.dot(member_RR.to(dout_ptr.dtype.element_ty), dout_RC, input_precision="ieee")
    run_id_R = tl.max(tl.where(member_RR, id_R[None, :], -1), axis=1)  # of the run numbered by the lane
    last = tl.max(tl.where(inside_R, run_R, 0), axis=0)
    known_R = (run_id_R >= 0) & (run_id_R < V)
    inner_RC = (known_R & (lane_R > 0) & (lane_R < last))[:, None] & inside_C[None, :]
    target_RC = dtable_ptr + (run_id_R.to(tl.int64) * C)[:, None] + column_C[None, :]
    tl.store(target_RC, tl.load(target_RC, mask=inner_RC, other=0.0) + sum_RC, mask=inner_RC)
    end_RC = ends_ptr + ((chunk.to(tl.int64) * 2 + tl.where(lane_R == 0, 0, 1)) * C)[:, None] + column_C[None, :]
    tl.store(end_RC, sum_RC, mask=((lane_R == 0) | (lane_R == last))[:, None] & inside_C[None, :])


@triton.jit(do_not_specialize=["N"])
def table_gradient_ends_kernel(
    sorted_ptr, dtable_ptr, ends_ptr, N, V,
    C: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add a run that begins in this chunk and is its first or last: the parts of the chunks it spans, in order."""
    chunk = tl.program_id(0)
    which = tl.program_id(1)
    column_C = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_C = column_C < C
    first = chunk * CHUNK
    final = tl.minimum(first + CHUNK, N) - 1
    head, tail = tl.load(sorted_ptr + first), tl.load(sorted_ptr + final)
    previous = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    single = head == tail
    # the first run is this program's to add when it begins here; a chunk of a single run has no last one
    owns = tl.where(which == 0, head != previous, head != tail)
    id_ = tl.where(which == 0, head, tail)
    if owns & (id_ >= 0) & (id_ < V):
        sum_C = tl.load(ends_ptr + (chunk.to(tl.int64) * 2 + which) * C + column_C, mask=inside_C, other=0.0)
        if single | (which == 1):
            rest_RC = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
            following = chunk + 1
            chunks = tl.cdiv(N, CHUNK)
            more = following < chunks
            while more:
                row_R = following + tl.arange(0, ROWS)
                head_R = tl.load(sorted_ptr + row_R * CHUNK, mask=row_R < chunks, other=-1)
                same_R = head_R == id_
                address_RC = ends_ptr + (row_R.to(tl.int64) * 2 * C)[:, None] + column_C[None, :]
                rest_RC += tl.load(address_RC, mask=same_R[:, None] & inside_C[None, :], other=0.0)
                following += ROWS
                more = (following < chunks) & (tl.sum(same_R.to(tl.int32), axis=0) == ROWS)
            sum_C += tl.sum(rest_RC, axis=0)
        target_C = dtable_ptr + id_.to(tl.int64) * C + column_C
        tl.store(target_C, tl.load(target_C, mask=inside_C, other=0.0) + sum_C, mask=inside_C)


def table_gradient_sorted_raw(
    dout_NX: Tensor, ids_NK: Tensor, dtable_VC: Tensor, ends_Z2C: Tensor, *, config: Launch | None = None
) -> None:
    """Add a large table's gradient: a stable sort (whose memory comes from the caching allocator) and two launches.

    Args:
        dout_NX: gradient of the gathered rows, K · C columns used; rows may be strided.
        ids_NK: as in the forward pass. `dtable_VC`: fp32, added to.
        ends_Z2C: fp32 for the runs at the ends of Z = ⌈N · K / 64⌉ chunks.
        config: launch (warps, columns); None for the frozen one.
    """
    (N, K), (V, C) = ids_NK.shape, dtable_VC.shape
    config = config or SORTED
    sorted_ids, order = torch.sort(ids_NK.flatten(), stable=True)
    block_c = max(16, min(config.columns, power_of_two(C)))
    chunks = grid_rows(N * K, CHUNK)
    table_gradient_sorted_kernel[(chunks * grid_rows(C, block_c),)](
        dout_NX, order, sorted_ids, dtable_VC, ends_Z2C, N, K, dout_NX.stride(0), V,
        C=C, CHUNK=CHUNK, BLOCK_C=block_c, num_warps=config.warps,
    )  # fmt: skip
    block_c = max(16, min(64, power_of_two(C)))
    table_gradient_ends_kernel[(chunks, 2, grid_rows(C, block_c))](
        sorted_ids, dtable_VC, ends_Z2C, N * K, V, C=C, CHUNK=CHUNK, ROWS=16, BLOCK_C=block_c, num_warps=4
    )
