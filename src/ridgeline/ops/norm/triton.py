"""LayerNorm and RMSNorm in Triton: one pass forward, one pass backward, both able to carry the residual stream.

Bytes a token and column in 16-bit storage: forward alone 4, joined 8; backward alone 6, joined 8, with dropout in the
branch 10. Sums over rows leave one row of partials a program (fp32); `column_sums_raw` adds them in a fixed order.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops._triton.early import early_launch, previous_done
from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two, processors
from ridgeline.ops.dropout.reference import DropoutState, quantise
from ridgeline.ops.dropout.triton import hidden_keep_tile, site_keys
from ridgeline.ops.norm.reference import NormKind


@triton.jit(do_not_specialize=["site", "sample_offset", "N"])
def norm_forward_kernel(
    branch_ptr, branch_bias_ptr, residual_ptr, weight_ptr, bias_ptr, r_ptr, h_ptr, mean_ptr, rstd_ptr,
    seed_step_ptr, site, sample_offset, N, T, scale, eps,
    C: tl.constexpr, W: tl.constexpr, X_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr,
    RMS: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """r = residual + dropout(branch + branch_bias), where r_ptr is given; h = norm(r); mean and rstd are saved."""
    previous_done(EARLY)
    tile = tl.program_id(0)
    column_C = tl.arange(0, BLOCK_C)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    base = tl.cast(tile, tl.int64) * (ROWS * X_STRIDE)
    offset_RC = (tl.arange(0, ROWS) * X_STRIDE)[:, None] + column_C[None, :]
    inside_C = column_C < C
    inside_RC = (row_R < N)[:, None] & (column_C < W)[None, :]

    x_RC = tl.load(branch_ptr + base + offset_RC, mask=inside_RC, other=0.0).to(tl.float32)
    if r_ptr is not None:
        if residual_ptr is not None:
            residual_RC = tl.load(residual_ptr + base + offset_RC, mask=inside_RC, other=0.0)
        if branch_bias_ptr is not None:
            x_RC += tl.load(branch_bias_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
        if THRESHOLD > 0:
            key_0, key_1 = site_keys(seed_step_ptr, site)
            keep_RC = hidden_keep_tile(key_0, key_1, sample_offset, row_R, column_C, T, C, THRESHOLD)
            x_RC = tl.where(keep_RC, x_RC * scale, 0.0)
        if residual_ptr is not None:
            x_RC += residual_RC.to(tl.float32)
        stored_RC = x_RC.to(r_ptr.dtype.element_ty)
        r_place_RC = (tl.arange(0, ROWS) * R_STRIDE)[:, None] + column_C[None, :]
        tl.store(r_ptr + tl.cast(tile, tl.int64) * (ROWS * R_STRIDE) + r_place_RC, stored_RC, mask=inside_RC)
        x_RC = stored_RC.to(tl.float32)
    x_RC = tl.where(inside_C[None, :], x_RC, 0.0)

    if not RMS:
        mean_R = tl.sum(x_RC, axis=1) / C
        x_RC = tl.where(inside_C[None, :], x_RC - mean_R[:, None], 0.0)
        tl.store(mean_ptr + row_R, mean_R, mask=row_R < N)
    rstd_R = 1.0 / tl.sqrt(tl.sum(x_RC * x_RC, axis=1) / C + eps)
    tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)
    h_RC = x_RC * rstd_R[:, None] * tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        h_RC += tl.load(bias_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
    base = tl.cast(tile, tl.int64) * (ROWS * H_STRIDE)
    offset_RC = (tl.arange(0, ROWS) * H_STRIDE)[:, None] + column_C[None, :]
    tl.store(h_ptr + base + offset_RC, h_RC.to(h_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def dropped(x_RC, key_0, key_1, sample_offset, row_R, column_C, T, scale, C: tl.constexpr, THRESHOLD: tl.constexpr):
    """Elements of rows set to zero by their masks, the others scaled."""
    keep_RC = hidden_keep_tile(key_0, key_1, sample_offset, row_R, column_C, T, C, THRESHOLD)
    return tl.where(keep_RC, x_RC * scale, 0.0)


@triton.jit
def centred(
    dh_RC, x_RC, mean_ptr, row_R, inside_R, inside_C, C: tl.constexpr, BLOCK_C: tl.constexpr, RMS: tl.constexpr
):  # fmt: skip
    """A norm's input without the mean; what the padding holds must not reach a sum."""
    if not RMS:
        x_RC -= tl.load(mean_ptr + row_R, mask=inside_R, other=0.0)[:, None]
    if C < BLOCK_C:
        x_RC = tl.where(inside_C[None, :], x_RC, 0.0)
        dh_RC = tl.where(inside_C[None, :], dh_RC, 0.0)
    return dh_RC, x_RC


