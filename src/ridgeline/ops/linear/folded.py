"""A norm on the residual stream that no pass of its own makes: the products beside it take its parts.

With W' = W diag(γ) (I − 1 1ᵀ / K) (RMSNorm: W diag(γ)), b' = b + W β and a row's σ,

    W norm(r) + b = W' r / σ + b'

so the product that writes r leaves each row's sums and sums of squares; the one that follows takes r as it is and W'
for its weights; and the one that makes the gradient du of its output divides it by σ, so that the weights' gradient
needs norm(r) no more than the product did:

    dW = (G − mean(G)) · γ + (Σ du) βᵀ        G = (du / σ)ᵀ r, less the mean of its own row (LayerNorm)

because a row's mean is that of r's K numbers. 16-bit storage keeps du / σ; norm(r), which would have been rounded and
kept beside r, is never made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.ops.norm.reference import NormKind

SHARE = 64  # columns of a row's share of its sums


class FoldedNorm(NamedTuple):
    """The norm of a residual stream [M, K], K a multiple of 64.

    Attributes:
        kind, eps: as in ops/norm.
        weight_K, bias_K: its scale, and its shift or None; of the stream's dtype.
        shares_SM2: fp32 [K / 64, M, 2]: a row's sum and sum of squares over 64 columns each.
        mean_M, rstd_M: fp32 statistics, known behind `folded_statistics`; mean None for RMSNorm.
    """

    kind: NormKind
    eps: float
    weight_K: Tensor
    bias_K: Tensor | None
    shares_SM2: Tensor
    mean_M: Tensor | None
    rstd_M: Tensor


class FoldedWeights(NamedTuple):
    """What a product behind a folded norm takes for its weights.

    Attributes:
        scaled_MK: W', rounded to the weights' dtype.
        bias_M: b'; fp32.
    """

    scaled_MK: Tensor
    bias_M: Tensor


def folded_statistics(norm: FoldedNorm) -> None:
    """The statistics of the rows from their shares: a launch of its own, a 32nd of the stream's bytes."""
    if norm.shares_SM2.device.type == "cuda":
        from ridgeline.ops.linear.folded_triton import folded_statistics_raw  # imports Triton

        folded_statistics_raw(norm)
        return
    columns = SHARE * len(norm.shares_SM2)
    sum_M, squares_M = norm.shares_SM2.sum(0).unbind(1)
    mean_M = sum_M / columns
    if norm.mean_M is None:
        mean_M = torch.zeros_like(mean_M)
    else:
        norm.mean_M.copy_(mean_M)
    norm.rstd_M.copy_((squares_M / columns - mean_M.square() + norm.eps).rsqrt())
