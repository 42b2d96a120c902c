"""A linear layer with what surrounds it in a block: the specification.

    y = x Wᵀ + b
    y = gelu(x Wᵀ + b)                          exact or tanh form
    y = residual + dropout(x Wᵀ + b)            masks of ops.dropout

Sums are accumulated in fp32 or wider; every intermediate is rounded to the storage, as PyTorch rounds it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise

GeluKind = Literal["exact", "tanh"]


class Masks(NamedTuple):
    """The dropout of a hidden (B, T, C) tensor.

    Attributes:
        p: probability of dropping an element.
        state: seed, step and the first sample's global index.
        site: which dropout of the model.
        T: positions a sample has; row n of a flattened tensor is position n % T of sample n // T.
    """

    p: float
    state: DropoutState
    site: int
    T: int


def masked(y_NC: Tensor, masks: Masks) -> Tensor:
    """dropout(y) of a flattened (B · T, C) tensor; also its own backward pass."""
    N, C = y_NC.shape
    keep = hidden_keep(masks.state, masks.site, (N // masks.T, masks.T, C), masks.p, y_NC.device)
    return y_NC * keep.view(N, C) * quantise(masks.p)[1]


def linear_reference(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None = None,
    *,
    gelu: GeluKind | None = None,
    residual_NM: Tensor | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """The layer on flattened rows: (N, K) → (N, M), in x's dtype."""
    y_NM = F.linear(x_NK, weight_MK, bias_M)
    if gelu is not None:
        return F.gelu(y_NM, approximate="tanh" if gelu == "tanh" else "none")
    if masks is not None:
        y_NM = masked(y_NM, masks)
    return y_NM if residual_NM is None else residual_NM + y_NM
