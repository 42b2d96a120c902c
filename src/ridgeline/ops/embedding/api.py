"""The public function of the embedding.

reference   plain torch, sums in fp32 (reference.py)
torch       F.embedding and an addition in the storage dtype, as an ordinary model's are
triton      one kernel forward; deterministic gradients of table and positions
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.dropout.reference import DropoutState, check_dropping, hidden_keep, quantise
from ridgeline.ops.embedding.reference import embedding_reference
from ridgeline.ops.norm.reference import NormKind
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
    _check(ids_BT, table_VC, positions_RC)
    (B, T), C = ids_BT.shape, table_VC.shape[1]
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
    _check_tables(table_VC, positions_RC)
    return _Embedding.apply(ids_BT.contiguous(), table_VC, positions_RC, p, dropout, site)


def _check(ids_BT: Tensor, table_VC: Tensor, positions_RC: Tensor | None) -> None:
    """What every implementation asks of its tensors."""
    checks.axes(2, ids_BT=ids_BT, table_VC=table_VC, positions_RC=positions_RC)
    checks.floats(table_VC=table_VC, positions_RC=positions_RC)
    if ids_BT.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"ids_BT must be int64 or int32, got {ids_BT.dtype}")
    T, C = ids_BT.shape[1], table_VC.shape[1]
    checks.devices(table_VC.device, ids_BT=ids_BT, positions_RC=positions_RC)
    if positions_RC is not None:
        checks.shape("positions_RC", positions_RC, (positions_RC.shape[0], C))
        if positions_RC.shape[0] < T:
            raise UnsupportedError(f"positions_RC must have at least {T} rows, got {positions_RC.shape[0]}")


def _check_tables(table_VC: Tensor, positions_RC: Tensor | None) -> None:
    """What the kernels ask of theirs."""
    C = table_VC.shape[1]
    checks.storage(table_VC=table_VC, positions_RC=positions_RC)
    if C > MAX_WIDTH:
        raise UnsupportedError(f"impl='triton' takes tables of at most {MAX_WIDTH} columns, got {C}")


class NormOf(NamedTuple):
    """A norm's parameters: scale, shift or None, what is added to the variance, "layernorm" or "rmsnorm"."""

    weight_C: Tensor
    bias_C: Tensor | None
    eps: float
    kind: NormKind


class Normed(NamedTuple):
    """An embedding x (B, T, C), differentiable, with norm(x) (B · T, C) and its fp32 statistics, which are not.

    RMSNorm has no mean.
    """

    x_BTC: Tensor
    h_NC: Tensor
    mean_N: Tensor | None
    rstd_N: Tensor


def embedding_norm(ids_BT: Tensor, table_VC: Tensor, positions_RC: Tensor | None, norm: NormOf) -> Normed:
    """`embedding(…, impl="triton")` without dropout and, by the same kernel, what a norm makes of it.

    The gradient of the norm is its user's: it arrives in x's.

    Raises:
        UnsupportedError: as `embedding`.
    """
    demand("triton", IMPLEMENTATIONS, table_VC.device)
    _check(ids_BT, table_VC, positions_RC)
    _check_tables(table_VC, positions_RC)
    return Normed(*_EmbeddingNorm.apply(ids_BT.contiguous(), table_VC, positions_RC, norm))


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
        return None, *_gradients(ctx, dout_BTC), None, None, None


class _EmbeddingNorm(torch.autograd.Function):
    """The norm and its statistics are not differentiated here: what goes on from them does so itself."""

    @staticmethod
    def forward(
        ctx: Any, ids_BT: Tensor, table_VC: Tensor, positions_RC: Tensor | None, norm: NormOf
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        from ridgeline.ops.embedding.triton import gather_norm_raw

        (B, T), C = ids_BT.shape, table_VC.shape[1]
        out_BTC = torch.empty(B, T, C, dtype=table_VC.dtype, device=table_VC.device)
        h_NC, rstd_N = torch.empty_like(out_BTC).view(-1, C), torch.empty(B * T, device=table_VC.device)
        mean_N = torch.empty_like(rstd_N) if norm.kind == "layernorm" else None
        gather_norm_raw(
            ids_BT.view(-1), table_VC, positions_RC, norm.weight_C, norm.bias_C, out_BTC.view(-1, C), h_NC, mean_N,
            rstd_N, T=T, eps=norm.eps,
        )  # fmt: skip
        ctx.save_for_backward(ids_BT)
        ctx.weights, ctx.drop = (table_VC, positions_RC), None  # weights as they came: a sink may hang on them
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(h_NC, rstd_N, *([] if mean_N is None else [mean_N]))
        return out_BTC, h_NC, mean_N, rstd_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTC: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, dout_BTC), None


def _gradients(ctx: Any, dout_BTC: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of table and positions, from that of the sum; None for what a sink has."""
    from ridgeline.ops.dropout.triton import dropout_raw
    from ridgeline.ops.embedding import triton as kernels

    (ids_BT,), (table_VC, positions_RC) = ctx.saved_tensors, ctx.weights
    B, T, C = dout_BTC.shape
    dout_NC = dout_BTC.contiguous().view(-1, C)
    if ctx.drop is not None:
        masked_NC = torch.empty_like(dout_NC)
        dropout_raw(dout_NC, masked_NC, T, *ctx.drop)
        dout_NC = masked_NC
    dtable_VC, add = fp32_place(table_VC)
    V, sums = len(table_VC), dout_NC.view(B, T, C)
    if positions_RC is not None and kernels.takes_places(B, T, V, C):
        dpositions_RC, add_places = fp32_place(positions_RC)
        partials_PW = torch.empty(-(-T // kernels.PLACES), V * C, device=dout_NC.device)
        kernels.table_and_place_gradients_raw(
            sums, ids_BT, dtable_VC, dpositions_RC, partials_PW, add_table=add, add_positions=add_places
        )
        return written(table_VC, dtable_VC), written(positions_RC, dpositions_RC)
    kernels.table_gradient_raw(dout_NC, ids_BT.view(-1, 1), dtable_VC, accumulate=add)
    dpositions = None
    if positions_RC is not None:
        dpositions_RC, add = fp32_place(positions_RC)
        kernels.position_gradient_raw(sums, dpositions_RC, accumulate=add)
        dpositions = written(positions_RC, dpositions_RC)
    return written(table_VC, dtable_VC), dpositions
