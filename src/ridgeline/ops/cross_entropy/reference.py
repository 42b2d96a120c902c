"""Cross-entropy over classes, mean over the rows whose target is not ignored: the specification.

    loss = Σ_valid (logsumexp(logits_n) − logits_n[target_n]) / #valid
    ∂loss/∂logits_n = (softmax(logits_n) − onehot(target_n)) / #valid, 0 for ignored rows

NaN when no row is valid, as in torch. The linear form takes the logits as hidden · weightᵀ + bias.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def cross_entropy_reference(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Mean loss as an fp32 scalar (fp64 for fp64)."""
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return F.cross_entropy(wide_NV, targets_N, ignore_index=IGNORE)


def linear_cross_entropy_reference(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> Tensor:
    """Mean loss of a linear head's logits, which are rounded to the storage dtype like any product."""
    return cross_entropy_reference(F.linear(hidden_NC, weight_VC, bias_V), targets_N)
