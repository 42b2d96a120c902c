"""Bias and GELU in Triton: device functions for any kernel's epilogue, and the pass that runs where nothing is fused.

For 16-bit storage Φ comes from exp(−u²/2) · P(t), t = 1 / (1 + 0.365 |u|), a fifth-degree fit whose relative error is
below 1.3e-5 for |u| ≤ 8, tail included (bf16 rounds at 3.9e-3, fp16 at 4.9e-4): one exp2, one reciprocal and about
ten multiply-adds, where libdevice's erf takes about 25. The derivative needs the same exponential. fp32 uses erf.
"""

# mypy: disallow-untyped-defs=False
# (kernels take Triton values, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops._triton.support import Launch, grid_rows, power_of_two, processors
from ridgeline.ops.activation.reference import GeluKind

_HALF_LOG2_E = tl.constexpr(0.72134752044448)
_LOG2_E = tl.constexpr(1.44269504088896)
_SQRT_HALF = tl.constexpr(0.70710678118655)
_SQRT_2_OVER_PI = tl.constexpr(0.79788456080287)
_DENSITY = tl.constexpr(0.39894228040143)  # 1 / √(2π)


@triton.jit
def normal_tail(magnitude, bell):
    """Φ(−magnitude) for magnitude ≥ 0, given bell = exp(−magnitude² / 2); fp32."""
    t = 1.0 / (1.0 + 0.365 * magnitude)
    p = 0.23131133 - 0.0947444529 * t
    p = 0.0584374554 + p * t
    p = 0.160656973 + p * t
    p = 0.144332248 + p * t
    return bell * t * p


@triton.jit
def gelu(u, TANH: tl.constexpr, PRECISE: tl.constexpr):
    """GELU of fp32 values. PRECISE asks for fp32 accuracy instead of a 16-bit storage's."""
    if TANH:
        z = u * (1.0 + 0.044715 * u * u) * _SQRT_2_OVER_PI
        return u / (1.0 + tl.exp2(tl.minimum(z * (-2.0 * _LOG2_E), 80.0)))
    if PRECISE:
        return 0.5 * u * (1.0 + tl.erf(u * _SQRT_HALF))
    magnitude = tl.abs(u)
    return tl.maximum(u, 0.0) - magnitude * normal_tail(magnitude, tl.exp2(u * u * -_HALF_LOG2_E))


@triton.jit
def gelu_derivative(u, TANH: tl.constexpr, PRECISE: tl.constexpr):
    """Derivative of GELU at fp32 values."""
    if TANH:
        z = u * (1.0 + 0.044715 * u * u) * _SQRT_2_OVER_PI
        opposite = tl.exp2(tl.minimum(z * (-2.0 * _LOG2_E), 80.0))
        s = 1.0 / (1.0 + opposite)
        slope = (2.0 + 6.0 * 0.044715 * u * u) * _SQRT_2_OVER_PI
        return s + u * s * (opposite * s) * slope  # opposite · s is 1 − s without its cancellation
    bell = tl.exp2(u * u * -_HALF_LOG2_E)
    if PRECISE:
        return 0.5 * (1.0 + tl.erf(u * _SQRT_HALF)) + u * bell * _DENSITY
    tail = normal_tail(tl.abs(u), bell)
    return tl.where(u >= 0, 1.0 - tail, tail) + u * bell * _DENSITY


