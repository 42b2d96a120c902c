"""Dropout of a hidden tensor by itself.

    reference   the specification's mask, applied in plain torch
    triton      the mask drawn in the kernel, forward and again backward; nothing is stored

PyTorch's own dropout draws from a generator: it is another function, and not offered here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.dropout.reference import DropoutState, check_dropping, hidden_keep, quantise

IMPLEMENTATIONS = ("reference", "triton")


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def dropout(x_BTC: Tensor, p: float, state: DropoutState, site: int, *, impl: str = "reference") -> Tensor:
    """Drop each element with probability p and scale the rest, by the mask of (state, site).

    Args:
        x_BTC: C a multiple of 4; fp32, bf16 or fp16, contiguous for "triton".
        p: probability of dropping, from 0 to 1 − 2⁻¹⁵, kept to 15 bits.
        state: what the step draws its masks from.
        site: the place of this dropout in the model.
        impl: "reference" or "triton".

    Returns:
        (B, T, C) in x's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, x_BTC.device)
    if x_BTC.dim() != 3 or x_BTC.shape[2] % 4:
        raise UnsupportedError(f"x_BTC must be (B, T, C) with C a multiple of 4, got shape {tuple(x_BTC.shape)}")
    checks.floats(x_BTC=x_BTC)
    check_dropping(p, state, x_BTC.device)
    if impl == "reference":
        B, T, C = x_BTC.shape
        return x_BTC * hidden_keep(state, site, (B, T, C), p, x_BTC.device) * quantise(p)[1]
    checks.storage(x_BTC=x_BTC)
    return _HiddenDropout.apply(x_BTC, p, state, site)


class _HiddenDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, p: float, state: DropoutState, site: int) -> Tensor:
        ctx.arguments = (p, state, site)
        return _drop(x_BTC, p, state, site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTC: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(dout_BTC.contiguous(), *ctx.arguments), None, None, None


def _drop(x_BTC: Tensor, p: float, state: DropoutState, site: int) -> Tensor:
    from ridgeline.ops.dropout.triton import dropout_raw

    out_BTC = torch.empty_like(x_BTC)
    dropout_raw(x_BTC.flatten(0, 1), out_BTC.flatten(0, 1), x_BTC.shape[1], p, state, site)
    return out_BTC