@triton.jit
def gradient_of_rows(dx_RC, x_RC, rstd_R, C: tl.constexpr, RMS: tl.constexpr, DIVIDED: tl.constexpr):
    """The gradient of a norm's input from that of its normalised rows x."""
    inner_R = tl.sum(dx_RC * x_RC, axis=1) / C
    if not RMS:
        dx_RC -= (tl.sum(dx_RC, axis=1) / C)[:, None]
    dr_RC = dx_RC - x_RC * inner_R[:, None]
    if not DIVIDED:
        dr_RC *= rstd_R[:, None]
    return dr_RC


@triton.jit
def store_sums(
    out_ptr, dweight_RC, dbias_RC, dbranch_bias_RC, inside_C,
    C: tl.constexpr, BIAS: tl.constexpr, BRANCH_BIAS: tl.constexpr,
):  # fmt: skip
    """One program's sums over its rows, of each parameter that there is."""
    tl.store(out_ptr, tl.sum(dweight_RC, axis=0), mask=inside_C)
    if BIAS:
        out_ptr += C
        tl.store(out_ptr, tl.sum(dbias_RC, axis=0), mask=inside_C)
    if BRANCH_BIAS:
        out_ptr += C
        tl.store(out_ptr, tl.sum(dbranch_bias_RC, axis=0), mask=inside_C)


