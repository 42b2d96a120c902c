"""The heads' losses with an explicit forward and backward. Imports Triton.

The inner sizes (521, 558, 37 …) are unaligned, so every row is padded to a multiple of 8 numbers and every matrix with
zero rows and columns: loads are 16 bytes wide and products take their fast path. What the heads see lies in one
buffer that grows by what each says; the first norm writes the state into it on its way. Padding stays zero through
norm, product and GELU (gelu(0) = 0), and the loss kernel ignores and clears it.

Saved a row: the buffer, and h, u, gelu(u) and the logits of each head. The backward pass turns the logits into their
gradient in place, so it runs once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.activation import triton as activation
from ridgeline.ops.cross_entropy import triton as losses
from ridgeline.ops.heads.reference import Conditioning, HeadWeights
from ridgeline.ops.kept import Kept
from ridgeline.ops.linear.products import weight_gradient_raw
from ridgeline.ops.norm import triton as norms
from ridgeline.ops.sink import GradientSink, sink_of

FIELDS = len(HeadWeights._fields)
ROW = 64  # numbers: rows of what the heads see start on 128-byte boundaries


class HeadSinks(NamedTuple):
    """Where the gradients of a head's matrices are wanted, if not in autograd."""

    up_FC: GradientSink | None
    down_VF: GradientSink | None


class Step(NamedTuple):
    """What one head's forward pass saves; W, F and V are padded."""

    x_NW: Tensor
    h_NW: Tensor
    mean_N: Tensor
    rstd_N: Tensor
    up_FW: Tensor
    up_bias_F: Tensor
    u_NF: Tensor
    a_NF: Tensor
    down_VF: Tensor
    logits_NV: Tensor
    losses_P: Tensor
    counts: Tensor


