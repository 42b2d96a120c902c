"""The end of a language model by one kernel (head.cu): the last norm, a head of few classes and its mean cross-entropy.

A residual stream of width 256 is read once and its gradient written once, where the norm, the logits, their gradient,
two products and the norm's gradient take nine passes. The loss comes with its gradients, as if nothing but the loss
itself were differentiated; whatever else comes in multiplies them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UnsupportedError
from ridgeline.ops import _cuda as cuda
from ridgeline.ops import checks
from ridgeline.ops._triton.support import processors
from ridgeline.ops.cross_entropy.reference import IGNORE
from ridgeline.ops.kept import Kept
from ridgeline.ops.known import is_one
from ridgeline.ops.norm.reference import NormKind
from ridgeline.ops.scope import product_scope
from ridgeline.ops.sink import fp32_place, sink_of, written
from ridgeline.ops.streams import side_stream

SOURCE = Path(__file__).parent / "head.cu"
WIDTH, MOST_CLASSES = 256, 72
TILE_ROWS, THREADS, SLOTS = 64, 384, 4
FEW_ROWS = 1 << 15  # up to which kernels leave part of a card free
KINDS = "MMPPPPPPPPPqi"


class Statistics(NamedTuple):
    """Of rows: fp32 means (None for RMSNorm) and reciprocals of σ."""

    mean_N: Tensor | None
    rstd_N: Tensor


class FinalNorm(NamedTuple):
    """The norm before the head: its scale, and shift where it has one; "layernorm" or "rmsnorm"."""

    weight_C: Tensor
    bias_C: Tensor | None
    kind: NormKind


def missing(device: torch.device, dtype: torch.dtype, width: int, classes: int) -> str | None:
    """Why the kernel cannot run, or None when it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"the loss of a whole head needs a CUDA device of compute capability 9.0, got {device}"
    if dtype != torch.bfloat16:
        return f"the loss of a whole head takes bfloat16, got {dtype}"
    if width != WIDTH or not 2 <= classes <= MOST_CLASSES:
        return (
            f"the loss of a whole head takes width {WIDTH} and 2 to {MOST_CLASSES} classes, got {width} and {classes}"
        )
    return None


