"""Policy heads in Triton: what lies between the large products of the heads with the state.

With ẑ = (z − μ) r, Wγ = W1 ∘ γ = [A | B] (columns for the state, for earlier logits), s = Wγ 1 and c = W1 β + b1:

    u = v + c      v = r (A x + B l − μ s)

so that A x of all heads is one product p, and a head is one kernel over it. Nothing flows from a head to an earlier
one, so the same kernel goes back at once: with da = dl W2, du = da gelu'(u) and q = r du,

    dx = Σ_heads Aᵀ q + α + β x      α = −r c1 / S + μ r² c2 / S      β = −r² c2 / S      c1 = Σ du s      c2 = Σ du v

and every weight's gradient comes from qᵀ x, qᵀ [l | μ | 1 / r] and dlᵀ a. Gradients are those of the *sum* of a head's
losses; 1 / #valid and the gradient that arrives at the loss multiply late, in fp32.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.activation.triton import gelu, gelu_derivative
from ridgeline.ops.cross_entropy.reference import IGNORE

_IGNORE = tl.constexpr(IGNORE)
_LOG2_E = tl.constexpr(1.44269504088896)


@triton.jit
def pack_kernel(
    norm_weight_ptr, norm_bias_ptr, up_ptr, up_bias_ptr, down_ptr, a_ptr, s_ptr, c_ptr, b_ptr, down_out_ptr,
    C: tl.constexpr, E: tl.constexpr, V: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows of one head's A, s and c, columns of its B (transposed) and W2; zeros in every padding."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_S = tl.arange(0, BLOCK_S)
    S: tl.constexpr = C + E
    inside_RS = (row_R < H)[:, None] & (column_S < S)[None, :]
    up_RS = tl.load(up_ptr + row_R[:, None] * S + column_S[None, :], mask=inside_RS, other=0.0).to(tl.float32)
    scale_S = tl.load(norm_weight_ptr + column_S, mask=column_S < S, other=0.0).to(tl.float32)
    shift_S = tl.load(norm_bias_ptr + column_S, mask=column_S < S, other=0.0).to(tl.float32)
    scaled_RS = (up_RS * scale_S[None, :]).to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + row_R[:, None] * C + column_S[None, :], scaled_RS, mask=(column_S < C)[None, :])
    heard_S = (column_S >= C) & (column_S < C + BLOCK_E)
    if E > 0:
        tl.store(b_ptr + (column_S - C)[None, :] * W + row_R[:, None], scaled_RS, mask=heard_S[None, :])
    tl.store(s_ptr + row_R, tl.sum(scaled_RS.to(tl.float32), axis=1))
    bias_R = tl.load(up_bias_ptr + row_R, mask=row_R < H, other=0.0).to(tl.float32)
    tl.store(c_ptr + row_R, tl.sum(up_RS * shift_S[None, :], axis=1) + bias_R)
    class_V = tl.arange(0, BLOCK_V)
    inside_VR = (class_V < V)[:, None] & (row_R < H)[None, :]
    down_VR = tl.load(down_ptr + class_V[:, None] * H + row_R[None, :], mask=inside_VR, other=0.0)
    tl.store(down_out_ptr + class_V[:, None] * W + row_R[None, :], down_VR)


@triton.jit
def state_statistics(x_ptr, row_R, inside_R, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean of each row of x and the sum of squares about it, a block of columns at a time."""
    mean_R = tl.zeros((ROWS,), dtype=tl.float32)
    squares_R = tl.zeros((ROWS,), dtype=tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        column_C = first + tl.arange(0, BLOCK_C)
        inside_RC = inside_R[:, None] & (column_C < C)[None, :]
        x_RC = tl.load(x_ptr + row_R[:, None] * C + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        count = min(BLOCK_C, C - first)
        part_R = tl.sum(x_RC, axis=1) / count
        d_RC = tl.where((column_C < C)[None, :], x_RC - part_R[:, None], 0.0)
        apart_R = part_R - mean_R
        squares_R += tl.sum(d_RC * d_RC, axis=1) + apart_R * apart_R * (first * count / (first + count))
        mean_R += apart_R * (count / (first + count))
    return mean_R, squares_R


@triton.jit
def inner_chunk(
    p_ptr, s_ptr, c_ptr, b_ptr, place_RJ, inside_R, column_J, heard_RE, mean_R, rstd_R,
    E: tl.constexpr, W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """v and u = v + c of a chunk of inner columns, and its s; fp32."""
    v_RJ = tl.load(p_ptr + place_RJ, mask=inside_R[:, None], other=0.0).to(tl.float32)
    if E > 0:
        b_EJ = tl.load(b_ptr + tl.arange(0, BLOCK_E)[:, None] * W + column_J[None, :])
        v_RJ = tl.dot(heard_RE, b_EJ, v_RJ, input_precision="ieee")
    s_J = tl.load(s_ptr + column_J)
    v_RJ = (v_RJ - mean_R[:, None] * s_J[None, :]) * rstd_R[:, None]
    return v_RJ, v_RJ + tl.load(c_ptr + column_J)[None, :], s_J


@triton.jit
def head_statistics(
    x_ptr, side_ptr, state_ptr, row_R, inside_R, N, eps,
    C: tl.constexpr, E: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Earlier logits (none for the first head), mean and deviation of each row of [x | earlier logits].

    The first head leaves mean and squares of x in `state`.
    """
    if E == 0:
        mean_R, squares_R = state_statistics(x_ptr, row_R, inside_R, C, ROWS, BLOCK_C)
        tl.store(state_ptr + row_R, mean_R, mask=inside_R)
        tl.store(state_ptr + N + row_R, squares_R, mask=inside_R)
        heard_RE = 0
    else:
        state_mean_R = tl.load(state_ptr + row_R, mask=inside_R, other=0.0)
        squares_R = tl.load(state_ptr + N + row_R, mask=inside_R, other=0.0)
        column_E = tl.arange(0, BLOCK_E)
        inside_RE = inside_R[:, None] & (column_E < E)[None, :]
        heard_RE = tl.load(side_ptr + row_R[:, None] * SIDE + column_E[None, :], mask=inside_RE, other=0.0)
        wide_RE = heard_RE.to(tl.float32)
        mean_R = (state_mean_R * C + tl.sum(wide_RE, axis=1)) / (C + E)
        d_RE = tl.where((column_E < E)[None, :], wide_RE - mean_R[:, None], 0.0)
        apart_R = state_mean_R - mean_R
        squares_R += apart_R * apart_R * C + tl.sum(d_RE * d_RE, axis=1)
    return heard_RE, mean_R, tl.sqrt(squares_R / (C + E) + eps)


@triton.jit
def head_losses(logits_RV, target_R, valid_R, partials_ptr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Losses of the tile's rows, added up, and the number of valid rows, into `partials`; the logits' gradients."""
    class_V = tl.arange(0, BLOCK_V)
    known_V = class_V < V
    logits_RV = tl.where(known_V[None, :], logits_RV, float("-inf"))
    highest_R = tl.max(logits_RV, axis=1)
    e_RV = tl.exp2((logits_RV - highest_R[:, None]) * _LOG2_E)
    sum_R = tl.sum(e_RV, axis=1)
    hit_RV = class_V[None, :] == target_R[:, None]
    chosen_R = tl.sum(tl.where(hit_RV, logits_RV, 0.0), axis=1)
    chosen_R = tl.where((target_R >= 0) & (target_R < V), chosen_R, float("nan"))
    loss_R = tl.where(valid_R, highest_R + tl.log(sum_R) - chosen_R, 0.0)
    tl.store(partials_ptr, tl.sum(loss_R, axis=0))
    tl.store(partials_ptr + 1, tl.sum(valid_R.to(tl.float32), axis=0))
    dl_RV = e_RV * (1.0 / sum_R)[:, None] - hit_RV.to(tl.float32)
    return tl.where(valid_R[:, None] & known_V[None, :], dl_RV, 0.0)


@triton.jit
def head_gradient(
    p_ptr, s_ptr, c_ptr, b_ptr, down_ptr, rows_ptr, dl_RV, heard_RE, row_R, inside_R, mean_R, rstd_R, N,
    S: tl.constexpr, E: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PRECISE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q in p's place, α and β into `rows`, from the logits' gradients as stored."""
    dtype = p_ptr.dtype.element_ty
    class_V = tl.arange(0, BLOCK_V)
    c1_R = tl.zeros_like(mean_R)
    c2_R = tl.zeros_like(mean_R)
    for first in tl.range(0, H, CHUNK, num_stages=STAGES):
        column_J = first + tl.arange(0, CHUNK)
        place_RJ = row_R[:, None] * W + column_J[None, :]
        v_RJ, u_RJ, s_J = inner_chunk(
            p_ptr, s_ptr, c_ptr, b_ptr, place_RJ, inside_R, column_J, heard_RE, mean_R, rstd_R, E, W, BLOCK_E
        )
        down_VJ = tl.load(down_ptr + class_V[:, None] * W + column_J[None, :])
        du_RJ = tl.dot(dl_RV, down_VJ, input_precision="ieee") * gelu_derivative(u_RJ, False, PRECISE)
        tl.store(p_ptr + place_RJ, (du_RJ * rstd_R[:, None]).to(dtype), mask=inside_R[:, None])
        c1_R += tl.sum(du_RJ * s_J[None, :], axis=1)
        c2_R += tl.sum(du_RJ * v_RJ, axis=1)
    slope_R = -rstd_R * rstd_R * c2_R / S
    tl.store(rows_ptr + row_R, -rstd_R * c1_R / S - mean_R * slope_R, mask=inside_R)
    tl.store(rows_ptr + N + row_R, slope_R, mask=inside_R)


@triton.jit(do_not_specialize=["N", "target_stride"])
def head_kernel(
    x_ptr, p_ptr, a_ptr, side_ptr, dl_ptr, state_ptr, rows_ptr, partials_ptr, targets_ptr,
    s_ptr, c_ptr, b_ptr, down_ptr, down_bias_ptr, N, target_stride, eps,
    C: tl.constexpr, E: tl.constexpr, V: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr,
    DL: tl.constexpr, SUMS: tl.constexpr, CLASS_AT: tl.constexpr, STATISTICS_AT: tl.constexpr, LOSS_AT: tl.constexpr,
    HEARD: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One head on a tile of rows: logits, loss, and with GRADIENT everything its backward pass needs.

    p is this head's part of A x and becomes q.
    """
    tile = tl.program_id(0)
    first_row = tl.cast(tile, tl.int64) * ROWS
    row_R = tl.arange(0, ROWS)  # of the tile, as are all places below
    inside_R = first_row + row_R < N
    p_ptr += first_row * W
    a_ptr += first_row * W
    side_ptr += first_row * SIDE
    partials_ptr += tile * SUMS
    dtype = p_ptr.dtype.element_ty
    heard_RE, mean_R, deviation_R = head_statistics(
        x_ptr + first_row * C, side_ptr, state_ptr + first_row, row_R, inside_R, N, eps,
        C, E, SIDE, ROWS, BLOCK_C, BLOCK_E,
    )  # fmt: skip
    rstd_R = 1.0 / deviation_R

    logits_RV = tl.zeros((ROWS, BLOCK_V), dtype=tl.float32)
    class_V = tl.arange(0, BLOCK_V)
    for first in tl.range(0, H, CHUNK, num_stages=STAGES):
        column_J = first + tl.arange(0, CHUNK)
        place_RJ = row_R[:, None] * W + column_J[None, :]
        _v_RJ, u_RJ, _s_J = inner_chunk(
            p_ptr, s_ptr, c_ptr, b_ptr, place_RJ, inside_R, column_J, heard_RE, mean_R, rstd_R, E, W, BLOCK_E
        )
        a_RJ = gelu(u_RJ, False, PRECISE).to(dtype)
        if GRADIENT:
            tl.store(a_ptr + place_RJ, a_RJ, mask=inside_R[:, None])
        down_JV = tl.load(down_ptr + column_J[:, None] + class_V[None, :] * W)
        logits_RV = tl.dot(a_RJ, down_JV, logits_RV, input_precision="ieee")

    known_V = class_V < V
    inside_RV = inside_R[:, None] & known_V[None, :]
    logits_RV += tl.load(down_bias_ptr + class_V, mask=known_V, other=0.0).to(tl.float32)[None, :]
    if HEARD:
        tl.store(side_ptr + row_R[:, None] * SIDE + (E + class_V)[None, :], logits_RV.to(dtype), mask=inside_RV)
    target_R = tl.load(targets_ptr + (first_row + row_R) * target_stride, mask=inside_R, other=0).to(tl.int32)
    dl_RV = head_losses(logits_RV, target_R, inside_R & (target_R != _IGNORE), partials_ptr + LOSS_AT, V, BLOCK_V)
    if GRADIENT:
        tl.store(partials_ptr + CLASS_AT + class_V, tl.sum(dl_RV, axis=0), mask=known_V)
        stored_RV = dl_RV.to(dtype)
        tl.store(dl_ptr + (first_row + row_R)[:, None] * DL + (CLASS_AT + class_V)[None, :], stored_RV, mask=inside_RV)
        tl.store(side_ptr + row_R * SIDE + STATISTICS_AT, mean_R.to(dtype), mask=inside_R)
        tl.store(side_ptr + row_R * SIDE + STATISTICS_AT + 1, deviation_R.to(dtype), mask=inside_R)
        head_gradient(
            p_ptr, s_ptr, c_ptr, b_ptr, down_ptr, rows_ptr + first_row, stored_RV, heard_RE, row_R, inside_R, mean_R,
            rstd_R, N, C + E, E, H, W, PRECISE, CHUNK, BLOCK_E, BLOCK_V, STAGES,
        )  # fmt: skip


@triton.jit
def scale_kernel(
    a_ptr, out_ptr, dloss_ptr, sums_ptr, factors_ptr, head_of_ptr,
    C: tl.constexpr, K: tl.constexpr, LOSSES_AT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """factors = dloss / #valid of each head, then the largest magnitude F; rows of A times their head's factor / F."""
    row = tl.program_id(0)
    head_K = tl.arange(0, BLOCK_K)
    count_K = tl.load(sums_ptr + LOSSES_AT + 2 * head_K + 1, mask=head_K < K, other=0.0)
    dloss_K = tl.load(dloss_ptr + head_K, mask=head_K < K, other=0.0).to(tl.float32)
    factor_K = tl.where(count_K > 0, dloss_K / tl.maximum(count_K, 1.0), 0.0)
    largest = tl.max(tl.abs(factor_K), axis=0)
    if row == 0:
        tl.store(factors_ptr + head_K, factor_K, mask=head_K < K)
        tl.store(factors_ptr + K, largest)
    mine = tl.sum(tl.where(head_K == tl.load(head_of_ptr + row), factor_K, 0.0), axis=0)
    ratio = tl.where(largest > 0, mine / tl.where(largest > 0, largest, 1.0), 0.0)
    column_C = tl.arange(0, BLOCK_C)
    a_C = tl.load(a_ptr + row * C + column_C, mask=column_C < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + column_C, (a_C * ratio).to(out_ptr.dtype.element_ty), mask=column_C < C)


@triton.jit(do_not_specialize=["N"])
def state_gradient_kernel(
    dx_ptr, x_ptr, rows_ptr, factors_ptr, N,
    C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = F · dx + Σ_heads factor · (α + β x), in place."""
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside_R = row_R < N
    column_C = tl.arange(0, BLOCK_C)
    place_RC = row_R[:, None] * C + column_C[None, :]
    inside_RC = inside_R[:, None] & (column_C < C)[None, :]
    x_RC = tl.load(x_ptr + place_RC, mask=inside_RC, other=0.0).to(tl.float32)
    dx_RC = tl.load(dx_ptr + place_RC, mask=inside_RC, other=0.0).to(tl.float32)
    alpha_R = tl.zeros((ROWS,), dtype=tl.float32)
    beta_R = tl.zeros((ROWS,), dtype=tl.float32)
    for head in tl.static_range(K):
        factor = tl.load(factors_ptr + head)
        alpha_R += factor * tl.load(rows_ptr + (2 * head) * tl.cast(N, tl.int64) + row_R, mask=inside_R, other=0.0)
        beta_R += factor * tl.load(rows_ptr + (2 * head + 1) * tl.cast(N, tl.int64) + row_R, mask=inside_R, other=0.0)
    dx_RC = dx_RC * tl.load(factors_ptr + K) + alpha_R[:, None] + beta_R[:, None] * x_RC
    tl.store(dx_ptr + place_RC, dx_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit(do_not_specialize=["N"])
def row_terms_kernel(rows_ptr, factors_ptr, out_ptr, N, K: tl.constexpr, ROWS: tl.constexpr):
    """Σ_heads factor · α and Σ_heads factor · β of every row."""
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside_R = row_R < N
    for which in tl.static_range(2):
        total_R = tl.zeros((ROWS,), dtype=tl.float32)
        for head in tl.static_range(K):
            place_R = rows_ptr + (2 * head + which) * tl.cast(N, tl.int64) + row_R
            total_R += tl.load(factors_ptr + head) * tl.load(place_R, mask=inside_R, other=0.0)
        tl.store(out_ptr + which * tl.cast(N, tl.int64) + row_R, total_R, mask=inside_R)


@triton.jit
def put(out_ptr, place, value, mask, ADD: tl.constexpr):
    """Store or add `value`."""
    if ADD:
        value += tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradients_kernel(
    product_ptr, side_product_ptr, down_product_ptr, sums_ptr, factors_ptr,
    norm_weight_ptr, norm_bias_ptr, up_ptr,
    dnorm_weight_ptr, dnorm_bias_ptr, dup_ptr, dup_bias_ptr, ddown_ptr, ddown_bias_ptr,
    INDEX: tl.constexpr, C: tl.constexpr, E: tl.constexpr, V: tl.constexpr, H: tl.constexpr,
    AT: tl.constexpr, CLASS_AT: tl.constexpr, STATISTICS_AT: tl.constexpr,
    SIDE: tl.constexpr, DOWN_V: tl.constexpr, DOWN_H: tl.constexpr, ADD: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One head's weight gradients from qᵀ x (of all heads), its qᵀ side and its dlᵀ a; fp32.

    A program has some columns of W1 and of the norm; those after the last of them have some of W2.
    """
    S: tl.constexpr = C + E
    program = tl.program_id(0)
    factor = tl.load(factors_ptr + INDEX)
    lane_I = tl.arange(0, BLOCK_I)
    if program * BLOCK_S < S:
        column_S = program * BLOCK_S + tl.arange(0, BLOCK_S)
        inside_S = column_S < S
        scale_S = tl.load(norm_weight_ptr + column_S, mask=inside_S, other=0.0).to(tl.float32)
        shift_S = tl.load(norm_bias_ptr + column_S, mask=inside_S, other=0.0).to(tl.float32)
        dscale_S = tl.zeros((BLOCK_S,), dtype=tl.float32)
        dshift_S = tl.zeros((BLOCK_S,), dtype=tl.float32)
        for first in range(0, H, BLOCK_I):
            row_I = first + lane_I
            inside_I = row_I < H
            inside_IS = inside_I[:, None] & inside_S[None, :]
            side_I = side_product_ptr + row_I * SIDE
            shared_I = tl.load(side_I + STATISTICS_AT, mask=inside_I, other=0.0)
            dbias_I = tl.load(side_I + STATISTICS_AT + 1, mask=inside_I, other=0.0)
            state_IS = product_ptr + (AT + row_I)[:, None] * C + column_S[None, :]
            g_IS = tl.load(state_IS, mask=inside_IS & (column_S < C)[None, :], other=0.0)
            heard_IS = side_I[:, None] + (column_S - C)[None, :]
            g_IS += tl.load(heard_IS, mask=inside_IS & (column_S >= C)[None, :], other=0.0)
            g_IS -= shared_I[:, None]
            place_IS = row_I[:, None] * S + column_S[None, :]
            up_IS = tl.load(up_ptr + place_IS, mask=inside_IS, other=0.0).to(tl.float32)
            dscale_S += tl.sum(up_IS * g_IS, axis=0)
            dshift_S += tl.sum(up_IS * dbias_I[:, None], axis=0)
            dup_IS = (g_IS * scale_S[None, :] + dbias_I[:, None] * shift_S[None, :]) * factor
            put(dup_ptr, place_IS, dup_IS, inside_IS, ADD)
            if program == 0:
                put(dup_bias_ptr, row_I, dbias_I * factor, inside_I, ADD)
        put(dnorm_weight_ptr, column_S, dscale_S * factor, inside_S, ADD)
        put(dnorm_bias_ptr, column_S, dshift_S * factor, inside_S, ADD)
    else:
        column_I = (program - (S + BLOCK_S - 1) // BLOCK_S) * BLOCK_I + lane_I
        class_V = tl.arange(0, BLOCK_V)
        inside_VI = (class_V < V)[:, None] & (column_I < H)[None, :]
        source_VI = down_product_ptr + class_V[:, None] * DOWN_V + column_I[None, :] * DOWN_H
        ddown_VI = tl.load(source_VI, mask=inside_VI, other=0.0) * factor
        put(ddown_ptr, class_V[:, None] * H + column_I[None, :], ddown_VI, inside_VI, ADD)
        if program == (S + BLOCK_S - 1) // BLOCK_S:
            dbias_V = tl.load(sums_ptr + CLASS_AT + class_V, mask=class_V < V, other=0.0) * factor
            put(ddown_bias_ptr, class_V, dbias_V, class_V < V, ADD)
