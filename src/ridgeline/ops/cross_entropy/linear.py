"""A linear head and its cross-entropy. Imports Triton; the products are cuBLAS's, but on Hopper a large head's logits.

Small heads keep their logits, and the backward pass turns them into their gradient. For large ones forward and
backward run at once, a chunk of rows at a time: the logits of a chunk are computed, turned into their gradient in place
and used for the gradients of hidden states and weights before the next chunk overwrites them. Memory: chunk · V instead
of N · V.

Classes are padded to a multiple of 64, in the logits and in the weight: with an odd number of them (65, 50,257) cuBLAS
falls back to kernels that read element by element.

The gradient of the logits is computed with the loss, as if nothing but the loss itself were differentiated, and taken
where that is so. fp16, whose range needs a loss scale, computes it when the scale is known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.cross_entropy import rows as long_rows
from ridgeline.ops.cross_entropy import triton as kernels
from ridgeline.ops.cross_entropy.cost import WHOLE_ROWS, chunk_rows, keeps_logits
from ridgeline.ops.known import ROWS, is_one, padded_rows
from ridgeline.ops.linear.products import aligned, forward_raw, weight_gradient_raw
from ridgeline.ops.sink import fp32_place, sink_of, written
from ridgeline.ops.streams import side_stream

FEW_ROWS = 1 << 15  # up to which products leave part of a card free


class Head(NamedTuple):
    """A head with W ≥ V classes, those beyond V zeros.

    Attributes:
        weight_WC, bias_W: the latter None without.
        classes: V.
    """

    weight_WC: Tensor
    bias_W: Tensor | None
    classes: int

    def logits(self, hidden_KC: Tensor, out_KW: Tensor) -> None:
        """Written into `out_KW`."""
        if self.bias_W is None:
            torch.mm(hidden_KC, self.weight_WC.t(), out=out_KW)
        else:
            torch.addmm(self.bias_W, hidden_KC, self.weight_WC.t(), out=out_KW)


class HeadBuffers(NamedTuple):
    """Memory of a head's loss.

    Attributes:
        logits_KW: a chunk's logits, then their gradient.
        losses_P: fp32 partial losses of every chunk.
        counts: int32 partial counts of valid rows.
    """

    logits_KW: Tensor
    losses_P: Tensor
    counts: Tensor


class HeadGradients(NamedTuple):
    """Of the hidden states, in their dtype; of weight and bias, fp32 (or None)."""

    hidden_NC: Tensor
    weight_WC: Tensor
    bias_V: Tensor | None


def padded_head(weight_VC: Tensor, bias_V: Tensor | None) -> Head:
    """The head with its classes padded."""
    V = weight_VC.shape[0]
    more = -V % ROWS  # rows of logits start on 128-byte boundaries
    if more == 0:
        return Head(weight_VC, bias_V, V)
    wide_W = None if bias_V is None else functional.pad(bias_V, (0, more))
    wide_WC = padded_rows(weight_VC)
    return Head(functional.pad(weight_VC, (0, 0, 0, more)) if wide_WC is None else wide_WC, wide_W, V)


def _has_long_rows(hidden_NC: Tensor, head: Head) -> bool:
    """Whether the logits' gradient is the Hopper kernel's."""
    return long_rows.fits(hidden_NC.device, hidden_NC.dtype, head.weight_WC.shape[0])


def _partials(rows: int, hidden_NC: Tensor, head: Head) -> int:
    """Partial losses of a chunk of `rows` rows."""
    if _has_long_rows(hidden_NC, head):
        return long_rows.loss_partials(rows, hidden_NC)
    return kernels.loss_partials(rows, head.classes, hidden_NC)


def _chunk_logits(hidden_KC: Tensor, head: Head, logits_KW: Tensor) -> None:
    """Written into `logits_KW`; on Hopper, where so many rows and classes fill the card, by what is fastest there."""
    if _has_long_rows(hidden_KC, head) and hidden_KC.shape[1] % 8 == 0:
        forward_raw(aligned(hidden_KC), aligned(head.weight_WC), logits_KW, bias_M=head.bias_W, impl="cuda")
    else:
        head.logits(hidden_KC, logits_KW)


def make_buffers(hidden_NC: Tensor, head: Head, rows: int) -> HeadBuffers:
    """Buffers for chunks of `rows` rows."""
    N = hidden_NC.shape[0]
    partials = sum(_partials(min(rows, N - first), hidden_NC, head) for first in range(0, N, max(1, rows)))
    return HeadBuffers(
        hidden_NC.new_empty(rows, head.weight_WC.shape[0]),
        torch.empty(partials, device=hidden_NC.device),
        torch.empty(kernels.COUNTS, dtype=torch.int32, device=hidden_NC.device),
    )


def chunked_loss(hidden_NC: Tensor, head: Head, targets_N: Tensor, loss: Tensor, buffers: HeadBuffers) -> HeadGradients:
    """Writes the mean loss into fp32[1] `loss`; returns its gradients, in fp16 the sum's, a chunk of rows at a time."""
    N, V = hidden_NC.shape[0], head.classes
    gradients = HeadGradients(
        torch.empty_like(hidden_NC),
        torch.empty(head.weight_WC.shape, device=hidden_NC.device),
        None if head.bias_W is None else torch.empty(V, device=hidden_NC.device),
    )
    rows, first_partial, counts = buffers.logits_KW.shape[0], 0, buffers.counts
    kernels.count_valid_raw(targets_N, counts)
    if hidden_NC.dtype == torch.float16:  # which can hold the sum's gradient
        counts = torch.ones(1, dtype=torch.int32, device=hidden_NC.device)
    for first in range(0, N, rows):
        part = slice(first, min(first + rows, N))
        logits_KW = buffers.logits_KW[: part.stop - first]
        _chunk_logits(hidden_NC[part], head, logits_KW)
        partials = _partials(part.stop - first, hidden_NC, head)
        losses_P = buffers.losses_P[first_partial : first_partial + partials]
        first_partial += partials
        sums_PV = None
        if gradients.bias_V is not None and V <= WHOLE_ROWS:
            sums_PV = torch.empty(partials, V, device=losses_P.device)
        rows_of_chunk = (logits_KW, targets_N[part], logits_KW, losses_P, counts)
        if _has_long_rows(hidden_NC, head):
            long_rows.cross_entropy_raw(*rows_of_chunk, classes=V)
        else:
            kernels.cross_entropy_raw(*rows_of_chunk, classes=V, partials_PV=sums_PV)
        torch.mm(logits_KW, head.weight_WC, out=gradients.hidden_NC[part])
        weight_gradient_raw(logits_KW, hidden_NC[part], gradients.weight_WC, accumulate=first > 0)
        if gradients.bias_V is not None:
            sums = logits_KW[:, :V] if sums_PV is None else sums_PV
            column_sums_raw(sums, gradients.bias_V, accumulate=first > 0)
    kernels.mean_loss_raw(buffers.losses_P, buffers.counts, loss)
    return gradients