def padded(n: int) -> int:
    """The multiple of 8 that is at least n."""
    return -(-n // 8) * 8


def _pad(tensor: Tensor, *shape: int) -> Tensor:
    """A vector or matrix with zeros up to `shape`; itself where it has that shape."""
    if tuple(tensor.shape) == shape:
        return tensor
    out = tensor.new_zeros(shape)
    out[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


def head_forward(
    x_NW: Tensor, head: HeadWeights, targets_N: Tensor, loss: Tensor, eps: float, seen_NC: Tensor | None
) -> Step:
    """One head on what it sees, its loss into `loss`; the first head also writes what it saw into `seen_NC`."""
    (N, W), C, V = x_NW.shape, head.norm_C.shape[0], head.down_VF.shape[0]
    h_NW = x_NW.new_empty(N, W)
    mean_N, rstd_N = (x_NW.new_empty(N, dtype=torch.float32) for _ in range(2))
    norms.norm_forward_raw(
        x_NW, head.norm_C, head.norm_bias_C, h_NW, mean_N, rstd_N, eps=eps, kind="layernorm", columns=C, r_NC=seen_NC
    )
    F, wide_V = padded(head.up_FC.shape[0]), padded(V)
    up_FW, up_bias_F, down_VF = _pad(head.up_FC, F, W), _pad(head.up_bias_F, F), _pad(head.down_VF, wide_V, F)
    u_NF = h_NW @ up_FW.t()
    a_NF = torch.empty_like(u_NF)
    activation.bias_gelu_forward_raw(u_NF, up_bias_F, a_NF, kind="exact")
    logits_NV = torch.addmm(_pad(head.down_bias_V, wide_V), a_NF, down_VF.t())
    counts = torch.empty(losses.COUNTS, dtype=torch.int32, device=x_NW.device)
    losses_P = x_NW.new_empty(losses.loss_partials(N, V, x_NW), dtype=torch.float32)
    losses.count_valid_raw(targets_N, counts)
    losses.cross_entropy_raw(logits_NV, targets_N, None, losses_P, counts, classes=V)
    losses.mean_loss_raw(losses_P, counts, loss)
    return Step(x_NW, h_NW, mean_N, rstd_N, up_FW, up_bias_F, u_NF, a_NF, down_VF, logits_NV, losses_P, counts)


def _sums(partials_PW: Tensor, like: Tensor) -> Tensor:
    """Column sums in the storage of `like`."""
    sums_W = like.new_empty(partials_PW.shape[1])
    column_sums_raw(partials_PW, sums_W, accumulate=False)
    return sums_W


def _matrix(dy_NM: Tensor, x_NK: Tensor, weight_MK: Tensor, sink: GradientSink | None) -> Tensor | None:
    """dyᵀ x without its padding: in the weight's dtype, or in fp32 to the weight's sink (None)."""
    M, K = weight_MK.shape
    if sink is None:
        return (dy_NM.t() @ x_NK)[:M, :K]
    gradient = dy_NM.new_empty(dy_NM.shape[1], x_NK.shape[1], dtype=torch.float32)
    weight_gradient_raw(dy_NM, x_NK, gradient, accumulate=False)
    sink.put(gradient[:M, :K])
    return None


def head_backward(
    step: Step, head: HeadWeights, sinks: HeadSinks, targets_N: Tensor, dloss: Tensor, dstate_NC: Tensor, first: bool
) -> list[Tensor | None]:
    """The weights' gradients in the order of their fields; spends the logits.

    The state's gradient is added to `dstate_NC`, or written there where this is the first head to give one.
    """
    (N, W), C, V, F = step.x_NW.shape, head.norm_C.shape[0], head.down_VF.shape[0], step.u_NF.shape[1]
    logit_sums_PV = dloss.new_empty(step.losses_P.shape[0], V)
    losses.cross_entropy_raw(
        step.logits_NV, targets_N, step.logits_NV, step.losses_P, step.counts,
        classes=V, gradient_scale=dloss, partials_PV=logit_sums_PV,
    )  # fmt: skip
    ddown_VF = _matrix(step.logits_NV, step.a_NF, head.down_VF, sinks.down_VF)
    du_NF = step.logits_NV @ step.down_VF
    u_sums_PF = dloss.new_empty(activation.partial_rows(N, F, du_NF), F)
    activation.bias_gelu_backward_raw(du_NF, step.u_NF, step.up_bias_F, du_NF, u_sums_PF, kind="exact")
    dup_FC = _matrix(du_NF, step.h_NW, head.up_FC, sinks.up_FC)
    norm_sums_P2C = dloss.new_empty(norms.partial_rows(N, W, du_NF), 2 * C)
    norms.norm_backward_raw(
        du_NF @ step.up_FW, step.x_NW, head.norm_C, step.mean_N, step.rstd_N, norm_sums_P2C, kind="layernorm",
        bias=True, columns=C, dresidual_NC=None if first else dstate_NC, dr_NC=dstate_NC,
    )  # fmt: skip
    dnorm_C, dnorm_bias_C = _sums(norm_sums_P2C, du_NF).split(C)
    dup_bias_F = _sums(u_sums_PF, du_NF)[: head.up_bias_F.shape[0]]
    return [dnorm_C, dnorm_bias_C, dup_FC, dup_bias_F, ddown_VF, _sums(logit_sums_PV, du_NF)]


class HeadsLosses(torch.autograd.Function):
    """All heads on one state, a loss each."""

    @staticmethod
    def forward(
        ctx: Any, state_NC: Tensor, targets_NK: Tensor, eps: float, conditioning: Conditioning, *flat: Tensor
    ) -> Tensor:
        heads = [HeadWeights(*flat[start : start + FIELDS]) for start in range(0, len(flat), FIELDS)]
        N, C = state_NC.shape
        seen_NS = state_NC.new_empty(N, -(-heads[-1].norm_C.shape[0] // ROW) * ROW) if len(heads) > 1 else None
        losses_K, ctx.steps = torch.empty(len(heads), device=state_NC.device), []
        for index, head in enumerate(heads):
            before, V, targets_N = head.norm_C.shape[0], head.down_VF.shape[0], targets_NK[:, index]
            x_NW, copy_NC = state_NC, None
            if seen_NS is not None:
                x_NW = seen_NS[:, : padded(before)] if index else state_NC
                copy_NC = None if index else seen_NS[:, :C]
            step = head_forward(x_NW, head, targets_N, losses_K[index : index + 1], eps, copy_NC)
            ctx.steps.append(step)
            if seen_NS is not None and index + 1 < len(heads):
                said_NV = seen_NS[:, before : before + V]
                if conditioning == "logits":
                    said_NV.copy_(step.logits_NV[:, :V])
                else:
                    said_NV.copy_(torch.nn.functional.one_hot(targets_N.long().clamp(min=0), V))
        ctx.heads, ctx.targets_NK, ctx.kept = heads, targets_NK, Kept(*flat, spends=True)
        ctx.sinks = [HeadSinks(sink_of(head.up_FC), sink_of(head.down_VF)) for head in heads]
        return losses_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses_K: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.demand()
        dlosses_K = dlosses_K.float().contiguous()
        dstate_NC = torch.empty_like(ctx.steps[0].x_NW)
        grads: list[Tensor | None] = []
        for index in range(len(ctx.heads) - 1, -1, -1):
            last = index == len(ctx.heads) - 1
            dloss, targets_N = dlosses_K[index : index + 1], ctx.targets_NK[:, index]
            grads = [
                *head_backward(ctx.steps[index], ctx.heads[index], ctx.sinks[index], targets_N, dloss, dstate_NC, last),
                *grads,
            ]
            ctx.steps[index] = None  # spent
        return dstate_NC, None, None, None, *grads