@triton.jit(do_not_specialize=["site", "sample_offset", "N"])
def norm_backward_kernel(
    dh_ptr, r_ptr, weight_ptr, mean_ptr, rstd_ptr, dresidual_ptr, dr_ptr, dbranch_ptr, partials_ptr, partials_stride,
    seed_step_ptr, site, sample_offset, N, T, scale,
    C: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr, DH_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    DR_STRIDE: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, BRANCH_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """dr = dresidual + norm'(dh); dbranch = dropout'(dr); this program's column sums of every parameter gradient."""
    previous_done(EARLY)
    column_C, lane_R = tl.arange(0, BLOCK_C), tl.arange(0, ROWS)
    inside_C = column_C < C
    dh_place_RC = (lane_R * DH_STRIDE)[:, None] + column_C[None, :]
    x_place_RC = (lane_R * X_STRIDE)[:, None] + column_C[None, :]
    dr_place_RC = (lane_R * DR_STRIDE)[:, None] + column_C[None, :]
    weight_C = tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        key_0, key_1 = site_keys(seed_step_ptr, site)
    dweight_RC = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    dbias_RC = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    dbranch_bias_RC = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)

    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        row_R = tile * ROWS + lane_R
        first = tl.cast(tile, tl.int64) * ROWS
        inside_R = row_R < N
        inside_RC = inside_R[:, None] & (column_C < W)[None, :]
        out_RC = inside_R[:, None] & (column_C < OUT)[None, :]
        dh_RC = tl.load(dh_ptr + first * DH_STRIDE + dh_place_RC, mask=inside_RC, other=0.0).to(tl.float32)
        x_RC = tl.load(r_ptr + first * X_STRIDE + x_place_RC, mask=inside_RC, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            dresidual_RC = tl.load(dresidual_ptr + first * DR_STRIDE + dr_place_RC, mask=out_RC, other=0.0)
        rstd_R = tl.load(rstd_ptr + row_R, mask=inside_R, other=1.0)
        dh_RC, x_RC = centred(dh_RC, x_RC, mean_ptr, row_R, inside_R, inside_C, C, BLOCK_C, RMS)
        if DIVIDED:  # dh comes divided by each row's σ
            dweight_RC += dh_RC * x_RC
            if BIAS:
                dbias_RC += dh_RC * (1.0 / rstd_R)[:, None]
        x_RC *= rstd_R[:, None]
        if not DIVIDED:
            dweight_RC += dh_RC * x_RC
            if BIAS:
                dbias_RC += dh_RC
        dr_RC = gradient_of_rows(dh_RC * weight_C[None, :], x_RC, rstd_R, C, RMS, DIVIDED)
        if dresidual_ptr is not None:
            dr_RC += dresidual_RC.to(tl.float32)
        if dr_ptr is not None:
            tl.store(dr_ptr + first * DR_STRIDE + dr_place_RC, dr_RC.to(dr_ptr.dtype.element_ty), mask=out_RC)
        if THRESHOLD > 0:
            dr_RC = dropped(dr_RC, key_0, key_1, sample_offset, row_R, column_C, T, scale, C, THRESHOLD)
        if dbranch_ptr is not None:
            address_RC = dbranch_ptr + first * DR_STRIDE + dr_place_RC
            tl.store(address_RC, dr_RC.to(dbranch_ptr.dtype.element_ty), mask=out_RC)
        if BRANCH_BIAS:
            dbranch_bias_RC += tl.where(inside_R[:, None], dr_RC, 0.0)

    out_ptr = partials_ptr + tl.program_id(0) * partials_stride + column_C
    store_sums(out_ptr, dweight_RC, dbias_RC, dbranch_bias_RC, inside_C, C, BIAS, BRANCH_BIAS)


def forward_config(N: int, C: int) -> Launch:
    """The launch of the forward kernel for N rows of C: about 512 elements a warp, whole rows in a few warps."""
    rows = max(1, min(4, 4096 // power_of_two(C)))
    return Launch(rows=rows, warps=max(1, min(8, rows * power_of_two(C) // 512)))


def backward_config(N: int, C: int) -> Launch:
    """The launch of the backward kernel for N rows of C.

    One warp a program up to 512 columns, so that row sums are shuffles alone; the next tile is in flight meanwhile.
    Wider rows take more warps and programs, and two tiles in flight.
    """
    width = power_of_two(C)
    if width > 512:
        return Launch(rows=1, warps=width // 512, per_processor=max(1, 6144 // width), stages=3)
    if N * width < 1 << 22:
        return Launch(rows=2, warps=1, per_processor=4)
    return Launch(rows=max(1, 1024 // width), warps=1, per_processor=8, stages=2)


def partial_rows(N: int, C: int, tensor: Tensor, config: Launch | None = None) -> int:
    """Rows of partials (programs) of a backward launch on the tensor's card."""
    config = config or backward_config(N, C)
    return min(grid_rows(N, config.rows), config.per_processor * processors(tensor.device))


def _row_stride(*tensors: Tensor | None) -> int:
    """The row stride that these tensors share; 0 where there are none."""
    strides = {tensor.stride(0) for tensor in tensors if tensor is not None}
    if len(strides) > 1:
        raise UnsupportedError(f"the residual stream's tensors must have one row stride, got {sorted(strides)}")
    return strides.pop() if strides else 0


def norm_forward_raw(
    x_NW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    h_NW: Tensor,
    mean_N: Tensor | None,
    rstd_N: Tensor,
    *,
    eps: float,
    kind: NormKind,
    columns: int | None = None,
    r_NC: Tensor | None = None,
    residual_NC: Tensor | None = None,
    branch_bias_C: Tensor | None = None,
    T: int = 1,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    config: Launch | None = None,
) -> None:
    """Normalise `x_NW` into `h_NW`; with `r_NC` given, x is a branch and the joined form runs. Allocates nothing.

    Rows may be strided (a slice of a wider buffer); those that start on 16 bytes are read 16 bytes at a time.

    Args:
        x_NW: input, or the branch's output before bias and dropout.
        weight_C: scale. `bias_C`: shift, or None.
        h_NW: normalised output. `mean_N`, `rstd_N`: fp32 statistics (mean unused and None for RMSNorm).
        eps: added to the variance. `kind`: "layernorm" or "rmsnorm".
        columns: C, where rows are padded to W: what x holds beyond is not looked at, h becomes 0 there; None for W.
        r_NC: where the new residual goes; may be `residual_NC` or `x_NW` itself.
        residual_NC: the residual to add to, or None at the stream's beginning.
        branch_bias_C: bias still to add to the branch.
        T: positions of a sample, for the mask. `p`, `dropout`, `site`: dropout of the branch.
        config: launch; None for the frozen one.
    """
    N, W = x_NW.shape
    C = columns or W
    config = config or forward_config(N, W)
    threshold, scale = quantise(p) if dropout is not None else (0, 1.0)
    norm_forward_kernel[(grid_rows(N, config.rows),)](
        x_NW, branch_bias_C, residual_NC, weight_C, bias_C, r_NC, h_NW, mean_N, rstd_N,
        dropout.seed_step if dropout is not None else None, site, dropout.sample_offset if dropout is not None else 0,
        N, T, scale, eps, C=C, W=W, X_STRIDE=_row_stride(x_NW, residual_NC), R_STRIDE=_row_stride(r_NC),
        H_STRIDE=h_NW.stride(0), RMS=kind == "rmsnorm", THRESHOLD=threshold, ROWS=config.rows,
        BLOCK_C=power_of_two(W), num_warps=config.warps, **early_launch(x_NW.device),
    )  # fmt: skip


def norm_backward_raw(
    dh_NW: Tensor,
    r_NW: Tensor,
    weight_C: Tensor,
    mean_N: Tensor | None,
    rstd_N: Tensor,
    partials_PW: Tensor,
    *,
    kind: NormKind,
    bias: bool,
    branch_bias: bool = False,
    divided: bool = False,
    columns: int | None = None,
    dresidual_NC: Tensor | None = None,
    dr_NC: Tensor | None = None,
    dbranch_NC: Tensor | None = None,
    T: int = 1,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    config: Launch | None = None,
) -> None:
    """Gradient of the (joined) norm. Allocates nothing. Rows may be strided.

    Args:
        dh_NW: gradient of h. `r_NW`: what was normalised. `mean_N`, `rstd_N`: its statistics.
        partials_PW: fp32, one row a program (`partial_rows`); columns dweight (C), then dbias (C) if `bias`, then the
            branch bias's gradient (C) if `branch_bias`. Every element of these is written.
        divided: dh_NW comes divided by each row's σ (ops/linear/folded).
        kind: as in the forward pass. `bias`, `branch_bias`: whether these gradients are wanted.
        columns: C, where rows are padded to W, as in the forward pass.
        dresidual_NC: gradient that arrives along the residual stream, or None.
        dr_NC: where the gradient of r goes; may be `dresidual_NC` or `dh_NW`; None to leave it out. It may have fewer
            columns than C, for what does not go back beyond them.
        dbranch_NC: where the gradient of the branch's output goes (dr behind the mask); None where it equals dr.
        T: as in the forward pass, like `p`, `dropout` and `site`.
        config: launch; None for the frozen one.
    """
    N, W = r_NW.shape
    C = columns or W
    config = config or backward_config(N, W)
    threshold, scale = quantise(p) if dropout is not None else (0, 1.0)
    outputs = [tensor for tensor in (dr_NC, dbranch_NC) if tensor is not None]
    norm_backward_kernel[(partials_PW.shape[0],)](
        dh_NW, r_NW, weight_C, mean_N, rstd_N, dresidual_NC, dr_NC, dbranch_NC, partials_PW, partials_PW.stride(0),
        dropout.seed_step if dropout is not None else None, site, dropout.sample_offset if dropout is not None else 0,
        N, T, scale, C=C, W=W, DH_STRIDE=dh_NW.stride(0), X_STRIDE=r_NW.stride(0),
        DR_STRIDE=_row_stride(dresidual_NC, *outputs), OUT=min([C, *(tensor.shape[1] for tensor in outputs)]),
        RMS=kind == "rmsnorm", BIAS=bias, BRANCH_BIAS=branch_bias, THRESHOLD=threshold, ROWS=config.rows,
        BLOCK_C=power_of_two(W), STAGES=config.stages, DIVIDED=divided, num_warps=config.warps,
        **early_launch(dh_NW.device),
    )  # fmt: skip
