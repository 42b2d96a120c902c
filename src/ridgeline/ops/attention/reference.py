"""Causal attention with an optional learned relative term: the specification.

    score[i, j] = scale · (q_i · k_j + q_i · table[R − 1 − (i − j)])      for j ≤ i
    out_i       = Σ_j dropout(softmax_j(score[i, ·])) · v_j

The table's last row belongs to distance 0, the row before it to distance 1, and so on (the skew of the Music
Transformer, Huang et al. 2018). H query heads share G key/value heads, H / G consecutive query heads each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.dropout import DropoutState, attention_keep, quantise


def skew(scores_BHTT: Tensor) -> Tensor:
    """From columns by table row to columns by key: out[i, j] = in[i, T − 1 − (i − j)] for j ≤ i."""
    B, H, T, _ = scores_BHTT.shape
    return F.pad(scores_BHTT, (1, 0)).view(B, H, T + 1, T)[:, :, 1:]


def attention_reference(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    table_RD: Tensor | None,
    *,
    scale: float,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
) -> Tensor:
    """Explicit attention in the inputs' dtype; arguments as for `attention`. Returns (B, T, H, D)."""
    T, H, G = q_BTHD.shape[1], q_BTHD.shape[2], k_BTGD.shape[2]
    q_BHTD, k_BHTD, v_BHTD = (
        q_BTHD.transpose(1, 2),
        k_BTGD.transpose(1, 2).repeat_interleave(H // G, dim=1),
        v_BTGD.transpose(1, 2).repeat_interleave(H // G, dim=1),
    )
    scores = q_BHTD @ k_BHTD.transpose(-1, -2)
    if table_RD is not None:
        scores = scores + skew(q_BHTD @ table_RD[-T:].t())
    future = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
    weights = (scores * scale).masked_fill(future, float("-inf")).softmax(-1)
    if dropout is not None and p > 0:
        keep = attention_keep(dropout, site, (q_BTHD.shape[0], H, T), p, scores.device)
        weights = weights * keep * quantise(p)[1]
    return (weights @ v_BHTD).transpose(1, 2)