@triton.jit(do_not_specialize=["N"])
def bias_gelu_forward_kernel(
    x_ptr, bias_ptr, out_ptr, N,
    F: tl.constexpr, TANH: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out = gelu(x + bias)."""
    tile = tl.program_id(0)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    base = tl.cast(tile, tl.int64) * (ROWS * F)
    row_R = tile * ROWS + tl.arange(0, ROWS)
    offset_RF = (tl.arange(0, ROWS) * F)[:, None] + column_F[None, :]
    inside_RF = (row_R < N)[:, None] & (column_F < F)[None, :]
    u_RF = tl.load(x_ptr + base + offset_RF, mask=inside_RF, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        u_RF += tl.load(bias_ptr + column_F, mask=column_F < F, other=0.0).to(tl.float32)[None, :]
    out_RF = gelu(u_RF, TANH, PRECISE)
    tl.store(out_ptr + base + offset_RF, out_RF.to(out_ptr.dtype.element_ty), mask=inside_RF)


@triton.jit(do_not_specialize=["N"])
def bias_gelu_backward_kernel(
    dout_ptr, x_ptr, bias_ptr, dx_ptr, partials_ptr, partials_stride, N,
    F: tl.constexpr, TANH: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dout · gelu'(x + bias); this program's column sums of dx, where partials_ptr is given."""
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < F
    offset_RF = (tl.arange(0, ROWS) * F)[:, None] + column_F[None, :]
    if bias_ptr is not None:
        bias_F = tl.load(bias_ptr + column_F, mask=inside_F, other=0.0).to(tl.float32)
    sum_RF = tl.zeros((ROWS, BLOCK_F), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        base = tl.cast(tile, tl.int64) * (ROWS * F)
        inside_RF = (tile * ROWS + tl.arange(0, ROWS) < N)[:, None] & inside_F[None, :]
        u_RF = tl.load(x_ptr + base + offset_RF, mask=inside_RF, other=0.0).to(tl.float32)
        dout_RF = tl.load(dout_ptr + base + offset_RF, mask=inside_RF, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            u_RF += bias_F[None, :]
        dx_RF = dout_RF * gelu_derivative(u_RF, TANH, PRECISE)
        tl.store(dx_ptr + base + offset_RF, dx_RF.to(dx_ptr.dtype.element_ty), mask=inside_RF)
        sum_RF += dx_RF
    if partials_ptr is not None:
        address = partials_ptr + tl.program_id(0) * partials_stride + column_F
        tl.store(address, tl.sum(sum_RF, axis=0), mask=inside_F)


def forward_config(N: int, F: int) -> Launch:
    """The launch of the forward kernel for N rows of F."""
    columns = min(power_of_two(F), 1024)
    return Launch(rows=2048 // columns, warps=4, columns=columns)


def backward_config(N: int, F: int) -> Launch:
    """The launch of the backward kernel for N rows of F."""
    columns = min(power_of_two(F), 1024)
    return Launch(rows=2048 // columns, warps=4, columns=columns, per_processor=4, stages=2)


def partial_rows(N: int, F: int, tensor: Tensor, config: Launch | None = None) -> int:
    """Rows of partials of a backward launch on the tensor's card."""
    config = config or backward_config(N, F)
    return min(grid_rows(N, config.rows), config.per_processor * processors(tensor.device))


def bias_gelu_forward_raw(
    x_NF: Tensor, bias_F: Tensor | None, out_NF: Tensor, *, kind: GeluKind, config: Launch | None = None
) -> None:
    """Write gelu(x + bias) into `out_NF`, which may be `x_NF`. Contiguous; allocates nothing."""
    N, F = x_NF.shape
    config = config or forward_config(N, F)
    bias_gelu_forward_kernel[(grid_rows(N, config.rows), grid_rows(F, config.columns))](
        x_NF, bias_F, out_NF, N, F=F, TANH=kind == "tanh", PRECISE=x_NF.dtype == torch.float32,
        ROWS=config.rows, BLOCK_F=config.columns, num_warps=config.warps,
    )  # fmt: skip


def bias_gelu_backward_raw(
    dout_NF: Tensor,
    x_NF: Tensor,
    bias_F: Tensor | None,
    dx_NF: Tensor,
    partials_PF: Tensor | None,
    *,
    kind: GeluKind,
    config: Launch | None = None,
) -> None:
    """Write dout · gelu'(x + bias) into `dx_NF` (which may be `dout_NF` or `x_NF`). Allocates nothing.

    Args:
        dout_NF: gradient of the output. `x_NF`, `bias_F`: the forward pass's (no bias where x already holds it).
        dx_NF: gradient of x.
        partials_PF: fp32, one row a program (`partial_rows`), for the bias's gradient; None without a bias.
        kind: "exact" or "tanh".
        config: launch; None for the frozen one.
    """
    N, F = x_NF.shape
    config = config or backward_config(N, F)
    rows = partial_rows(N, F, x_NF, config) if partials_PF is None else partials_PF.shape[0]
    bias_gelu_backward_kernel[(rows, grid_rows(F, config.columns))](
        dout_NF, x_NF, bias_F, dx_NF, partials_PF, 0 if partials_PF is None else partials_PF.stride(0), N,
        F=F, TANH=kind == "tanh", PRECISE=x_NF.dtype == torch.float32, ROWS=config.rows, BLOCK_F=config.columns,
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
