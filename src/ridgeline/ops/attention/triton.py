"""Attention in Triton for any window and any card from sm_80 on: deterministic, scores only on chip.

A tile of scores is QUERIES × KEYS. Tiles on the diagonal are masked, those before it are not: each kernel has a loop
for either. No product of a kernel is ever transposed: where keys must be rows, the scores are computed with keys as
rows.

A relative term is read: r[i, x], the product of query i with row x of the table's last T rows, belongs to the key
j = i − (T − 1 − x), so that a tile of scores is a tile of r whose rows begin one element earlier each. The gradient of
the scores is written in the same places.

    forward    one sweep over the keys with a running maximum, or two: maximum and sum first, values after
    dQ         also leaves delta = rowsum(dO ∘ O), and dR
    dK, dV     a program for each key block, key head and part of the query heads that share it
    parts      their sum, where the query heads of a key head are more than one part
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.dropout.triton import mix, random_words, site_keys

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b):
    """In fp32 exact, not by way of tf32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _keys_of(seed_step_ptr, site, sample_offset, unit, H):
    """The dropout keys of a head: its stream is (sample_offset + b) · H + h."""
    key_0, key_1 = site_keys(seed_step_ptr, site)
    stream = (sample_offset * H + unit).to(tl.uint32)
    return mix(key_0 ^ stream), mix(key_1 ^ stream)