def head_loss(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunk: int | None
) -> Tensor:
    """The loss of a linear head, with gradients; by the way that suits its size unless there is a `chunk`.

    Weight and bias gradients go to their sinks where they have one.
    """
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    if N == 0 or (chunk is None and keeps_logits(N, V)):
        return SmallHead.apply(hidden_NC, weight_VC, bias_V, targets_N)
    return ChunkedHead.apply(hidden_NC, weight_VC, bias_V, targets_N, chunk or chunk_rows(N, V))


def _logits_gradient(
    buffers: HeadBuffers, head: Head, targets_N: Tensor, losses_P: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Of kept logits: the gradient of the mean times `scale`, and its columns' partial sums where there is a bias.

    The losses are written too, into `losses_P`.
    """
    V, device = head.classes, losses_P.device
    dlogits_NW = torch.empty_like(buffers.logits_KW)
    partials_PV = None if head.bias_W is None else torch.empty(len(losses_P), V, device=device)
    kernels.cross_entropy_raw(
        buffers.logits_KW, targets_N, dlogits_NW, losses_P, buffers.counts,
        classes=V, gradient_scale=scale, partials_PV=partials_PV,
    )  # fmt: skip
    return dlogits_NW, partials_PV


def _head_weight_gradient(weight_VC: Tensor, dlogits_NV: Tensor, hidden_NC: Tensor) -> Tensor | None:
    """The weight's gradient for autograd; with few rows into a sink, on a stream beside what the backward pass does."""
    sink = sink_of(weight_VC)
    if sink is None or not hidden_NC.is_cuda or len(hidden_NC) > FEW_ROWS:
        dweight_VC, add = fp32_place(weight_VC)
        weight_gradient_raw(dlogits_NV, hidden_NC, dweight_VC, accumulate=add)
        return written(weight_VC, dweight_VC)
    dweight_VC, add = sink.take()
    stream = side_stream(hidden_NC.device)
    stream.wait_stream(torch.cuda.current_stream(hidden_NC.device))
    with torch.cuda.stream(stream):
        weight_gradient_raw(dlogits_NV, hidden_NC, dweight_VC, accumulate=add)
        sink.finished()
    sink.beside(stream, dlogits_NV, hidden_NC)
    return None


class SmallHead(torch.autograd.Function):
    """The loss of a head whose logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
        head = padded_head(weight_VC, bias_V)
        buffers, loss = make_buffers(hidden_NC, head, len(hidden_NC)), torch.empty(1, device=hidden_NC.device)
        head.logits(hidden_NC, buffers.logits_KW)
        kernels.count_valid_raw(targets_N, buffers.counts)
        ctx.gradient = None
        if any(ctx.needs_input_grad) and hidden_NC.dtype != torch.float16:
            ctx.gradient = _logits_gradient(buffers, head, targets_N, buffers.losses_P, None)
        else:
            kernels.cross_entropy_raw(
                buffers.logits_KW, targets_N, None, buffers.losses_P, buffers.counts, classes=head.classes
            )
        kernels.mean_loss_raw(buffers.losses_P, buffers.counts, loss)
        ctx.save_for_backward(hidden_NC, targets_N)
        ctx.buffers, ctx.head = buffers, head
        ctx.weights = weight_VC, bias_V  # as they came: a sink may hang on them
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, targets_N = ctx.saved_tensors
        head, (weight_VC, bias_V) = ctx.head, ctx.weights
        if ctx.gradient is not None and is_one(dloss):
            dlogits_NW, partials_PV = ctx.gradient
        else:
            unused_P, scale = torch.empty_like(ctx.buffers.losses_P), dloss.float().reshape(1)
            dlogits_NW, partials_PV = _logits_gradient(ctx.buffers, head, targets_N, unused_P, scale)
        dbias = None
        if bias_V is not None:
            dbias_V, add = fp32_place(bias_V)
            column_sums_raw(partials_PV, dbias_V, accumulate=add)
            dbias = written(bias_V, dbias_V)
        # before the hidden states' gradient: behind it, it would take processors from a kernel that wants all of them
        dweight = _head_weight_gradient(weight_VC, dlogits_NW[:, : head.classes], hidden_NC)
        return dlogits_NW @ head.weight_WC, dweight, dbias, None


class ChunkedHead(torch.autograd.Function):
    """The loss of a head whose logits exist a chunk at a time.

    The forward pass leaves the gradients; the backward pass multiplies them by what comes in unless that is 1, in fp16
    over the number of valid rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunk: int
    ) -> Tensor:
        head, loss = padded_head(weight_VC, bias_V), torch.empty(1, device=hidden_NC.device)
        buffers = make_buffers(hidden_NC, head, chunk)
        ctx.gradients = chunked_loss(hidden_NC, head, targets_N, loss, buffers)
        ctx.counts, ctx.weights = buffers.counts, (weight_VC, bias_V)
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients: HeadGradients = ctx.gradients
        factor = dloss.float() / ctx.counts.sum() if gradients.hidden_NC.dtype == torch.float16 else dloss.float()
        known = is_one(factor)
        small = []
        for weight, gradient in zip(ctx.weights, (gradients.weight_WC, gradients.bias_V), strict=True):
            small.append(None if gradient is None else _scaled(weight, gradient[: len(weight)], factor))
        dhidden_NC = gradients.hidden_NC
        if not known:
            dhidden_NC = (dhidden_NC.float() * factor).to(dhidden_NC.dtype)
        return dhidden_NC, *small, None, None


def _scaled(weight: Tensor, gradient: Tensor, factor: Tensor) -> Tensor | None:
    place, add = fp32_place(weight)
    torch.addcmul(place, gradient, factor, out=place) if add else torch.mul(gradient, factor, out=place)
    return written(weight, place)
