"""Rows of a table by index, with an optional learned position and dropout: the specification.

out[b, t] = dropout(table[ids[b, t]] + positions[t])
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.dropout.reference import DropoutState, hidden_keep, quantise


def embedding_reference(
    ids_BT: Tensor,
    table_VC: Tensor,
    positions_RC: Tensor | None = None,
    *,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
) -> Tensor:
    """(B, T, C) in the table's dtype; sums in fp32 (fp64 for fp64). The first T rows of `positions_RC` are used."""
    B, T = ids_BT.shape
    out_BTC = F.embedding(ids_BT, table_VC)
    out_BTC = out_BTC if out_BTC.dtype == torch.float64 else out_BTC.float()
    if positions_RC is not None:
        out_BTC = out_BTC + positions_RC[:T].to(out_BTC.dtype)
    if dropout is not None and p > 0:
        keep_BTC = hidden_keep(dropout, site, (B, T, table_VC.shape[1]), p, ids_BT.device)
        out_BTC = out_BTC * keep_BTC * quantise(p)[1]
    return out_BTC.to(table_VC.dtype)