@triton.jit
def _keep(key_0, key_1, i, j, tiles, THRESHOLD: tl.constexpr):
    """Which weights are kept, for query numbers `i` and key numbers `j` of one broadcast shape."""
    counter = ((i // 16) * tiles + j // 16) * 64 + (i % 8) * 8 + j % 8
    word_0, word_1 = random_words(counter.to(tl.uint32), key_0, key_1)
    row_high, column_high = (i // 8) % 2, (j // 8) % 2
    word = tl.where(row_high == column_high, word_0, word_1)
    return ((word >> (row_high * 16).to(tl.uint32)) & 0x7FFF) >= THRESHOLD


@triton.jit
def _tile(pointer, first, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """ROWS rows of D from row `first` on, all of them inside unless EDGE; then those from `limit` on are zero."""
    r = tl.arange(0, ROWS)
    at = pointer + tl.cast(first, tl.int64) * stride + r[:, None] * stride + tl.arange(0, D)[None, :]
    inside = (first + r < limit)[:, None] if EDGE else None
    return tl.load(at, mask=inside, other=0.0 if EDGE else None)


@triton.jit
def _store_rows(pointer, value, first, stride, limit, ROWS: tl.constexpr, D: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(pointer + place, value.to(pointer.dtype.element_ty), mask=(row < limit)[:, None])


@triton.jit
def _relative_tile(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL: tl.constexpr):
    """Pointers and mask of the relative scores of queries i_0 + `r` and keys j_0 + `c`, of one broadcast shape.

    What of an address is the same in the whole tile is added first, in 64 bits; the rest takes 32.
    """
    seen = i_0 + r < T
    if DIAGONAL:
        seen &= j_0 + c <= i_0 + r
    return r_ptr + (tl.cast(i_0, tl.int64) * (r_t - 1) + (T - 1) + j_0) + (r * (r_t - 1) + c), seen


@triton.jit
def _relative(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL: tl.constexpr):
    """The relative part of a tile's unscaled scores."""
    place, seen = _relative_tile(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
    return tl.load(place, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _sum_weights(
    maximum, total, q, k_ptr, r_ptr, i_0, first, last, to_log2, T, k_t, r_t,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Running maximum (scaled, to base 2) and sum of the weights of the keys from `first` to `last`."""
    r, c = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    for j_0 in range(first, last, KEYS):
        s = _dot(q, tl.trans(_tile(k_ptr, j_0, k_t, T, KEYS, D, DIAGONAL)))
        if r_ptr is not None:
            s += _relative(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
        if DIAGONAL:
            s = tl.where(j_0 + c <= i_0 + r, s, -1e30)
        highest = tl.maximum(maximum, tl.max(s, 1) * to_log2)
        total = total * tl.exp2(maximum - highest) + tl.sum(tl.exp2(s * to_log2 - highest[:, None]), 1)
        maximum = highest
    return maximum, total


@triton.jit
def _attend(
    out, maximum, total, q, k_ptr, v_ptr, r_ptr, i_0, first, last, to_log2, key_0, key_1, T, k_t, v_t, r_t,
    D: tl.constexpr, THRESHOLD: tl.constexpr, SWEEPS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DIAGONAL: tl.constexpr,
):  # fmt: skip
    """The values of the keys from `first` to `last`, weighted and added; with one sweep also maximum and sum."""
    r, c = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    for j_0 in range(first, last, KEYS):
        k = _tile(k_ptr, j_0, k_t, T, KEYS, D, DIAGONAL)
        v = _tile(v_ptr, j_0, v_t, T, KEYS, D, DIAGONAL)
        s = _dot(q, tl.trans(k))
        if r_ptr is not None:
            s += _relative(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
        if DIAGONAL:
            s = tl.where(j_0 + c <= i_0 + r, s, -1e30)
        if SWEEPS == 1:
            highest = tl.maximum(maximum, tl.max(s, 1) * to_log2)
            factor = tl.exp2(maximum - highest)
            maximum = highest
            out *= factor[:, None]
            p = tl.exp2(s * to_log2 - maximum[:, None])
            total = total * factor + tl.sum(p, 1)
        else:
            p = tl.exp2(s * to_log2 - maximum[:, None])
        if THRESHOLD > 0:
            p = tl.where(_keep(key_0, key_1, i_0 + r, j_0 + c, (T + 15) // 16, THRESHOLD), p, 0.0)
        out += _dot(p.to(v.dtype), v)
    return out, maximum, total


@triton.jit(do_not_specialize=["site", "sample_offset"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, r_ptr, out_ptr, lse_ptr, seed_step_ptr, site, sample_offset, scale, kept, T, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, r_b, r_t, r_h, o_b, o_t, o_h,
    SHARE: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, SWEEPS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Output and natural log-sum-exp of one block of queries of one head."""
    i_0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest first
    unit = tl.program_id(1)
    b, h = (unit // H).to(tl.int64), unit % H
    k_ptr += b * k_b + (h // SHARE) * k_h
    v_ptr += b * v_b + (h // SHARE) * v_h
    if r_ptr is not None:
        r_ptr += b * r_b + h * r_h
    q = _tile(q_ptr + b * q_b + h * q_h, i_0, q_t, T, QUERIES, D, True)
    to_log2 = scale * _LOG2_E
    maximum = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    full, end = i_0 // KEYS * KEYS, i_0 + QUERIES  # all keys before `full` are before every query
    if SWEEPS == 2:
        maximum, total = _sum_weights(
            maximum, total, q, k_ptr, r_ptr, i_0, 0, full, to_log2, T, k_t, r_t, D, QUERIES, KEYS, False
        )
        maximum, total = _sum_weights(
            maximum, total, q, k_ptr, r_ptr, i_0, full, end, to_log2, T, k_t, r_t, D, QUERIES, KEYS, True
        )
    key_0, key_1 = 0, 0
    if THRESHOLD > 0:
        key_0, key_1 = _keys_of(seed_step_ptr, site, sample_offset, unit, H)
    out = tl.zeros((QUERIES, D), tl.float32)
    out, maximum, total = _attend(
        out, maximum, total, q, k_ptr, v_ptr, r_ptr, i_0, 0, full, to_log2, key_0, key_1, T, k_t, v_t, r_t,
        D, THRESHOLD, SWEEPS, QUERIES, KEYS, False,
    )  # fmt: skip
    out, maximum, total = _attend(
        out, maximum, total, q, k_ptr, v_ptr, r_ptr, i_0, full, end, to_log2, key_0, key_1, T, k_t, v_t, r_t,
        D, THRESHOLD, SWEEPS, QUERIES, KEYS, True,
    )  # fmt: skip
    _store_rows(out_ptr + b * o_b + h * o_h, out * (kept / total)[:, None], i_0, o_t, T, QUERIES, D)
    i = i_0 + tl.arange(0, QUERIES)
    tl.store(lse_ptr + unit.to(tl.int64) * T + i, (maximum + tl.log2(total)) / _LOG2_E, mask=i < T)


@triton.jit
def _add_to_queries(
    dq, q, d_out, lse, delta, k_ptr, v_ptr, r_ptr, dr_ptr, i_0, first, last, to_log2, scale, kept, key_0, key_1, T,
    k_t, v_t, r_t,
    D: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dQ of the keys from `first` to `last`, added, without what comes by way of the relative term."""
    r, c = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    for j_0 in range(first, last, KEYS):
        k = _tile(k_ptr, j_0, k_t, T, KEYS, D, DIAGONAL)
        v = _tile(v_ptr, j_0, v_t, T, KEYS, D, DIAGONAL)
        s = _dot(q, tl.trans(k))
        if r_ptr is not None:
            s += _relative(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
        p = tl.exp2(s * to_log2 - lse[:, None])
        if DIAGONAL:
            p = tl.where(j_0 + c <= i_0 + r, p, 0.0)
        dp = _dot(d_out, tl.trans(v))
        if THRESHOLD > 0:
            keep = _keep(key_0, key_1, i_0 + r, j_0 + c, (T + 15) // 16, THRESHOLD)
            dp = tl.where(keep, dp * kept, 0.0)
        ds = p * (dp - delta[:, None])
        dq += _dot(ds.to(k.dtype), k)
        if dr_ptr is not None:
            place, seen = _relative_tile(dr_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
            tl.store(place, (ds * scale).to(dr_ptr.dtype.element_ty), mask=seen)
    return dq


@triton.jit(do_not_specialize=["site", "sample_offset"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, r_ptr, dr_ptr, out_ptr, d_out_ptr, lse_ptr, delta_ptr, dq_ptr, seed_step_ptr, site,
    sample_offset, scale, kept, T, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, r_b, r_t, r_h, o_b, o_t, o_h, do_b, do_t, do_h, dq_b, dq_t, dq_h,
    SHARE: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head, and its delta; dR as r lies, nothing elsewhere."""
    i_0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    unit = tl.program_id(1)
    b, h = (unit // H).to(tl.int64), unit % H
    k_ptr += b * k_b + (h // SHARE) * k_h
    v_ptr += b * v_b + (h // SHARE) * v_h
    if r_ptr is not None:
        r_ptr += b * r_b + h * r_h
        dr_ptr += b * r_b + h * r_h
    i = i_0 + tl.arange(0, QUERIES)
    q = _tile(q_ptr + b * q_b + h * q_h, i_0, q_t, T, QUERIES, D, True)
    d_out = _tile(d_out_ptr + b * do_b + h * do_h, i_0, do_t, T, QUERIES, D, True)
    out = _tile(out_ptr + b * o_b + h * o_h, i_0, o_t, T, QUERIES, D, True)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    row = unit.to(tl.int64) * T + i
    tl.store(delta_ptr + row, delta, mask=i < T)
    lse = tl.load(lse_ptr + row, mask=i < T, other=0.0) * _LOG2_E
    to_log2 = scale * _LOG2_E
    key_0, key_1 = 0, 0
    if THRESHOLD > 0:
        key_0, key_1 = _keys_of(seed_step_ptr, site, sample_offset, unit, H)
    dq = tl.zeros((QUERIES, D), tl.float32)
    full = i_0 // KEYS * KEYS
    dq = _add_to_queries(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, r_ptr, dr_ptr, i_0, 0, full, to_log2, scale, kept, key_0, key_1, T,
        k_t, v_t, r_t, D, THRESHOLD, QUERIES, KEYS, False,
    )  # fmt: skip
    dq = _add_to_queries(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, r_ptr, dr_ptr, i_0, full, i_0 + QUERIES, to_log2, scale, kept, key_0,
        key_1, T, k_t, v_t, r_t, D, THRESHOLD, QUERIES, KEYS, True,
    )  # fmt: skip
    _store_rows(dq_ptr + b * dq_b + h * dq_h, dq * scale, i_0, dq_t, T, QUERIES, D)


@triton.jit
def _add_to_keys(
    dk, dv, k, v, q_ptr, d_out_ptr, r_ptr, lse_ptr, delta_ptr, j_0, first, last, to_log2, kept, key_0, key_1,
    T, q_t, do_t, r_t,
    D: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of the queries from `first` to `last` of one head, added. Queries from T on are zero."""
    r, c = tl.arange(0, QUERIES)[None, :], tl.arange(0, KEYS)[:, None]
    for i_0 in range(first, last, QUERIES):
        i = i_0 + tl.arange(0, QUERIES)
        q = _tile(q_ptr, i_0, q_t, T, QUERIES, D, True)
        d_out = _tile(d_out_ptr, i_0, do_t, T, QUERIES, D, True)
        lse = tl.load(lse_ptr + i, mask=i < T, other=0.0) * _LOG2_E
        delta = tl.load(delta_ptr + i, mask=i < T, other=0.0)
        s = _dot(k, tl.trans(q))
        if r_ptr is not None:
            s += _relative(r_ptr, i_0, j_0, r, c, r_t, T, DIAGONAL)
        p = tl.exp2(s * to_log2 - lse[None, :])
        if DIAGONAL:
            p = tl.where(j_0 + c <= i_0 + r, p, 0.0)
        dp = _dot(v, tl.trans(d_out))
        kept_p = p
        if THRESHOLD > 0:
            keep = _keep(key_0, key_1, i_0 + r, j_0 + c, (T + 15) // 16, THRESHOLD)
            dp = tl.where(keep, dp * kept, 0.0)
            kept_p = tl.where(keep, p * kept, 0.0)
        dv += _dot(kept_p.to(d_out.dtype), d_out)
        dk += _dot((p * (dp - delta[None, :])).to(q.dtype), q)
    return dk, dv


@triton.jit(do_not_specialize=["site", "sample_offset"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, r_ptr, d_out_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, seed_step_ptr, site, sample_offset,
    scale, kept, T, H,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, r_b, r_t, r_h, do_b, do_t, do_h, part, dk_b, dk_t, dk_h,
    dv_b, dv_t, dv_h,
    SHARE: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, summed over one part of its query heads."""
    j_0 = tl.program_id(0) * KEYS
    groups = H // SHARE
    b, group = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    k = _tile(k_ptr + b * k_b + group * k_h, j_0, k_t, T, KEYS, D, True)
    v = _tile(v_ptr + b * v_b + group * v_h, j_0, v_t, T, KEYS, D, True)
    to_log2 = scale * _LOG2_E
    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    below = (j_0 + KEYS + QUERIES - 1) // QUERIES * QUERIES  # from here on every query sees every key of the block
    for share in range(SHARE // PARTS):
        key_0, key_1 = 0, 0
        h = group * SHARE + tl.program_id(2) * (SHARE // PARTS) + share
        unit = b * H + h
        if THRESHOLD > 0:
            key_0, key_1 = _keys_of(seed_step_ptr, site, sample_offset, unit, H)
        q_head, d_out_head = q_ptr + b * q_b + h * q_h, d_out_ptr + b * do_b + h * do_h
        r_head = r_ptr
        if r_ptr is not None:
            r_head = r_ptr + b * r_b + h * r_h
        dk, dv = _add_to_keys(
            dk, dv, k, v, q_head, d_out_head, r_head, lse_ptr + unit * T, delta_ptr + unit * T, j_0,
            j_0 // QUERIES * QUERIES, tl.minimum(below, T), to_log2, kept, key_0, key_1, T, q_t, do_t, r_t,
            D, THRESHOLD, QUERIES, KEYS, True,
        )  # fmt: skip
        dk, dv = _add_to_keys(
            dk, dv, k, v, q_head, d_out_head, r_head, lse_ptr + unit * T, delta_ptr + unit * T, j_0,
            below, T, to_log2, kept, key_0, key_1, T, q_t, do_t, r_t, D, THRESHOLD, QUERIES, KEYS, False,
        )  # fmt: skip
    dk_ptr += tl.program_id(2).to(tl.int64) * part + b * dk_b + group * dk_h
    dv_ptr += tl.program_id(2).to(tl.int64) * part + b * dv_b + group * dv_h
    _store_rows(dk_ptr, dk * scale, j_0, dk_t, T, KEYS, D)
    _store_rows(dv_ptr, dv, j_0, dv_t, T, KEYS, D)


@triton.jit
def key_parts_kernel(
    parts_ptr, dk_ptr, dv_ptr, part, T, G, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    PARTS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of dK (program_id(2) = 0) and dV over parts (PARTS, 2, B, T, G, D), ROWS positions of one key head."""
    t_0, unit = tl.program_id(0) * ROWS, tl.program_id(1)
    b, group = (unit // G).to(tl.int64), unit % G
    t, c = t_0 + tl.arange(0, ROWS), tl.arange(0, D)
    place = ((b * T + t) * G + group)[:, None] * D + c[None, :] + tl.program_id(2) * (part // 2)
    total = tl.zeros((ROWS, D), tl.float32)
    for n in range(PARTS):
        total += tl.load(parts_ptr + n * tl.cast(part, tl.int64) + place, mask=(t < T)[:, None], other=0.0)
    if tl.program_id(2) == 0:
        _store_rows(dk_ptr + b * dk_b + group * dk_h, total, t_0, dk_t, T, ROWS, D)
    else:
        _store_rows(dv_ptr + b * dv_b + group * dv_h, total, t_0, dv_t, T, ROWS, D)
