"""The public function of the heads.

reference   plain torch, which is also what an ordinary model does (reference.py)
triton      norms, activations and losses by Triton, products by the vendor's GEMM on padded operands
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, demand
from ridgeline.ops.cross_entropy.api import TARGETS
from ridgeline.ops.heads.reference import Conditioning, HeadWeights, heads_losses_reference

IMPLEMENTATIONS = ("reference", "triton")


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    return availability(impl, IMPLEMENTATIONS, device)


def heads_losses(
    state_NC: Tensor,
    heads: Sequence[HeadWeights],
    targets_NK: Tensor,
    *,
    eps: float = 1e-5,
    conditioning: Conditioning = "logits",
    impl: str = "reference",
) -> Tensor:
    """Mean cross-entropy of each of K heads that hear what the earlier ones said.

    Args:
        state_NC: the trunk's state; fp32, bf16 or fp16, contiguous for "triton", as are the weights.
        heads: weights in the order in which the heads speak; head k is over C plus all earlier classes.
        targets_NK: classes, signed integers of any width; −100 where a row does not count for a head.
        eps: of the norms.
        conditioning: later heads hear the earlier ones' "logits" (detached) or the targets' "classes" (one-hots).
        impl: "reference" or "triton".

    Returns:
        fp32[K]; NaN where every row is ignored. Gradients flow to the state and to every weight.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype, stride or device it does not take.
    """
    demand(impl, IMPLEMENTATIONS, state_NC.device)
    if conditioning not in ("logits", "classes"):
        raise UnsupportedError(f"conditioning must be logits or classes, got {conditioning!r}")
    checks.axes(2, state_NC=state_NC)
    checks.shape("targets_NK", targets_NK, (state_NC.shape[0], len(heads)))
    if targets_NK.dtype not in TARGETS:
        raise UnsupportedError(f"targets_NK must be signed integers, got {targets_NK.dtype}")
    checks.devices(state_NC.device, targets_NK=targets_NK)
    width = state_NC.shape[1]
    for index, head in enumerate(heads):
        named = {f"{name} of head {index}": tensor for name, tensor in head._asdict().items()}
        checks.axes(2, **{f"{name} of head {index}": getattr(head, name) for name in ("up_FC", "down_VF")})
        checks.floats(state_NC=state_NC, **named)
        checks.alike("state_NC", state_NC, strict=impl == "triton", **named)
        checks.devices(state_NC.device, **named)
        (F, C), V = head.up_FC.shape, head.down_VF.shape[0]
        shapes = ((width,), (width,), (F, width), (F,), (V, F), (V,))
        for (name, tensor), shape in zip(named.items(), shapes, strict=True):
            checks.shape(name, tensor, shape)
        if impl == "triton":
            checks.storage(state_NC=state_NC, **named)
        width = C + V
    if impl == "reference":
        return heads_losses_reference(state_NC, heads, targets_NK, eps=eps, conditioning=conditioning)
    from ridgeline.ops.heads.function import HeadsLosses

    flat = [tensor for head in heads for tensor in head]
    return HeadsLosses.apply(state_NC, targets_NK, eps, conditioning, *flat)
