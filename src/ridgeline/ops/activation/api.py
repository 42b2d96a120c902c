"""The public function of the activation.

reference   plain torch in fp32 (reference.py)
torch       an addition and F.gelu in the storage dtype, as an ordinary model's are
triton      one kernel forward, two backward
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
from ridgeline.ops.activation.reference import GeluKind, bias_gelu_reference

IMPLEMENTATIONS = ("reference", "torch", "triton")


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def bias_gelu(x: Tensor, bias_F: Tensor | None = None, *, kind: GeluKind = "exact", impl: str = "reference") -> Tensor:
    """gelu(x + bias) over the last axis.

    Args:
        x: (…, F); fp32, bf16 or fp16, contiguous for "triton".
        bias_F: added before the activation, or None.
        kind: "exact" (erf) or its "tanh" approximation.
        impl: "reference", "torch" or "triton".

    Returns:
        (…, F) in x's dtype; "torch": in what PyTorch makes of x and the bias.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, x.device)
    if kind not in ("exact", "tanh"):
        raise UnsupportedError(f"kind must be exact or tanh, got {kind!r}")
    checks.floats(x=x, bias_F=bias_F)
    checks.shape("bias_F", bias_F, (x.shape[-1],))
    checks.devices(x.device, bias_F=bias_F)
    if impl == "reference":
        return bias_gelu_reference(x, bias_F, kind=kind)
    if impl == "torch":
        u = x if bias_F is None else x + bias_F
        return F.gelu(u, approximate="tanh" if kind == "tanh" else "none")
    checks.storage(x=x, bias_F=bias_F)
    return _BiasGelu.apply(x, bias_F, kind)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_F: Tensor | None, kind: GeluKind) -> Tensor:
        from ridgeline.ops.activation.triton import bias_gelu_forward_raw

        out, width = torch.empty_like(x), x.shape[-1]
        bias_gelu_forward_raw(x.view(-1, width), bias_F, out.view(-1, width), kind=kind)
        ctx.save_for_backward(x, bias_F)
        ctx.kind = kind
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.ops._triton.columns import column_sums_raw
        from ridgeline.ops.activation.triton import bias_gelu_backward_raw, partial_rows

        x, bias_F = ctx.saved_tensors
        x_NF, dx = x.view(-1, x.shape[-1]), torch.empty_like(x)
        N, width = x_NF.shape
        partials_PF = dbias_F = None
        if bias_F is not None:
            partials_PF = torch.empty(partial_rows(N, width, x), width, device=x.device)
        dout_NF = dout.contiguous().view_as(x_NF)
        bias_gelu_backward_raw(dout_NF, x_NF, bias_F, dx.view_as(x_NF), partials_PF, kind=ctx.kind)
        if partials_PF is not None:
            sums_F = torch.empty(width, device=x.device)
            column_sums_raw(partials_PF, sums_F, accumulate=False)
            dbias_F = sums_F.to(bias_F.dtype)
        return dx, dbias_F, None
