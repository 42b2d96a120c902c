"""A linear head and its cross-entropy. Imports Triton; the products are cuBLAS's.

Small heads keep their logits, and the backward pass turns them into their gradient in place. For large ones forward
and backward run at once, a chunk of rows at a time: the logits of a chunk are computed, turned into their gradient and
used for the gradients of hidden states and weights before the next chunk overwrites them. Memory: chunk · V instead of
N · V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.cross_entropy import triton as kernels
from ridgeline.ops.linear.products import weight_gradient_raw
from ridgeline.ops.sink import fp32_place, written

ALIGN = 64  # elements: rows of logits start on 128-byte boundaries, and products take their fast path
CHUNK_ELEMENTS = 1 << 28  # logits of a chunk: 512 MiB in 16-bit storage
KEPT_ELEMENTS = 1 << 26  # logits that a small head keeps


class HeadGradients(NamedTuple):
    """What a head's backward pass leaves.

    Attributes:
        hidden_NC: gradient of the hidden states, in their dtype.
        weight_VC: fp32.
        bias_V: fp32, or None without a bias.
    """

    hidden_NC: Tensor
    weight_VC: Tensor
    bias_V: Tensor | None


class HeadBuffers(NamedTuple):
    """Memory of `linear_cross_entropy_raw`, reusable from step to step.

    Attributes:
        logits_KW: a chunk's logits, then their gradient; W is V rounded up to 64.
        losses_P: fp32 partial losses of every chunk.
        counts: int32 partial counts of valid rows.
    """

    logits_KW: Tensor
    losses_P: Tensor
    counts: Tensor


def chunk_rows(N: int, V: int) -> int:
    """Rows of a chunk: as many as the memory of a chunk allows, spread evenly, a multiple of 128 where N is larger."""
    chunks = -(-N * V // CHUNK_ELEMENTS)
    return min(N, -(-N // chunks // 128) * 128)


def make_buffers(N: int, V: int, like: Tensor, chunk: int | None = None) -> HeadBuffers:
    """Buffers for N rows of V classes, with the dtype and device of `like`."""
    rows = chunk or chunk_rows(N, V)
    width = -(-V // ALIGN) * ALIGN
    partials = sum(kernels.loss_partials(min(rows, N - first), V, like) for first in range(0, N, rows))
    return HeadBuffers(
        torch.empty(rows, width, dtype=like.dtype, device=like.device),
        torch.empty(partials, device=like.device),
        torch.empty(kernels.COUNTS, dtype=torch.int32, device=like.device),
    )


def accumulate_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b with fp32 `out` and operands of any storage dtype; fp32 accumulation throughout."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float())


def linear_cross_entropy_raw(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    loss: Tensor,
    gradients: HeadGradients,
    buffers: HeadBuffers,
    *,
    gradient_scale: Tensor | None = None,
    denominator: Tensor | None = None,
) -> None:
    """Loss and all gradients of a linear head.

    Args:
        hidden_NC: input of the head. `weight_VC`, `bias_V`: the head's, in the same dtype.
        targets_N: classes; −100 where ignored.
        loss: fp32[1], written.
        gradients: hidden_NC is written; weight_VC and bias_V are added to.
        buffers: from `make_buffers`.
        gradient_scale: fp32[1] that multiplies every gradient (a loss scale), or None.
        denominator: int32[1], what the gradients are divided by; None for the number of valid rows, as the loss is.
    """
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows, first_partial = buffers.logits_KW.shape[0], 0
    kernels.count_valid_raw(targets_N, buffers.counts)
    for first in range(0, N, rows):
        part = slice(first, min(first + rows, N))
        padded_KW = buffers.logits_KW[: part.stop - first]
        logits_KV = padded_KW[:, :V]
        if bias_V is None:
            torch.mm(hidden_NC[part], weight_VC.t(), out=logits_KV)
        else:
            torch.addmm(bias_V, hidden_NC[part], weight_VC.t(), out=logits_KV)
        partials = kernels.loss_partials(part.stop - first, V, hidden_NC)
        losses_P = buffers.losses_P[first_partial : first_partial + partials]
        first_partial += partials
        counts = buffers.counts if denominator is None else denominator
        sums_PV = None
        if gradients.bias_V is not None and V <= kernels.WHOLE_ROWS:
            sums_PV = torch.empty(partials, V, device=losses_P.device)
        kernels.cross_entropy_raw(
            padded_KW,
            targets_N[part],
            padded_KW,
            losses_P,
            counts,
            classes=V,
            gradient_scale=gradient_scale,
            partials_PV=sums_PV,
        )
        torch.mm(logits_KV, weight_VC, out=gradients.hidden_NC[part])
        accumulate_product(gradients.weight_VC, logits_KV.t(), hidden_NC[part])
        if gradients.bias_V is not None:
            column_sums_raw(logits_KV if sums_PV is None else sums_PV, gradients.bias_V)
    kernels.mean_loss_raw(buffers.losses_P, buffers.counts, loss)


def head_loss(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunk: int | None
) -> Tensor:
    """The loss of a linear head, with gradients; by the way that suits its size unless there is a `chunk`."""
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    if chunk is None and V <= kernels.WHOLE_ROWS and N * V <= KEPT_ELEMENTS:
        return SmallHead.apply(hidden_NC, weight_VC, bias_V, targets_N)
    return ChunkedHead.apply(hidden_NC, weight_VC, bias_V, targets_N, chunk)


class SmallHead(torch.autograd.Function):
    """The loss of a head whose logits are kept. Weight and bias gradients go to their sinks where they have one."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
        N, V = hidden_NC.shape[0], weight_VC.shape[0]
        buffers, loss = make_buffers(N, V, hidden_NC, N), torch.empty(1, device=hidden_NC.device)
        logits_NV = buffers.logits_KW[:, :V]
        if bias_V is None:
            torch.mm(hidden_NC, weight_VC.t(), out=logits_NV)
        else:
            torch.addmm(bias_V, hidden_NC, weight_VC.t(), out=logits_NV)
        kernels.count_valid_raw(targets_N, buffers.counts)
        kernels.cross_entropy_raw(buffers.logits_KW, targets_N, None, buffers.losses_P, buffers.counts, classes=V)
        kernels.mean_loss_raw(buffers.losses_P, buffers.counts, loss)
        ctx.save_for_backward(hidden_NC, targets_N)
        ctx.buffers, ctx.weight, ctx.bias = buffers, weight_VC, bias_V  # as they came: a sink may hang on them
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, targets_N = ctx.saved_tensors
        (logits_NW, losses_P, counts), weight_VC, bias_V = ctx.buffers, ctx.weight, ctx.bias
        V = weight_VC.shape[0]
        partials_PV = None if bias_V is None else torch.empty(len(losses_P), V, device=losses_P.device)
        dlogits_NW = torch.empty_like(logits_NW)
        kernels.cross_entropy_raw(
            logits_NW, targets_N, dlogits_NW, losses_P, counts,
            classes=V, gradient_scale=dloss.float().reshape(1), partials_PV=partials_PV,
        )  # fmt: skip
        dlogits_NV = dlogits_NW[:, :V]
        dbias = None
        if bias_V is not None and partials_PV is not None:
            dbias_V, add = fp32_place(bias_V)
            column_sums_raw(partials_PV, dbias_V, accumulate=add)
            dbias = written(bias_V, dbias_V)
        dweight_VC, add = fp32_place(weight_VC)
        weight_gradient_raw(dlogits_NV, hidden_NC, dweight_VC, accumulate=add)
        return dlogits_NV @ weight_VC, written(weight_VC, dweight_VC), dbias, None


