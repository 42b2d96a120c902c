"""The public functions of the cross-entropy.

reference   plain torch on fp32 logits (reference.py)
torch       F.linear and F.cross_entropy on the logits as they are
triton      loss and gradient in one pass; the linear form without a logits tensor
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.cross_entropy.reference import IGNORE, cross_entropy_reference, linear_cross_entropy_reference

IMPLEMENTATIONS = ("reference", "torch", "triton")
TARGETS = (torch.int64, torch.int32, torch.int16, torch.int8)


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def _check_targets(targets_N: Tensor, N: int, device: torch.device) -> None:
    checks.shape("targets_N", targets_N, (N,))
    checks.devices(device, targets_N=targets_N)
    if targets_N.dtype not in TARGETS:
        raise UnsupportedError(f"targets_N must be signed integers, got {targets_N.dtype}")
    if not targets_N.is_contiguous():
        raise UnsupportedError(f"targets_N must be contiguous, got strides {targets_N.stride()}")


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, impl: str = "reference") -> Tensor:
    """Mean cross-entropy over the rows whose target is not −100.

    Args:
        logits_NV: fp32, bf16 or fp16; for "triton" columns are contiguous, rows may be strided.
        targets_N: classes, signed integers of any width, of which "triton" reads 32 bits. For it one out of range makes
            the loss NaN.
        impl: "reference", "torch" or "triton".

    Returns:
        The loss, a scalar: fp32, but for "torch" the logits' dtype. NaN when every row is ignored.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, logits_NV.device)
    checks.axes(2, logits_NV=logits_NV)
    checks.floats(logits_NV=logits_NV)
    _check_targets(targets_N, logits_NV.shape[0], logits_NV.device)
    if impl == "reference":
        return cross_entropy_reference(logits_NV, targets_N.long())
    if impl == "torch":
        return F.cross_entropy(logits_NV, targets_N.long(), ignore_index=IGNORE)
    if logits_NV.dtype not in checks.STORAGE:
        raise UnsupportedError(f"logits_NV must be float32, bfloat16 or float16, got {logits_NV.dtype}")
    if logits_NV.stride(1) != 1:
        raise UnsupportedError(f"logits_NV must have contiguous columns, got strides {logits_NV.stride()}")
    return _CrossEntropy.apply(logits_NV, targets_N)


def linear_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    chunk: int | None = None,
    impl: str = "reference",
) -> Tensor:
    """Mean cross-entropy of the logits hidden · weightᵀ + bias.

    Args:
        hidden_NC: fp32, bf16 or fp16, contiguous for "triton", as are weight and bias, which share its dtype.
        weight_VC: the head's weight.
        bias_V: the head's bias, or None.
        targets_N: classes, signed integers of any width; −100 where ignored.
        chunk: rows whose logits exist at one time ("triton"); None for all where they are few (2²⁶), else for what
            512 MiB of bf16 hold.
        impl: "reference", "torch" or "triton".

    Returns:
        The loss, a scalar: fp32, but for "torch" the hidden states' dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, hidden_NC.device)
    checks.axes(2, hidden_NC=hidden_NC, weight_VC=weight_VC)
    checks.floats(hidden_NC=hidden_NC, weight_VC=weight_VC, bias_V=bias_V)
    checks.alike("hidden_NC", hidden_NC, strict=impl == "triton", weight_VC=weight_VC, bias_V=bias_V)
    checks.shape("weight_VC", weight_VC, (weight_VC.shape[0], hidden_NC.shape[1]))
    checks.shape("bias_V", bias_V, (weight_VC.shape[0],))
    checks.devices(hidden_NC.device, weight_VC=weight_VC, bias_V=bias_V)
    _check_targets(targets_N, hidden_NC.shape[0], hidden_NC.device)
    if impl == "reference":
        return linear_cross_entropy_reference(hidden_NC, weight_VC, bias_V, targets_N.long())
    if impl == "torch":
        return F.cross_entropy(F.linear(hidden_NC, weight_VC, bias_V), targets_N.long(), ignore_index=IGNORE)
    checks.storage(hidden_NC=hidden_NC, weight_VC=weight_VC, bias_V=bias_V)
    if chunk is not None and chunk < 1:
        raise UnsupportedError(f"chunk must be at least 1, got {chunk}")
    from ridgeline.ops.cross_entropy.linear import head_loss

    return head_loss(hidden_NC, weight_VC, bias_V, targets_N, chunk)


class _CrossEntropy(torch.autograd.Function):
    """Loss forward, gradient backward: the incoming gradient may be a loss scale, without which fp16 underflows."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        from ridgeline.ops.cross_entropy import triton as kernels

        N, V = logits_NV.shape
        counts = torch.empty(kernels.COUNTS, dtype=torch.int32, device=logits_NV.device)
        losses_P = torch.empty(kernels.loss_partials(N, V, logits_NV), device=logits_NV.device)
        loss = torch.empty(1, device=logits_NV.device)
        kernels.count_valid_raw(targets_N, counts)
        kernels.cross_entropy_raw(logits_NV, targets_N, None, losses_P, counts, classes=V)
        kernels.mean_loss_raw(losses_P, counts, loss)
        ctx.save_for_backward(logits_NV, targets_N, losses_P, counts)
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        from ridgeline.ops.cross_entropy.triton import cross_entropy_raw

        logits_NV, targets_N, losses_P, counts = ctx.saved_tensors
        N, V = logits_NV.shape
        dlogits_NV = torch.empty(N, V, dtype=logits_NV.dtype, device=logits_NV.device)
        scale = dloss.float().reshape(1)
        cross_entropy_raw(logits_NV, targets_N, dlogits_NV, losses_P, counts, classes=V, gradient_scale=scale)
        return dlogits_NV, None
