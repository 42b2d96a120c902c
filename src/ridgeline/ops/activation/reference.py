"""Bias and GELU: the specification, in fp32 whatever the storage (fp64 for fp64).

exact   u · Φ(u), Φ the standard normal's distribution function
tanh    u / 2 · (1 + tanh(√(2/π) · (u + 0.044715 u³)))
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GeluKind = Literal["exact", "tanh"]


def bias_gelu_reference(x: Tensor, bias_F: Tensor | None, *, kind: GeluKind) -> Tensor:
    """gelu(x + bias) over the last axis; the result has x's dtype."""
    u = x if x.dtype == torch.float64 else x.float()
    if bias_F is not None:
        u = u + bias_F.to(u.dtype)
    return F.gelu(u, approximate="tanh" if kind == "tanh" else "none").to(x.dtype)