class ChunkedHead(torch.autograd.Function):
    """The loss of a head whose logits exist a chunk at a time.

    The forward pass leaves the gradients of the sum over rows, which fp16 can hold; the backward
    pass multiplies them by what comes in, over the number of valid rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunk: int | None
    ) -> Tensor:
        gradients = HeadGradients(
            torch.empty_like(hidden_NC),
            torch.zeros(weight_VC.shape, device=weight_VC.device),
            None if bias_V is None else torch.zeros(bias_V.shape, device=bias_V.device),
        )
        loss = torch.empty(1, device=hidden_NC.device)
        buffers = make_buffers(hidden_NC.shape[0], weight_VC.shape[0], hidden_NC, chunk)
        one = torch.ones(1, dtype=torch.int32, device=hidden_NC.device)
        linear_cross_entropy_raw(hidden_NC, weight_VC, bias_V, targets_N, loss, gradients, buffers, denominator=one)
        ctx.save_for_backward(*gradients, buffers.counts)
        ctx.dtype = weight_VC.dtype
        return loss.squeeze(0)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NC, weight_VC, bias_V, counts = ctx.saved_tensors
        factor = dloss.float() / counts.sum()
        dhidden_NC = (hidden_NC.float() * factor).to(hidden_NC.dtype)
        dbias_V = None if bias_V is None else (bias_V * factor).to(ctx.dtype)
        return dhidden_NC, (weight_VC * factor).to(ctx.dtype), dbias_V, None, None
