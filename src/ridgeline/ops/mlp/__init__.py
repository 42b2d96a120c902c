"""The halves of a narrow pre-norm block, each product fused with the join it meets.

reference   plain torch
cuda        Hopper kernels for widths 128 and 256, whose rows a thread block holds whole (kernels.py has the raw
            launches, for code that plans its own memory); the joins they do not reach are the norm's Triton kernels
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError, nearest
from ridgeline.ops import checks
from ridgeline.ops._triton.support import triton_missing
from ridgeline.ops.dropout import check_dropping
from ridgeline.ops.linear.reference import Masks
from ridgeline.ops.mlp.kernels import WIDTHS
from ridgeline.ops.mlp.reference import (
    Mlp,
    Norm,
    mlp_half_reference,
    norm_project_reference,
    project_join_reference,
)

IMPLEMENTATIONS = ("reference", "cuda")

__all__ = ["IMPLEMENTATIONS", "Mlp", "Norm", "available", "mlp_half", "norm_project", "project_join"]


def available(impl: str, device: torch.device, dtype: torch.dtype, C: int, inner: int) -> str | None:
    """Why `impl` cannot run at width C and `inner` columns (F of an MLP, the other side of a projection), or None."""
    if impl not in IMPLEMENTATIONS:
        return nearest(impl, IMPLEMENTATIONS, "implementation")
    if impl == "reference":
        return None
    if device.type != "cuda":
        return f"the fused half-blocks need a CUDA device, got {device}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"the fused half-blocks need compute capability 9.0, got {torch.cuda.get_device_name(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the fused half-blocks take bfloat16 or float16, got {dtype}"
    if C not in WIDTHS:
        return f"the fused half-blocks take widths {WIDTHS}, got {C}"
    if inner % 8 or not 8 <= inner <= 8192:
        return f"the fused half-blocks take inner widths that are multiples of 8 up to 8192, got {inner}"
    return triton_missing(device)


def _demand(
    impl: str, C: int, inner: int, x: Tensor, masks: Masks | None, **operands: tuple[Tensor | None, tuple[int, ...]]
) -> None:
    """Operands come with the shapes that they must have."""
    reason = available(impl, x.device, x.dtype, C, inner)
    if reason is not None:
        raise UnsupportedError(f"impl={impl!r} cannot run: {reason}")
    tensors = {name: tensor for name, (tensor, _) in operands.items()}
    checks.floats(**tensors)
    checks.alike("the rest", x, strict=True, **tensors)
    checks.devices(x.device, **tensors)
    for name, (tensor, shape) in operands.items():
        checks.shape(name, tensor, shape)
        if impl == "cuda" and tensor is not None and not tensor.is_contiguous():
            raise UnsupportedError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if masks is not None:
        check_dropping(masks.p, masks.state, x.device)
    if masks is not None and len(x) % masks.T:
        raise UnsupportedError(f"rows must be a multiple of the masks' T={masks.T}, got {len(x)}")
    if len(x) == 0:
        raise UnsupportedError("there must be at least one row, got none")


def mlp_half(
    r_NC: Tensor, norm: Norm, mlp: Mlp, next_norm: Norm, *, masks: Masks | None = None, impl: str = "reference"
) -> tuple[Tensor, Tensor]:
    """h = norm(r), z = gelu(h Wupᵀ + b) Wdownᵀ, r' = r + dropout(z + b), h' = next_norm(r'). With gradients.

    Args:
        r_NC: residual stream, rows n = sample · T + position; "cuda": bf16 or fp16, contiguous.
        norm, next_norm: of the same kind and epsilon. `mlp`: weights of r's dtype.
        masks: the branch's dropout, or None.
        impl: "reference" or "cuda".

    Returns:
        (r', h'), both (N, C) in r's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    checks.axes(2, r_NC=r_NC, up_FC=mlp.up_FC)
    (N, C), F = r_NC.shape, len(mlp.up_FC)
    _demand(
        impl, C, F, r_NC, masks, r_NC=(r_NC, (N, C)), weight_C=(norm.weight_C, (C,)), bias_C=(norm.bias_C, (C,)),
        up_FC=(mlp.up_FC, (F, C)), up_bias_F=(mlp.up_bias_F, (F,)), down_CF=(mlp.down_CF, (C, F)),
        down_bias_C=(mlp.down_bias_C, (C,)), next_weight_C=(next_norm.weight_C, (C,)),
        next_bias_C=(next_norm.bias_C, (C,)),
    )  # fmt: skip
    if (norm.kind, norm.eps) != (next_norm.kind, next_norm.eps):
        raise UnsupportedError(f"both norms must be alike, got {norm[:2]} and {next_norm[:2]}")
    if impl == "reference":
        return mlp_half_reference(r_NC, norm, mlp, next_norm, masks)
    from ridgeline.ops.mlp.function import MlpHalf

    return MlpHalf.apply(
        r_NC, norm.weight_C, norm.bias_C, mlp.up_FC, mlp.up_bias_F, mlp.down_CF, mlp.down_bias_C, next_norm.weight_C,
        next_norm.bias_C, norm.kind, norm.eps, mlp.gelu, masks,
    )  # fmt: skip


def project_join(
    x_NK: Tensor, weight_CK: Tensor, bias_C: Tensor | None, residual_NC: Tensor, norm: Norm,
    *, masks: Masks | None = None, impl: str = "reference",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """r' = residual + dropout(x Wᵀ + b), h' = norm(r'): attention's output projection and its join. With gradients.

    Args:
        x_NK: (N, K), K a multiple of 8 for "cuda". `weight_CK`, `bias_C`, `residual_NC`, `norm`: of x's dtype.
        masks: the branch's dropout, or None.
        impl: "reference" or "cuda".

    Returns:
        (r', h'), both (N, C) in x's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    checks.axes(2, x_NK=x_NK, weight_CK=weight_CK)
    (C, K), N = weight_CK.shape, len(x_NK)
    _demand(
        impl, C, K, x_NK, masks, x_NK=(x_NK, (N, K)), weight_CK=(weight_CK, (C, K)), bias_C=(bias_C, (C,)),
        residual_NC=(residual_NC, (N, C)), norm_weight_C=(norm.weight_C, (C,)), norm_bias_C=(norm.bias_C, (C,)),
    )  # fmt: skip
    if impl == "reference":
        return project_join_reference(x_NK, weight_CK, bias_C, residual_NC, norm, masks)
    from ridgeline.ops.mlp.function import ProjectJoin

    return ProjectJoin.apply(
        x_NK, weight_CK, bias_C, residual_NC, norm.weight_C, norm.bias_C, norm.kind, norm.eps, masks
    )


def norm_project(
    r_NC: Tensor, norm: Norm, weight_QC: Tensor, bias_Q: Tensor | None = None, *, impl: str = "reference"
) -> Tensor:
    """norm(r) Wᵀ + b: the joint QKV projection, whose input gradient takes the norm's with it. With gradients.

    Args:
        r_NC: (N, C). `norm`, `weight_QC`, `bias_Q`: of r's dtype; Q a multiple of 8 for "cuda".
        impl: "reference" or "cuda".

    Returns:
        (N, Q) in r's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    checks.axes(2, r_NC=r_NC, weight_QC=weight_QC)
    Q, C = weight_QC.shape
    _demand(
        impl, C, Q, r_NC, None, r_NC=(r_NC, (len(r_NC), C)), weight_QC=(weight_QC, (Q, C)), bias_Q=(bias_Q, (Q,)),
        norm_weight_C=(norm.weight_C, (C,)), norm_bias_C=(norm.bias_C, (C,)),
    )  # fmt: skip
    if impl == "reference":
        return norm_project_reference(r_NC, norm, weight_QC, bias_Q)
    from ridgeline.ops.mlp.function import NormProject

    return NormProject.apply(r_NC, norm.weight_C, norm.bias_C, weight_QC, bias_Q, norm.kind, norm.eps)
