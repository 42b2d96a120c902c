"""Heads that hear the raw logits of the heads before them, detached: the specification.

    z_k = [x | l_1 … l_{k−1}]      l_k = W2 gelu(W1 (norm(z_k) γ + β) + b1) + b2      loss_k = cross-entropy(l_k)

The norm is a LayerNorm, the GELU exact, a loss the mean in nats over rows whose target is not −100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cross_entropy.reference import cross_entropy_reference


class HeadWeights(NamedTuple):
    """One head's weights: S inputs (the state and the earlier logits), H inner numbers, V classes."""

    norm_weight_S: Tensor
    norm_bias_S: Tensor
    up_HS: Tensor
    up_bias_H: Tensor
    down_VH: Tensor
    down_bias_V: Tensor


def policy_heads_reference(x_NC: Tensor, heads: Sequence[HeadWeights], targets_NK: Tensor, *, eps: float) -> Tensor:
    """Losses (K,) of the heads in nats, fp32 (fp64 for fp64).

    Args:
        x_NC: the state.
        heads: K heads, in the order in which they condition one another.
        targets_NK: classes of any integer dtype; −100 does not count.
        eps: of the norms.
    """
    seen_NS, losses = x_NC, []
    for index, head in enumerate(heads):
        h_NS = F.layer_norm(seen_NS, seen_NS.shape[1:], head.norm_weight_S, head.norm_bias_S, eps)
        a_NH = F.gelu(F.linear(h_NS, head.up_HS, head.up_bias_H))
        logits_NV = F.linear(a_NH, head.down_VH, head.down_bias_V)
        losses.append(cross_entropy_reference(logits_NV, targets_NK[:, index].long()))
        seen_NS = torch.cat([seen_NS, logits_NV.detach()], dim=1)
    return torch.stack(losses)
