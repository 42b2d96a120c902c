"""Matrix products with what surrounds them in a block: bias, GELU, dropout and residual, and their derivatives.

linear       the public function, with gradients
products     the same products into given buffers, for code that plans its own memory
gemm         a Hopper kernel for any inner size: configurations, division of work, launch
stationary   a Hopper kernel that keeps the weights in registers, beyond 512 inner columns a third in shared memory
codes        GELU's derivative in 8 bits between the two: memory, maps
folded       a norm on the residual stream whose parts these products take, so that no kernel makes it
doubles      fp32 by Hopper's fp64 tensor cores: products and grouped weight gradients
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError, nearest
from ridgeline.ops import checks
from ridgeline.ops.dropout import check_dropping
from ridgeline.ops.linear.autograd import Linear
from ridgeline.ops.linear.reference import GeluKind, Masks, linear_reference

IMPLEMENTATIONS = ("reference", "torch", "cuda")

__all__ = ["GeluKind", "Masks", "linear", "linear_reference", "unavailable"]


def unavailable(impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `impl` cannot run on tensors of this device and dtype, or None when it can."""
    if impl not in IMPLEMENTATIONS:
        return nearest(impl, IMPLEMENTATIONS, "implementation")
    if impl != "cuda":
        return None
    if device.type != "cuda":
        return f"the Hopper GEMM needs a CUDA device, got {device}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"the Hopper GEMM needs compute capability 9.0, got {torch.cuda.get_device_name(device)}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Hopper GEMM takes bfloat16, float16 or float32, got {dtype}"
    return None


def linear(
    x: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    gelu: GeluKind | None = None,
    residual: Tensor | None = None,
    masks: Masks | None = None,
    impl: str = "reference",
) -> Tensor:
    """x Wᵀ + b over the last axis; or gelu(x Wᵀ + b); or residual + dropout(x Wᵀ + b). With gradients.

    Args:
        x: (…, K), any float dtype ("cuda": not fp64); `weight_MK` (M, K) and `bias_M` (M,) of the same dtype.
        gelu: "exact" or "tanh".
        residual: (…, M), not together with `gelu`.
        masks: dropout; needs `residual`, and x's leading axes to be (B, T) with T of the masks.
        impl: "reference" (plain torch), "torch" (explicit backward over cuBLAS, fp32 weight gradients),
            "cuda" (Hopper GEMM with fused epilogues; in fp32 for K and M that are multiples of 4).

    Returns:
        (…, M) in x's dtype; for "torch" and "cuda" each row starts at a multiple of 16 bytes, so that for odd widths it
        is not contiguous.

    Raises:
        UnsupportedError: `impl` cannot run on these tensors, their shapes, dtypes or devices do not fit together, or
            there is no such epilogue; with the reason.
    """
    reason = unavailable(impl, x.device, x.dtype)
    if reason is not None:
        raise UnsupportedError(f"impl={impl!r} cannot run: {reason}")
    _check(x, weight_MK, bias_M, residual, gelu, masks)
    M, K = weight_MK.shape
    x_NK = x.reshape(-1, K)
    residual_NM = None if residual is None else residual.reshape(-1, M)
    if impl == "reference":
        out_NM = linear_reference(x_NK, weight_MK, bias_M, gelu=gelu, residual_NM=residual_NM, masks=masks)
    else:
        out_NM = Linear.apply(x_NK, weight_MK, bias_M, residual_NM, gelu, masks, impl)
    return out_NM.unflatten(0, x.shape[:-1])


def _check(
    x: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    residual: Tensor | None,
    gelu: GeluKind | None,
    masks: Masks | None,
) -> None:
    checks.floats(x=x)
    checks.axes(2, weight_MK=weight_MK)
    M, K = weight_MK.shape
    others = {"weight_MK": weight_MK, "bias_M": bias_M, "residual": residual}
    checks.shape("x", x, (*x.shape[:-1], K))
    checks.shape("bias_M", bias_M, (M,))
    checks.shape("residual", residual, (*x.shape[:-1], M))
    checks.alike("x", x, strict=True, **others)
    checks.devices(x.device, **others)
    if gelu is not None and (residual is not None or masks is not None):
        raise UnsupportedError("gelu does not go with a residual or dropout; apply them in another call")
    if gelu not in (None, "exact", "tanh"):
        raise UnsupportedError(nearest(str(gelu), ("exact", "tanh"), "gelu"))
    if masks is None:
        return
    if residual is None:
        raise UnsupportedError("masks need a residual")
    check_dropping(masks.p, masks.state, x.device)
    if x.dim() != 3 or x.shape[1] != masks.T or M % 4:
        raise UnsupportedError(
            f"masks need x of shape (B, {masks.T}, K) and M a multiple of 4, got {tuple(x.shape)}, M={M}"
        )
