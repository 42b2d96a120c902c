"""Embedding in Triton: gather forward; table and position gradients without unordered atomics.

The table's gradient is a segmented sum. Small tables (≤ 512 rows) take it as a product with a one-hot matrix built in
registers, split along the rows, the parts added in a fixed order. Larger ones sort the indices first (sorted.py).
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two, processors, program_bytes
from ridgeline.ops.dropout.reference import DropoutState, quantise
from ridgeline.ops.dropout.triton import hidden_keep_tile, site_keys
from ridgeline.ops.embedding.sorted import CHUNK, table_gradient_sorted_raw
from ridgeline.ops.norm.triton import forward_config as norm_config

ONE_HOT_ROWS = 512  # table rows up to which the gradient is a one-hot product
PLACES = 2  # positions of a program that sums table and positions
MANY_ITEMS = 65536  # from which it fills a card
BESIDE = Launch(
    rows=64, warps=8, columns=256, stages=4
)  # of it, where a program can have BESIDE_BYTES of shared memory
BESIDE_BYTES = 160 * 1024


@triton.jit(do_not_specialize=["site", "sample_offset", "N"])
def gather_kernel(
    ids_ptr, table_ptr, positions_ptr, out_ptr, seed_step_ptr, site, sample_offset, N, K, T, out_stride, scale,
    C: tl.constexpr, V: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """out[n, k · C …] = dropout(table[ids[n, k]] + positions[n mod T]); NaN for an index out of range."""
    previous_done(EARLY)
    item_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, BLOCK_C)
    row_R, place_R = item_R // K, item_R % K
    inside_R = item_R < N * K
    inside_RC = inside_R[:, None] & (column_C < C)[None, :]
    id_R = tl.load(ids_ptr + item_R, mask=inside_R, other=0).to(tl.int64)
    known_R = (id_R >= 0) & (id_R < V)
    source_RC = table_ptr + (id_R * C)[:, None] + column_C[None, :]
    x_RC = tl.load(source_RC, mask=inside_RC & known_R[:, None], other=0.0).to(tl.float32)
    x_RC = tl.where(known_R[:, None], x_RC, float("nan"))
    if positions_ptr is not None:
        place_RC = positions_ptr + ((row_R % T) * C)[:, None] + column_C[None, :]
        x_RC += tl.load(place_RC, mask=inside_RC, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        key_0, key_1 = site_keys(seed_step_ptr, site)
        keep_RC = hidden_keep_tile(key_0, key_1, sample_offset, row_R, column_C, T, C, THRESHOLD)
        x_RC = tl.where(keep_RC, x_RC * scale, 0.0)
    out_RC = out_ptr + (row_R.to(tl.int64) * out_stride + place_R * C)[:, None] + column_C[None, :]
    tl.store(out_RC, x_RC.to(out_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit(do_not_specialize=["N"])
def gather_norm_kernel(
    ids_ptr, table_ptr, positions_ptr, weight_ptr, bias_ptr, out_ptr, h_ptr, mean_ptr, rstd_ptr, N, T, eps,
    C: tl.constexpr, V: tl.constexpr, RMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """out[n] = table[ids[n]] + positions[n mod T], NaN for an index out of range; h = norm(out), its statistics."""
    previous_done(EARLY)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, BLOCK_C)
    inside_R, inside_C = row_R < N, column_C < C
    inside_RC = inside_R[:, None] & inside_C[None, :]
    id_R = tl.load(ids_ptr + row_R, mask=inside_R, other=0).to(tl.int64)
    known_R = (id_R >= 0) & (id_R < V)
    source_RC = table_ptr + (id_R * C)[:, None] + column_C[None, :]
    x_RC = tl.load(source_RC, mask=inside_RC & known_R[:, None], other=0.0).to(tl.float32)
    if positions_ptr is not None:
        place_RC = positions_ptr + ((row_R % T) * C)[:, None] + column_C[None, :]
        x_RC += tl.load(place_RC, mask=inside_RC, other=0.0).to(tl.float32)
    x_RC = tl.where(known_R[:, None], x_RC, float("nan"))
    target_RC = (row_R.to(tl.int64) * C)[:, None] + column_C[None, :]
    stored_RC = x_RC.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + target_RC, stored_RC, mask=inside_RC)
    x_RC = tl.where(inside_C[None, :], stored_RC.to(tl.float32), 0.0)
    if not RMS:
        mean_R = tl.sum(x_RC, axis=1) / C
        x_RC = tl.where(inside_C[None, :], x_RC - mean_R[:, None], 0.0)
        tl.store(mean_ptr + row_R, mean_R, mask=inside_R)
    rstd_R = 1.0 / tl.sqrt(tl.sum(x_RC * x_RC, axis=1) / C + eps)
    tl.store(rstd_ptr + row_R, rstd_R, mask=inside_R)
    h_RC = x_RC * rstd_R[:, None] * tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        h_RC += tl.load(bias_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    tl.store(h_ptr + target_RC, h_RC.to(h_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit(do_not_specialize=["N"])
def table_gradient_small_kernel(
    dout_ptr, ids_ptr, partials_ptr, partials_stride, N, K, stride, ids_stride, V,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """partials[program] = onehot(ids)ᵀ · dout over this program's share of the items; (V, C) flattened."""
    previous_done(EARLY)
    row_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    column_C = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    sum_VC = tl.zeros((BLOCK_V, BLOCK_C), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N * K, ROWS), tl.num_programs(0)):
        item_R = tile * ROWS + tl.arange(0, ROWS)
        inside_R = item_R < N * K
        id_R = tl.load(ids_ptr + (item_R // K) * ids_stride + item_R % K, mask=inside_R, other=-1).to(tl.int32)
        source_RC = dout_ptr + ((item_R // K).to(tl.int64) * stride + (item_R % K) * C)[:, None] + column_C[None, :]
        dout_RC = tl.load(source_RC, mask=inside_R[:, None] & (column_C < C)[None, :], other=0.0)
        hot_VR = (row_V[:, None] == id_R[None, :]).to(dout_ptr.dtype.element_ty)
        sum_VC = tl.dot(hot_VR, dout_RC, sum_VC, input_precision="ieee")
    out_VC = partials_ptr + tl.program_id(0) * partials_stride + (row_V * C)[:, None] + column_C[None, :]
    tl.store(out_VC, sum_VC, mask=(row_V < V)[:, None] & (column_C < C)[None, :])


@triton.jit(do_not_specialize=["B"])
def table_and_place_gradients_kernel(
    dout_ptr, ids_ptr, partials_ptr, partials_stride, dplaces_ptr, B, T,
    C: tl.constexpr, V: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, ACCUMULATE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """The same over all items at PLACES neighbouring positions, and their own sums: rows of the one-hot behind V."""
    previous_done(EARLY)
    first_place = tl.program_id(0) * PLACES
    row_V = tl.arange(0, BLOCK_V)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    lane_R = tl.arange(0, ROWS)
    place_R, inside_C = lane_R % PLACES, column_C < C
    sum_VC = tl.zeros((BLOCK_V, BLOCK_C), dtype=tl.float32)
    for first in tl.range(0, B, ROWS // PLACES):
        sample_R = first + lane_R // PLACES
        inside_R = (sample_R < B) & (first_place + place_R < T)
        item_R = sample_R * T + first_place + place_R
        id_R = tl.load(ids_ptr + item_R, mask=inside_R, other=-1).to(tl.int32)
        source_RC = dout_ptr + (item_R.to(tl.int64) * C)[:, None] + column_C[None, :]
        dout_RC = tl.load(source_RC, mask=inside_R[:, None] & inside_C[None, :], other=0.0)
        of_table_VR = (row_V[:, None] == id_R[None, :]) & (row_V < V)[:, None]
        of_place_VR = row_V[:, None] == (V + place_R)[None, :]
        sum_VC = tl.dot(
            (of_table_VR | of_place_VR).to(dout_ptr.dtype.element_ty), dout_RC, sum_VC, input_precision="ieee"
        )
    out_VC = partials_ptr + tl.program_id(0) * partials_stride + (row_V * C)[:, None] + column_C[None, :]
    tl.store(out_VC, sum_VC, mask=(row_V < V)[:, None] & inside_C[None, :])
    place_V = first_place + row_V - V
    there_VC = ((row_V >= V) & (row_V < V + PLACES) & (place_V < T))[:, None] & inside_C[None, :]
    place_VC = dplaces_ptr + (place_V * C)[:, None] + column_C[None, :]
    if ACCUMULATE:
        sum_VC += tl.load(place_VC, mask=there_VC, other=0.0)
    tl.store(place_VC, sum_VC, mask=there_VC)


def gather_raw(
    ids_NK: Tensor,
    table_VC: Tensor,
    out_NX: Tensor,
    *,
    positions_RC: Tensor | None = None,
    T: int = 1,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    config: Launch | None = None,
) -> None:
    """Write the rows of `table_VC` that `ids_NK` names into `out_NX`, K · C columns a row. Allocates nothing.

    Args:
        ids_NK: int64 or int32, contiguous; an index out of range gives NaN.
        table_VC: contiguous. `positions_RC`: added by position (K is 1 then), or None.
        out_NX: at least K · C columns; rows may be strided (a slice of a concatenated input).
        T: positions of a sample. `p`, `dropout`, `site`: dropout of the sum (K is 1 then).
        config: launch; None for the frozen one.
    """
    (N, K), (V, C) = ids_NK.shape, table_VC.shape
    block_c = max(power_of_two(C), 8)
    config = config or Launch(rows=max(1, min(256, 2048 // block_c)), warps=4)
    threshold, scale = quantise(p) if dropout is not None else (0, 1.0)
    gather_kernel[(grid_rows(N * K, config.rows),)](
        ids_NK, table_VC, positions_RC, out_NX, dropout.seed_step if dropout is not None else None, site,
        dropout.sample_offset if dropout is not None else 0, N, K, T, out_NX.stride(0), scale,
        C=C, V=V, THRESHOLD=threshold, ROWS=config.rows, BLOCK_C=block_c, num_warps=config.warps,
        **early_launch(out_NX.device),
    )  # fmt: skip


def gather_norm_raw(
    ids_N: Tensor,
    table_VC: Tensor,
    positions_RC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor | None,
    out_NC: Tensor,
    h_NC: Tensor,
    mean_N: Tensor | None,
    rstd_N: Tensor,
    *,
    T: int,
    eps: float,
) -> None:
    """`gather_raw` of one index a row without dropout, and the norm of its result. Allocates nothing.

    Args:
        ids_N, table_VC, positions_RC, T: as there.
        weight_C, bias_C: of the norm; the bias or None.
        out_NC, h_NC: contiguous. `mean_N`, `rstd_N`: fp32 statistics; no mean for RMSNorm.
        eps: added to the variance.
    """
    N, (V, C) = len(ids_N), table_VC.shape
    config = norm_config(N, C)
    gather_norm_kernel[(grid_rows(N, config.rows),)](
        ids_N, table_VC, positions_RC, weight_C, bias_C, out_NC, h_NC, mean_N, rstd_N, N, T, eps,
        C=C, V=V, RMS=mean_N is None, ROWS=config.rows, BLOCK_C=power_of_two(C), num_warps=config.warps,
        **early_launch(out_NC.device),
    )  # fmt: skip


def small_config(items: int, V: int, C: int) -> Launch:
    """The launch of the one-hot gradient."""
    return Launch(rows=64, warps=4, columns=max(16, min(64, power_of_two(C))), per_processor=2)


def small_partials(items: int, V: int, C: int, tensor: Tensor, config: Launch | None = None) -> int:
    """Rows of partials of the one-hot gradient on the tensor's card."""
    config = config or small_config(items, V, C)
    tiles = grid_rows(V, _block_v(V)) * grid_rows(C, config.columns)
    return max(1, min(grid_rows(items, config.rows), config.per_processor * processors(tensor.device) // tiles))


def _block_v(V: int) -> int:
    return max(16, min(128, power_of_two(V)))


def table_gradient_small_raw(
    dout_NX: Tensor,
    ids_NK: Tensor,
    dtable_VC: Tensor,
    partials_PW: Tensor,
    *,
    accumulate: bool = True,
    config: Launch | None = None,
) -> None:
    """Add (or write) a small table's gradient: two launches, deterministic. Allocates nothing.

    Args:
        dout_NX: gradient of the gathered rows, K · C columns used; rows may be strided.
        ids_NK: as in the forward pass, but rows may be strided. `dtable_VC`: fp32.
        partials_PW: fp32, `small_partials` rows, V · C columns.
        accumulate: add to `dtable_VC` instead of writing it.
        config: launch; None for the frozen one.
    """
    (N, K), (V, C) = ids_NK.shape, dtable_VC.shape
    config = config or small_config(N * K, V, C)
    block_v = _block_v(V)
    table_gradient_small_kernel[(partials_PW.shape[0], grid_rows(V, block_v), grid_rows(C, config.columns))](
        dout_NX, ids_NK, partials_PW, partials_PW.stride(0), N, K, dout_NX.stride(0), ids_NK.stride(0), V,
        C=C, ROWS=config.rows, BLOCK_V=block_v, BLOCK_C=config.columns, num_warps=config.warps,
        **early_launch(dout_NX.device),
    )  # fmt: skip
    column_sums_raw(partials_PW, dtable_VC, accumulate=accumulate)


def takes_places(B: int, T: int, V: int, C: int) -> bool:
    """Whether the gradients of table and positions come from one pass: many items, and room behind the table's rows."""
    return B * T > MANY_ITEMS and max(V + PLACES, C // 2) <= 128


def beside(shared_bytes: int) -> Launch:
    """The launch that sums table and positions, a tile less under way where a program has little shared memory."""
    return BESIDE if shared_bytes >= BESIDE_BYTES else replace(BESIDE, stages=3)


def table_and_place_gradients_raw(
    dout_BTC: Tensor,
    ids_BT: Tensor,
    dtable_VC: Tensor,
    dpositions_RC: Tensor,
    partials_PW: Tensor,
    *,
    add_table: bool,
    add_positions: bool,
    config: Launch | None = None,
) -> None:
    """`table_gradient_small_raw` and `position_gradient_raw` by one pass over dout. Allocates nothing.

    Args:
        dout_BTC, ids_BT: contiguous.
        dtable_VC, dpositions_RC: fp32.
        partials_PW: fp32, ⌈T / 2⌉ rows of V · C.
        add_table, add_positions: add to what is there instead of writing it.
        config: launch; None for the frozen one of the card.
    """
    (B, T, C), V, config = dout_BTC.shape, len(dtable_VC), config or beside(program_bytes(dout_BTC.device))
    if not add_positions and len(dpositions_RC) > T:
        dpositions_RC[T:].zero_()
    columns = min(config.columns, max(16, power_of_two(C)))
    table_and_place_gradients_kernel[(len(partials_PW), grid_rows(C, columns))](
        dout_BTC, ids_BT, partials_PW, partials_PW.stride(0), dpositions_RC, B, T,
        C=C, V=V, PLACES=PLACES, ROWS=config.rows, BLOCK_V=max(16, power_of_two(V + PLACES)), BLOCK_C=columns,
        ACCUMULATE=add_positions, num_warps=config.warps, num_stages=config.stages, **early_launch(dout_BTC.device),
    )  # fmt: skip
    column_sums_raw(partials_PW, dtable_VC, accumulate=add_table)


def table_gradient_raw(dout_NX: Tensor, ids_NK: Tensor, dtable_VC: Tensor, *, accumulate: bool) -> None:
    """Add (or write) a table's fp32 gradient, by the way that suits its size."""
    (N, K), (V, C) = ids_NK.shape, dtable_VC.shape
    if V <= ONE_HOT_ROWS:
        partials_PW = torch.empty(small_partials(N * K, V, C, dout_NX), V * C, device=dout_NX.device)
        table_gradient_small_raw(dout_NX, ids_NK, dtable_VC, partials_PW, accumulate=accumulate)
        return
    if not accumulate:
        dtable_VC.zero_()
    ends_Z2C = torch.empty(grid_rows(N * K, CHUNK), 2, C, device=dout_NX.device)
    table_gradient_sorted_raw(dout_NX, ids_NK, dtable_VC, ends_Z2C)


def position_gradient_raw(dout_BTC: Tensor, dpositions_RC: Tensor, *, accumulate: bool = True) -> None:
    """Add (or write) Σ_b dout[b] into the first T rows of fp32 `dpositions_RC`, 0 beyond. Allocates nothing."""
    B, T, C = dout_BTC.shape
    if not accumulate and len(dpositions_RC) > T:
        dpositions_RC[T:].zero_()
    column_sums_raw(dout_BTC.view(B, T * C), dpositions_RC[:T].view(T * C), accumulate=accumulate)