def blocks(N: int, device: torch.device) -> int:
    """Thread blocks of a launch."""
    return max(1, min(-(-N // (2 * TILE_ROWS)), processors(device)))


def class_columns(classes: int) -> int:
    """Classes as the kernel's products have them."""
    return -(-classes // 8) * 8


def partial_columns(classes: int) -> int:
    """Numbers that a block leaves: of each column and class, and of each class."""
    return (WIDTH + 1) * class_columns(classes)


def smem(classes: int) -> int:
    """Bytes of dynamic shared memory, as in the kernel."""
    padded = -(-classes // 16) * 16
    return SLOTS * TILE_ROWS * 512 + padded * 512 + 4 * TILE_ROWS * 128 + padded * 8 + 128


def macros(classes: int, counts: int, *, rms: bool, bias: bool) -> dict[str, int]:
    """What the compiler is asked for."""
    return {"CLASSES": classes, "COUNTS": counts, "IGNORE": IGNORE, "RMS": int(rms), "NORM_BIAS": int(bias)}


def norm_head_raw(
    r_NC: Tensor, dr_NC: Tensor, norm: FinalNorm, statistics: Statistics, weight_VC: Tensor, targets_N: Tensor,
    counts: Tensor, partials_PS: Tensor, losses_P: Tensor,
) -> None:  # fmt: skip
    """Losses, the gradient of r, and partial sums for the weights' gradients. Allocates nothing.

    Args:
        r_NC, dr_NC: bf16, C is 256.
        statistics: what the norm of r has.
        weight_VC: bf16, contiguous, at most 72 classes.
        targets_N: int64, −100 where ignored; a class out of range makes the loss NaN.
        counts: int32 whose sum is the number of rows that the mean is over.
        partials_PS, losses_P: fp32, a row and a number for each of `blocks`; `partial_columns`.
    """
    V, N = len(weight_VC), len(r_NC)
    defines = macros(V, len(counts), rms=norm.kind == "rmsnorm", bias=norm.bias_C is not None)
    kernel = cuda.load(SOURCE, defines).kernel("norm_head", KINDS, patient=True)
    arguments = (
        cuda.tensor_map(r_NC, (TILE_ROWS, 64)), cuda.tensor_map(dr_NC, (16, 64)), weight_VC, norm.weight_C, norm.bias_C,
        *statistics, targets_N, counts, partials_PS, losses_P, partials_PS.stride(0), N,
    )  # fmt: skip
    with product_scope("forward", N, WIDTH, V):
        kernel.launch((len(losses_P),), THREADS, smem(V), arguments)


def norm_head_loss(
    r_NC: Tensor, statistics: Statistics, norm: FinalNorm, weight_VC: Tensor, targets_N: Tensor
) -> Tensor:
    """Mean cross-entropy of the logits norm(r) · weightᵀ over the rows whose target is not −100.

    Args:
        r_NC: bf16, contiguous. `statistics`: those of its norm, whose gradient is part of r's.
        norm: its weights. `weight_VC`: the head's, bf16, contiguous.
        targets_N: int64, contiguous.

    Returns:
        fp32, a scalar; NaN when every row is ignored or a class is out of range.

    Raises:
        UnsupportedError: the kernel cannot run here, or a shape or dtype that it does not take.
    """
    reason = missing(r_NC.device, r_NC.dtype, r_NC.shape[1], len(weight_VC))
    if reason is not None:
        raise UnsupportedError(reason)
    checks.storage(r_NC=r_NC, weight_VC=weight_VC, weight_C=norm.weight_C, bias_C=norm.bias_C)
    checks.alike("r_NC", r_NC, strict=True, weight_VC=weight_VC, weight_C=norm.weight_C, bias_C=norm.bias_C)
    return _NormHead.apply(r_NC, statistics, norm.kind, norm.weight_C, norm.bias_C, weight_VC, targets_N)


@contextlib.contextmanager
def _beside(weights: Sequence[Tensor | None], rows: int, *read: Tensor | None) -> Iterator[None]:
    """With few rows, where all weights have sinks, what writes those runs on a stream beside the backward pass.

    Without a shift that is: with sums of classes the kernel is half as long again, and the one that it runs beside,
    which wants nearly all processors, loses what is gained (gpt2-c256 +3 µs of a step of 845, fast-c256 −16 of 657).
    """
    present = [weight for weight in weights if weight is not None]
    sinks, device = [sink for sink in map(sink_of, present) if sink is not None], present[0].device
    if rows > FEW_ROWS or len(present) == len(weights) or device.type != "cuda" or len(sinks) < len(present):
        yield
        return
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    for sink in sinks:
        sink.beside(stream, *read)


class _NormHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, r_NC: Tensor, statistics: Statistics, kind: NormKind, scale_C: Tensor, shift_C: Tensor | None,
        weight_VC: Tensor, targets_N: Tensor,
    ) -> Tensor:  # fmt: skip
        from ridgeline.ops.cross_entropy import triton as kernels

        P, device, V = blocks(len(r_NC), r_NC.device), r_NC.device, len(weight_VC)
        counts = torch.empty(kernels.COUNTS, dtype=torch.int32, device=device)
        losses_P, loss = torch.empty(P, device=device), torch.empty(1, device=device)
        ctx.partials_PS, ctx.dr_NC = torch.empty(P, partial_columns(V), device=device), torch.empty_like(r_NC)
        kernels.count_valid_raw(targets_N, counts)
        norm_head_raw(
            r_NC, ctx.dr_NC, FinalNorm(scale_C, shift_C, kind), statistics, weight_VC, targets_N, counts,
            ctx.partials_PS, losses_P,
        )  # fmt: skip
        kernels.mean_loss_raw(losses_P, counts, loss)
        ctx.weights = weight_VC, scale_C, shift_C  # as they came: a sink may hang on them
        ctx.kept = Kept(*ctx.weights, spends=True)
        return loss.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        from ridgeline.ops.mlp.head_triton import Place, head_gradients_raw

        ctx.kept.demand()
        weight_VC, scale_C, shift_C = ctx.weights
        factor = None if is_one(dloss) else dloss.float().reshape(1)
        with _beside(ctx.weights, len(ctx.dr_NC), ctx.partials_PS, factor):
            weight, scale = Place(*fp32_place(weight_VC)), Place(*fp32_place(scale_C))
            shift = None if shift_C is None else Place(*fp32_place(shift_C))
            head_gradients_raw(
                ctx.partials_PS, weight_VC, scale_C, shift_C, factor, weight, scale, shift,
                columns=class_columns(len(weight_VC)),
            )  # fmt: skip
            dshift = None if shift is None else written(shift_C, shift.target)
            dscale, dweight = written(scale_C, scale.target), written(weight_VC, weight.target)
        dr_NC = ctx.dr_NC if factor is None else (ctx.dr_NC.float() * factor).to(ctx.dr_NC.dtype)
        del ctx.dr_NC, ctx.partials_PS
        return dr_NC, None, None, dscale, dshift, dweight, None
