"""LayerNorm and RMSNorm, alone and joined with the residual write: the specification.

    LayerNorm(x) = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias
    RMSNorm(x)   = x / sqrt(mean(x²) + eps) · weight

over the last axis, with the biased variance. Joined:

    r = residual + dropout(branch + branch_bias)        the new residual stream, rounded to its storage
    h = norm(r)                                         of the rounded r: what the backward pass will read

Statistics are fp32 whatever the storage (fp64 for fp64).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops.dropout.reference import DropoutState, hidden_keep, quantise

NormKind = Literal["layernorm", "rmsnorm"]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def norm_reference(x: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, eps: float, kind: NormKind) -> Tensor:
    """Normalise the last axis; the result has x's dtype."""
    wide = _wide(x)
    if kind == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight_C)
    if bias_C is not None:
        out = out + _wide(bias_C)
    return out.to(x.dtype)


def residual_norm_reference(
    branch_BTC: Tensor,
    residual_BTC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor | None,
    *,
    eps: float,
    kind: NormKind,
    branch_bias_C: Tensor | None = None,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream and normalise the sum. Returns (r, h), both in the branch's dtype."""
    r_BTC = _wide(branch_BTC)
    if branch_bias_C is not None:
        r_BTC = r_BTC + _wide(branch_bias_C)
    if dropout is not None and p > 0:
        B, T, C = branch_BTC.shape
        keep_BTC = hidden_keep(dropout, site, (B, T, C), p, branch_BTC.device)
        r_BTC = r_BTC * keep_BTC * quantise(p)[1]
    if residual_BTC is not None:
        r_BTC = r_BTC + _wide(residual_BTC)
    r_BTC = r_BTC.to(branch_BTC.dtype)
    return r_BTC, norm_reference(r_BTC, weight_C, bias_C, eps=eps, kind=kind)
