"""Matrix products in Triton with a tile of one's choice, for any strides and any card from sm_80 on. Imports Triton.

The forms that a course on GPU programming goes through: a small tile or a large one, loads one after another or under
the products, the whole sum in one program or in segments that a second kernel adds, pointwise work behind the product
or in its epilogue. Where the vendor's library or the Hopper GEMM is wanted, see `products`.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import grid_rows, power_of_two, processors
from ridgeline.ops.activation.triton import gelu, gelu_derivative
from ridgeline.ops.dropout import quantise
from ridgeline.ops.dropout.triton import hidden_keep_tile, site_keys
from ridgeline.ops.linear.reference import GeluKind, Masks

SHORTEST = 4  # steps of a segment along the reduction that pay for its partial sums


class Tile(NamedTuple):
    """How a product is tiled.

    Attributes:
        rows, columns: of a program's output tile.
        depth: elements of the reduction a step, in 16-bit storage (half as many in fp32).
        warps: of a program.
        stages: steps whose operands are on their way at once; 1 loads, waits and multiplies in turn.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Epilogue(NamedTuple):
    """What a product does with its sums before they are stored: one of four, or nothing.

    sums + bias                              pre ← that, out ← gelu(pre), with `gelu` and `pre_MN`
    residual + dropout(sums + bias)          with `residual_MN`, and `masks` where something is dropped
    sums · gelu'(gelu_input)                 with `gelu` and `gelu_input_MN`; column sums of each row tile in
                                             `sums_PN` (fp32, `row_tiles` rows)
    """

    bias_N: Tensor | None = None
    gelu: GeluKind | None = None
    pre_MN: Tensor | None = None
    residual_MN: Tensor | None = None
    masks: Masks | None = None
    gelu_input_MN: Tensor | None = None
    sums_PN: Tensor | None = None


PLAIN = Epilogue()


