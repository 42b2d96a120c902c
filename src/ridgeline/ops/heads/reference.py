"""Autoregressive heads and their losses: the specification.

seen₀ = state,    seenₖ₊₁ = [seenₖ, saidₖ]
logitsₖ = down(gelu(up(LayerNorm(seenₖ))))         exact GELU
saidₖ   = logitsₖ, detached, or the target's class as a one-hot
lossₖ   = mean cross-entropy of logitsₖ over the rows whose target is not −100
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cross_entropy.reference import cross_entropy_reference

Conditioning = Literal["logits", "classes"]


class HeadWeights(NamedTuple):
    """A head's weights: norm over C numbers, C → F, F → V."""

    norm_C: Tensor
    norm_bias_C: Tensor
    up_FC: Tensor
    up_bias_F: Tensor
    down_VF: Tensor
    down_bias_V: Tensor


def heads_losses_reference(
    state_NC: Tensor, heads: Sequence[HeadWeights], targets_NK: Tensor, *, eps: float, conditioning: Conditioning
) -> Tensor:
    """The K losses: fp32, or fp64 for fp64."""
    seen, losses = state_NC, []
    for index, head in enumerate(heads):
        h = F.layer_norm(seen, (seen.shape[1],), head.norm_C, head.norm_bias_C, eps)
        logits_NV = F.linear(F.gelu(F.linear(h, head.up_FC, head.up_bias_F)), head.down_VF, head.down_bias_V)
        losses.append(cross_entropy_reference(logits_NV, targets_NK[:, index].long()))
        said_NV = logits_NV.detach()
        if conditioning == "classes":
            said_NV = F.one_hot(targets_NK[:, index].long().clamp(min=0), logits_NV.shape[1])
        seen = torch.cat([seen, said_NV.to(seen.dtype)], dim=1)
    return torch.stack(losses)
