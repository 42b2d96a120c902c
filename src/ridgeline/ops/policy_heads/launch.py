"""Launches of the policy heads' kernels, and the products between them. Imports Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two
from ridgeline.ops.linear import unavailable
from ridgeline.ops.linear.gemm import RowTerms
from ridgeline.ops.linear.products import forward_raw, input_gradient_raw, weight_gradient_raw
from ridgeline.ops.policy_heads import triton as kernels
from ridgeline.ops.policy_heads.layout import CHUNK, HeadPlace, Layout, layout
from ridgeline.ops.policy_heads.reference import HeadWeights

PACK_ROWS = 4


class Packed(NamedTuple):
    """Weights as the kernels read them; zeros in every padding.

    Attributes:
        a_WC: W1 ∘ γ for the state, all heads.
        b_EW: W1 ∘ γ for earlier logits, transposed.
        down_VW: W2 of all heads.
        s_W, c_W: row sums of W1 ∘ γ as rounded, and W1 β + b1; fp32.
    """

    a_WC: Tensor
    b_EW: Tensor
    down_VW: Tensor
    s_W: Tensor
    c_W: Tensor


class Passed(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Attributes:
        q_NW: r du of every head, for the sum of each head's losses.
        rows_K2N: α and β of every head; fp32.
        sums: sums over rows, as `Layout.sums`; fp32.
        rest: what each head's products are made of, or those of all heads already summed over rows (hopper.py).
    """

    q_NW: Tensor
    rows_K2N: Tensor
    sums: Tensor
    rest: Operands | Tensor


class Operands(NamedTuple):
    """What the products of single heads are made of.

    Attributes:
        a_NW: activations.
        side_NX: the logits that are heard, and two statistics a head.
        dl_NV: gradients of the logits.
    """

    a_NW: Tensor
    side_NX: Tensor
    dl_NV: Tensor


class HeadProducts(NamedTuple):
    """Products over all rows that one head's weight gradients need; fp32, rows or columns may be strided.

    Attributes:
        side_HX: qᵀ [earlier logits …, and from column `statistics_at` on row mean, 1 / row scale].
        down_VH: dlᵀ a.
    """

    side_HX: Tensor
    statistics_at: int
    down_VH: Tensor


def layout_of(heads: Sequence[HeadWeights], step: int = CHUNK) -> Layout:
    """The joint buffers of these heads, for a kernel that takes inner columns in `step`s."""
    shapes = tuple((head.up_HS.shape[0], head.down_VH.shape[0]) for head in heads)
    return layout(heads[0].up_HS.shape[1], shapes, step)


def head_config(place: HeadPlace) -> Launch:
    """The launch of a head's kernel."""
    return Launch(rows=64, warps=4, columns=128, stages=2)