@triton.jit(do_not_specialize=["site", "sample_offset"])
def product_kernel(
    a_ptr, b_ptr, out_ptr, bias_ptr, residual_ptr, pre_ptr, gelu_input_ptr, sums_ptr, seed_step_ptr,
    site, sample_offset, T, kept, M, N, K, segment,
    a_u, a_m, a_k, b_u, b_k, b_n, out_u, out_s, out_m, more_m,
    ACCUMULATE: tl.constexpr, THRESHOLD: tl.constexpr, C: tl.constexpr, GELU: tl.constexpr, TANH: tl.constexpr,
    PRECISE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of out[u, s] (+)= epilogue(Σ over segment s of a[u] b[u]), fp32 sums."""
    tiles_n = tl.cdiv(N, COLUMNS)
    m_0, n_0 = tl.program_id(0) // tiles_n * ROWS, tl.program_id(0) % tiles_n * COLUMNS
    unit, piece = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, column, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    inside_m, inside_n = m_0 + row < M, n_0 + column < N
    first = piece * segment
    a_ptr += unit * a_u + m_0.to(tl.int64) * a_m + first * a_k
    b_ptr += unit * b_u + n_0.to(tl.int64) * b_n + first * b_k
    a_place = row[:, None] * a_m + depth[None, :] * a_k
    b_place = depth[:, None] * b_k + column[None, :] * b_n
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    length = tl.minimum(K - first, segment).to(tl.int32)
    for k_0 in tl.range(0, length, DEPTH, num_stages=STAGES):
        if EVEN:
            a = tl.load(a_ptr + a_place, mask=inside_m[:, None], other=0.0)
            b = tl.load(b_ptr + b_place, mask=inside_n[None, :], other=0.0)
        else:
            inside_k = k_0 + depth < length
            a = tl.load(a_ptr + a_place, mask=inside_m[:, None] & inside_k[None, :], other=0.0)
            b = tl.load(b_ptr + b_place, mask=inside_k[:, None] & inside_n[None, :], other=0.0)
        sums += tl.dot(a, b, input_precision="ieee")
        a_ptr += DEPTH * a_k
        b_ptr += DEPTH * b_k

    inside = inside_m[:, None] & inside_n[None, :]
    more = m_0.to(tl.int64) * more_m + n_0 + row[:, None] * more_m + column[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n_0 + column, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        if THRESHOLD > 0:
            key_0, key_1 = site_keys(seed_step_ptr, site)
            keep = hidden_keep_tile(key_0, key_1, sample_offset, m_0 + row, n_0 + column, T, C, THRESHOLD)
            sums = tl.where(keep, sums * kept, 0.0)
        sums += tl.load(residual_ptr + more, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        stored = sums.to(out_ptr.dtype.element_ty)
        if pre_ptr is not None:
            tl.store(pre_ptr + more, stored, mask=inside)
        sums = gelu(stored.to(tl.float32), TANH, PRECISE)
    if gelu_input_ptr is not None:
        pre = tl.load(gelu_input_ptr + more, mask=inside, other=0.0).to(tl.float32)
        sums = tl.where(inside, sums * gelu_derivative(pre, TANH, PRECISE), 0.0)
        tl.store(sums_ptr + m_0 // ROWS * N + n_0 + column, tl.sum(sums, 0), mask=inside_n)
    place = unit * out_u + piece * out_s + m_0.to(tl.int64) * out_m + n_0 + row[:, None] * out_m + column[None, :]
    if ACCUMULATE:
        sums += tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=inside)


def _stack(x: Tensor) -> Tensor:
    return x if x.dim() > 2 else x[None]


def _depth(tile: Tile, a: Tensor) -> int:
    return tile.depth // 2 if a.dtype == torch.float32 else tile.depth


def row_tiles(M: int, tile: Tile) -> int:
    """Rows of an epilogue's column sums."""
    return grid_rows(M, tile.rows)


def product_raw(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    accumulate: bool = False,
    epilogue: Epilogue = PLAIN,
    segment: int | None = None,
) -> None:
    """out (+)= epilogue(a b), one product or a stack of them, fp32 sums. Allocates nothing.

    Args:
        a: (M, K) or (U, M, K), b: (K, N) or (U, K, N), of one storage dtype (fp32, bf16, fp16), any strides.
        out: (M, N) or (U, M, N), any storage dtype, last stride 1. With `segment`, (U, S, M, N): partial sums over
            stretches of that many elements of K.
        tile: how.
        accumulate: add to out instead of writing it.
        epilogue: what happens to the sums; only without a stack. Its (M, N) tensors have one common row stride.
        segment: a multiple of the tile's depth, from `segments_of`.
    """
    a, b, out = _stack(a), _stack(b), _stack(out)
    (U, M, K), N, depth = a.shape, b.shape[2], _depth(tile, a)
    columns = max(16, min(tile.columns, power_of_two(N)))
    rows = max(16, min(tile.rows, power_of_two(M)))
    pieces = out.shape[1] if segment is not None else 1
    e, masks = epilogue, epilogue.masks
    threshold, kept = quantise(masks.p) if masks is not None else (0, 1.0)
    more = next((x for x in (e.residual_MN, e.pre_MN, e.gelu_input_MN) if x is not None), out[0])
    product_kernel[(triton.cdiv(M, rows) * triton.cdiv(N, columns), U, pieces)](
        a, b, out, e.bias_N, e.residual_MN, e.pre_MN, e.gelu_input_MN, e.sums_PN,
        masks.state.seed_step if masks is not None else None, masks.site if masks is not None else 0,
        masks.state.sample_offset if masks is not None else 0, masks.T if masks is not None else 1, kept,
        M, N, K, K if segment is None else segment,
        *a.stride(), *b.stride(), out.stride(0), out.stride(1) if segment is not None else 0, out.stride(-2),
        more.stride(-2),
        ACCUMULATE=accumulate, THRESHOLD=threshold, C=N if threshold else 4,
        GELU=e.gelu is not None and e.gelu_input_MN is None, TANH=e.gelu == "tanh",
        PRECISE=out.dtype == torch.float32, EVEN=K % depth == 0, ROWS=rows, COLUMNS=columns, DEPTH=depth,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def segments_of(M: int, N: int, K: int, tile: Tile, like: Tensor, units: int = 1) -> tuple[int, int]:
    """Segments of a long reduction that give every multiprocessor two programs, and the length of one."""
    depth = _depth(tile, like)
    tiles = grid_rows(M, tile.rows) * grid_rows(N, tile.columns) * units
    steps = grid_rows(K, depth)
    pieces = max(1, min(2 * processors(like.device) // tiles, steps // SHORTEST))
    segment = grid_rows(steps, pieces) * depth
    return grid_rows(K, segment), segment
