"""The public functions of the norms: checks, and the choice of an implementation.

reference   plain torch with fp32 statistics (reference.py)
torch       F.layer_norm and F.rms_norm, sums in the storage dtype as an ordinary model's are
triton      one kernel forward, two backward
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.dropout.reference import DropoutState, check_dropping, hidden_keep, quantise
from ridgeline.ops.norm.reference import NormKind, norm_reference, residual_norm_reference

IMPLEMENTATIONS = ("reference", "torch", "triton")
MAX_WIDTH = 8192  # a tile holds whole rows in registers


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def _check(impl: str, kind: str, x: Tensor, weight_C: Tensor, bias_C: Tensor | None, **more: Tensor | None) -> None:
    demand(impl, IMPLEMENTATIONS, x.device)
    if kind not in ("layernorm", "rmsnorm"):
        raise UnsupportedError(f"kind must be layernorm or rmsnorm, got {kind!r}")
    checks.floats(x=x, weight_C=weight_C, bias_C=bias_C, **more)
    C = x.shape[-1]
    checks.shape("weight_C", weight_C, (C,))
    checks.shape("bias_C", bias_C, (C,))
    checks.devices(x.device, weight_C=weight_C, bias_C=bias_C, **more)
    if impl == "triton":
        checks.storage(x=x, weight_C=weight_C, bias_C=bias_C, **more)
        if C > MAX_WIDTH:
            raise UnsupportedError(f"impl='triton' takes rows of at most {MAX_WIDTH} numbers, got {C}")


def _torch_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float, kind: NormKind) -> Tensor:
    if kind == "layernorm":
        return F.layer_norm(x, (x.shape[-1],), weight_C, bias_C, eps)
    out = F.rms_norm(x, (x.shape[-1],), weight_C, eps)
    return out if bias_C is None else out + bias_C


def _torch_dropout(x_BTC: Tensor, p: float, dropout: DropoutState, site: int) -> Tensor:
    if p == 0:
        return x_BTC
    B, T, C = x_BTC.shape
    return x_BTC * hidden_keep(dropout, site, (B, T, C), p, x_BTC.device) * quantise(p)[1]


def norm(
    x: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kind: NormKind = "layernorm",
    impl: str = "reference",
) -> Tensor:
    """Normalise the last axis of x, scale by `weight_C` and shift by `bias_C`.

    Args:
        x: (…, C); fp32, bf16 or fp16, contiguous for "triton".
        weight_C: scale.
        bias_C: shift, or None.
        eps: added to the variance (mean square for RMSNorm).
        kind: "layernorm" or "rmsnorm".
        impl: "reference", "torch" or "triton".

    Returns:
        (…, C) in x's dtype; "torch": in what PyTorch makes of x and the weights.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    _check(impl, kind, x, weight_C, bias_C)
    if impl == "reference":
        return norm_reference(x, weight_C, bias_C, eps=eps, kind=kind)
    if impl == "torch":
        return _torch_norm(x, weight_C, bias_C, eps, kind)
    from ridgeline.ops.norm.function import Norm

    return Norm.apply(x, weight_C, bias_C, eps, kind)


def residual_norm(
    branch_BTC: Tensor,
    residual_BTC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kind: NormKind = "layernorm",
    branch_bias_C: Tensor | None = None,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    impl: str = "reference",
) -> tuple[Tensor, Tensor]:
    """r = residual + dropout(branch + branch_bias) and h = norm(r).

    Args:
        branch_BTC: output of a branch; fp32, bf16 or fp16, contiguous for "triton".
        residual_BTC: the residual stream, or None where it begins.
        weight_C: scale of the norm.
        bias_C: shift of the norm, or None.
        eps: added to the variance (mean square for RMSNorm).
        kind: "layernorm" or "rmsnorm".
        branch_bias_C: bias still to be added to the branch, or None.
        p: probability of dropping an element of the branch, from 0 to 1 − 2⁻¹⁵; 0 without `dropout`.
        dropout: what the step draws its masks from, or None for none.
        site: the place of this dropout in the model.
        impl: "reference", "torch" or "triton".

    Returns:
        (r, h), both (B, T, C) in the branch's dtype; "torch": in what PyTorch makes of branch, residual and weights.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    more = {"residual_BTC": residual_BTC, "branch_bias_C": branch_bias_C}
    _check(impl, kind, branch_BTC, weight_C, bias_C, **more)
    if branch_BTC.dim() != 3:
        raise UnsupportedError(f"branch_BTC must have three axes, got shape {tuple(branch_BTC.shape)}")
    C = branch_BTC.shape[-1]
    checks.shape("residual_BTC", residual_BTC, tuple(branch_BTC.shape))
    checks.shape("branch_bias_C", branch_bias_C, (C,))
    check_dropping(p, dropout, branch_BTC.device)
    if dropout is not None and C % 4:
        raise UnsupportedError(f"dropout needs a width that is a multiple of 4, got {C}")
    if dropout is None:
        p = 0.0
    if impl == "reference":
        return residual_norm_reference(
            branch_BTC, residual_BTC, weight_C, bias_C,
            eps=eps, kind=kind, branch_bias_C=branch_bias_C, p=p, dropout=dropout, site=site,
        )  # fmt: skip
    if impl == "torch":
        r_BTC = branch_BTC if branch_bias_C is None else branch_BTC + branch_bias_C
        r_BTC = r_BTC if dropout is None else _torch_dropout(r_BTC, p, dropout, site)
        r_BTC = r_BTC if residual_BTC is None else residual_BTC + r_BTC
        return r_BTC, _torch_norm(r_BTC, weight_C, bias_C, eps, kind)
    from ridgeline.ops.norm.function import ResidualNorm

    return ResidualNorm.apply(branch_BTC, residual_BTC, weight_C, bias_C, branch_bias_C, eps, kind, p, dropout, site)
