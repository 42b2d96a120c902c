"""The public function of the embedding.

reference   plain torch, sums in fp32 (reference.py)
torch       F.embedding and an addition in the storage dtype, as an ordinary model's are
triton      one kernel forward; deterministic gradients of table and positions
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.dropout.reference import DropoutState, check_dropping, hidden_keep, quantise
from ridgeline.ops.embedding.reference import embedding_reference
from ridgeline.ops.sink import fp32_place, written

IMPLEMENTATIONS = ("reference", "torch", "triton")
MAX_WIDTH = 4096  # a tile holds whole rows in registers


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def embedding(
    ids_BT: Tensor,
    table_VC: Tensor,
    positions_RC: Tensor | None = None,
    *,
    p: float = 0.0,
    dropout: DropoutState | None = None,
    site: int = 0,
    impl: str = "reference",
) -> Tensor:
    """dropout(table[ids] + positions).

    Args:
        ids_BT: int64 or int32 rows of the table. For "triton" one out of range gives NaN.
        table_VC: fp32, bf16 or fp16; contiguous for "triton".
        positions_RC: its first T rows are added, or None.
        p: probability of dropping an element, from 0 to 1 − 2⁻¹⁵; 0 without `dropout`.
        dropout: what the step draws its masks from, or None for none.
        site: the place of this dropout in the model.
        impl: "reference", "torch" or "triton".

    Returns:
        (B, T, C) in the table's dtype.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, table_VC.device)
    checks.axes(2, ids_BT=ids_BT, table_VC=table_VC, positions_RC=positions_RC)
    checks.floats(table_VC=table_VC, positions_RC=positions_RC)
    if ids_BT.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"ids_BT must be int64 or int32, got {ids_BT.dtype}")
    (B, T), C = ids_BT.shape, table_VC.shape[1]
    checks.devices(table_VC.device, ids_BT=ids_BT, positions_RC=positions_RC)
    if positions_RC is not None:
        checks.shape("positions_RC", positions_RC, (positions_RC.shape[0], C))
        if positions_RC.shape[0] < T:
            raise UnsupportedError(f"positions_RC must have at least {T} rows, got {positions_RC.shape[0]}")
    check_dropping(p, dropout, table_VC.device)
    if dropout is not None and C % 4:
        raise UnsupportedError(f"dropout needs a width that is a multiple of 4, got {C}")
    if dropout is None:
        p = 0.0
    if impl == "reference":
        return embedding_reference(ids_BT, table_VC, positions_RC, p=p, dropout=dropout, site=site)
    if impl == "torch":
        out_BTC = F.embedding(ids_BT, table_VC)
        if positions_RC is not None:
            out_BTC = out_BTC + positions_RC[:T].to(out_BTC.dtype)
        if dropout is not None and p > 0:
            out_BTC = out_BTC * hidden_keep(dropout, site, (B, T, C), p, out_BTC.device) * quantise(p)[1]
        return out_BTC
    checks.storage(table_VC=table_VC, positions_RC=positions_RC)
    if C > MAX_WIDTH:
        raise UnsupportedError(f"impl='triton' takes tables of at most {MAX_WIDTH} columns, got {C}")
    return _Embedding.apply(ids_BT.contiguous(), table_VC, positions_RC, p, dropout, site)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids_BT: Tensor,
        table_VC: Tensor,
        positions_RC: Tensor | None,
        p: float,
        dropout: DropoutState | None,
        site: int,
    ) -> Tensor:
        from ridgeline.ops.embedding.triton import gather_raw

        (B, T), C = ids_BT.shape, table_VC.shape[1]
        out_BTC = torch.empty(B, T, C, dtype=table_VC.dtype, device=table_VC.device)
        gather_raw(
            ids_BT.view(-1, 1), table_VC, out_BTC.view(-1, C),
            positions_RC=positions_RC, T=T, p=p, dropout=dropout, site=site,
        )  # fmt: skip
        ctx.save_for_backward(ids_BT)
        ctx.weights = table_VC, positions_RC  # as they came: a sink may hang on them
        ctx.drop = None if dropout is None or p == 0 else (p, dropout, site)
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTC: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.ops.dropout.triton import dropout_raw
        from ridgeline.ops.embedding.triton import position_gradient_raw, table_gradient_raw

        (ids_BT,), (table_VC, positions_RC) = ctx.saved_tensors, ctx.weights
        B, T, C = dout_BTC.shape
        dout_NC = dout_BTC.contiguous().view(-1, C)
        if ctx.drop is not None:
            masked_NC = torch.empty_like(dout_NC)
            dropout_raw(dout_NC, masked_NC, T, *ctx.drop)
            dout_NC = masked_NC
        dtable_VC, add = fp32_place(table_VC)
        table_gradient_raw(dout_NC, ids_BT.view(-1, 1), dtable_VC, accumulate=add)
        dpositions = None
        if positions_RC is not None:
            dpositions_RC, add = fp32_place(positions_RC)
            position_gradient_raw(dout_NC.view(B, T, C), dpositions_RC, accumulate=add)
            dpositions = written(positions_RC, dpositions_RC)
        return None, written(table_VC, dtable_VC), dpositions, None, None, None