def pack(plan: Layout, heads: Sequence[HeadWeights]) -> Packed:
    """The weights as the kernels read them, a launch a head."""
    like = heads[0].up_HS
    packed = Packed(
        like.new_empty(plan.inner, plan.width),
        like.new_empty(plan.rows_e, plan.inner),
        like.new_empty(plan.rows_v, plan.inner),
        like.new_empty(plan.inner, dtype=torch.float32),
        like.new_empty(plan.inner, dtype=torch.float32),
    )
    for place, head in zip(plan.heads, heads, strict=True):
        at = slice(place.at, place.at + place.padded)
        kernels.pack_kernel[(place.padded // PACK_ROWS,)](
            head.norm_weight_S, head.norm_bias_S, head.up_HS, head.up_bias_H, head.down_VH,
            packed.a_WC[at], packed.s_W[at], packed.c_W[at], packed.b_EW[:, at], packed.down_VW[:, at],
            C=plan.width, E=place.earlier, V=place.classes, H=place.inner, W=plan.inner, ROWS=PACK_ROWS,
            BLOCK_S=power_of_two(plan.width + place.block_e), BLOCK_E=place.block_e, BLOCK_V=place.block_v, num_warps=4,
        )  # fmt: skip
    return packed


def forward(
    plan: Layout,
    packed: Packed,
    heads: Sequence[HeadWeights],
    x_NC: Tensor,
    targets_NK: Tensor,
    *,
    eps: float,
    gradient: bool,
    config: Launch | None = None,
) -> Passed:
    """All heads, and with `gradient` the row-wise part of their backward pass.

    Args:
        plan, packed, heads: of `layout_of` and `pack`.
        x_NC: contiguous.
        targets_NK: any integer dtype, last stride 1.
        eps: of the norms.
        gradient: whether a backward pass will follow; without one only `sums` means anything.
        config: launch of the head kernels; None for the frozen ones.
    """
    N, K = targets_NK.shape
    p_NW = x_NC.new_empty(N, plan.inner)
    vendor = x_NC.dtype == torch.float32 or unavailable("cuda", x_NC.device, x_NC.dtype) is not None
    forward_raw(x_NC, packed.a_WC, p_NW, impl="torch" if vendor else "cuda")
    a_NW = torch.empty_like(p_NW) if gradient else p_NW
    side_NX = x_NC.new_empty(N, plan.side)
    dl_NV = x_NC.new_empty(N, plan.gradient) if gradient else side_NX
    state_2N = x_NC.new_empty(2, N, dtype=torch.float32)
    rows_K2N = x_NC.new_empty(K, 2, N, dtype=torch.float32) if gradient else state_2N[None].expand(K, 2, N)
    sums = x_NC.new_empty(plan.sums, dtype=torch.float32)
    launches = [config or head_config(place) for place in plan.heads]
    tiles = grid_rows(N, launches[0].rows)
    partials = x_NC.new_empty(tiles, plan.sums, dtype=torch.float32)
    for place, head, launch in zip(plan.heads, heads, launches, strict=True):
        at = slice(place.at, place.at + place.padded)
        kernels.head_kernel[(tiles,)](
            x_NC, p_NW[:, at], a_NW[:, at], side_NX, dl_NV, state_2N, rows_K2N[place.index], partials,
            targets_NK[:, place.index], packed.s_W[at], packed.c_W[at], packed.b_EW[:, at], packed.down_VW[:, at],
            head.down_bias_V, N, targets_NK.stride(0), eps,
            C=plan.width, E=place.earlier, V=place.classes, H=place.padded, W=plan.inner, SIDE=plan.side,
            DL=plan.gradient, SUMS=plan.sums, CLASS_AT=place.class_at, STATISTICS_AT=place.statistics_at,
            LOSS_AT=plan.classes + 2 * place.index, HEARD=place.index + 1 < K, GRADIENT=gradient,
            PRECISE=x_NC.dtype == torch.float32, ROWS=launch.rows, CHUNK=CHUNK, BLOCK_C=launch.columns,
            BLOCK_E=place.block_e, BLOCK_V=place.block_v, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
    written = slice(0 if gradient else plan.classes, None)
    column_sums_raw(partials[:, written], sums[written], accumulate=False)
    return Passed(p_NW, rows_K2N, sums, Operands(a_NW, side_NX, dl_NV))


def losses(plan: Layout, passed: Passed) -> Tensor:
    """Mean losses (K,), fp32."""
    pairs_K2 = passed.sums[plan.classes :].view(-1, 2)
    return pairs_K2[:, 0] / pairs_K2[:, 1]


def state_gradient(
    plan: Layout, packed: Packed, passed: Passed, x_NC: Tensor, dlosses_K: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the factor of each head's weight gradients: dloss / #valid; fp32."""
    N, C = x_NC.shape
    K = len(plan.heads)
    factors = dlosses_K.new_empty(K + 1, dtype=torch.float32)
    scaled_WC = torch.empty_like(packed.a_WC)
    kernels.scale_kernel[(plan.inner,)](
        packed.a_WC, scaled_WC, dlosses_K, passed.sums, factors, _head_of(plan, x_NC.device),
        C=C, K=K, LOSSES_AT=plan.classes, BLOCK_K=power_of_two(K), BLOCK_C=power_of_two(C), num_warps=4,
    )  # fmt: skip
    if x_NC.element_size() == 2 and unavailable("cuda", x_NC.device, x_NC.dtype) is None:
        return _with_terms(passed, scaled_WC, x_NC, factors), factors
    dx_NC = torch.mm(passed.q_NW, scaled_WC)
    block = power_of_two(C)
    rows = max(1, 2048 // block)
    kernels.state_gradient_kernel[(grid_rows(N, rows),)](
        dx_NC, x_NC, passed.rows_K2N, factors, N, C=C, K=K, ROWS=rows, BLOCK_C=block, num_warps=4
    )
    return dx_NC, factors


def _with_terms(passed: Passed, scaled_WC: Tensor, x_NC: Tensor, factors: Tensor) -> Tensor:
    """The gradient of x in the product's own epilogue."""
    N, K = len(x_NC), len(passed.rows_K2N)
    terms_2N, dx_NC = x_NC.new_empty(2, N, dtype=torch.float32), torch.empty_like(x_NC)
    kernels.row_terms_kernel[(grid_rows(N, 1024),)](passed.rows_K2N, factors, terms_2N, N, K=K, ROWS=1024, num_warps=4)
    terms = RowTerms(x_NC, terms_2N, factors[K:])
    input_gradient_raw(passed.q_NW, scaled_WC, dx_NC, terms=terms, impl="cuda")
    return dx_NC


@functools.lru_cache(maxsize=64)
def _head_of(plan: Layout, device: torch.device) -> Tensor:
    """The head of every inner column; made before a capture, kept for it."""
    counts = torch.tensor([place.padded for place in plan.heads])
    return torch.arange(len(plan.heads), dtype=torch.int32).repeat_interleave(counts).to(device)


def product(left_NM: Tensor, right_NK: Tensor) -> Tensor:
    """leftᵀ right (M, K), fp32."""
    out_MK = left_NM.new_empty(left_NM.shape[1], right_NK.shape[1], dtype=torch.float32)
    weight_gradient_raw(left_NM, right_NK, out_MK, accumulate=False)
    return out_MK


def head_products(plan: Layout, q_NW: Tensor, rest: Operands) -> tuple[HeadProducts, ...]:
    """The products of single heads, which one product of each kind makes for all."""
    side_WX, down_VW = product(q_NW, rest.side_NX), product(rest.dl_NV, rest.a_NW)
    return tuple(
        HeadProducts(
            side_WX[place.at :],
            place.statistics_at,
            down_VW[place.class_at : place.class_at + place.classes, place.at :],
        )
        for place in plan.heads
    )


def weight_gradients(
    plan: Layout,
    place: HeadPlace,
    head: HeadWeights,
    state_WC: Tensor,
    products: HeadProducts,
    sums: Tensor,
    factors: Tensor,
    targets: HeadWeights,
    *,
    add: bool,
) -> None:
    """Write or add one head's gradients into `targets`, which have the weights' shapes and any storage dtype.

    `state_WC` is qᵀ x of all heads.
    """
    side_HX, statistics_at, down_VH = products
    S, block_s, block_i = plan.width + place.earlier, 8, 128  # many programs, few steps: latency is all it costs
    kernels.weight_gradients_kernel[(grid_rows(S, block_s) + grid_rows(place.inner, block_i),)](
        state_WC, side_HX, down_VH, sums, factors, head.norm_weight_S, head.norm_bias_S, head.up_HS, *targets,
        INDEX=place.index, C=plan.width, E=place.earlier, V=place.classes, H=place.inner, AT=place.at,
        CLASS_AT=place.class_at, STATISTICS_AT=statistics_at, SIDE=side_HX.stride(0), DOWN_V=down_VH.stride(0),
        DOWN_H=down_VH.stride(1), ADD=add,
        BLOCK_I=block_i, BLOCK_S=block_s, BLOCK_V=place.block_v, num_warps=4,
    )  # fmt: skip
