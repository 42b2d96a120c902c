"""The public function of the policy heads.

reference   plain torch (reference.py)
triton      one product for all heads, a kernel a head that goes forward and back, products for the gradients
cuda        the same on Hopper, with what is a head's alone summed in its kernel; without a gradient Triton's kernel
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops import checks
from ridgeline.ops._triton.support import availability, triton_missing
from ridgeline.ops.policy_heads.layout import layout
from ridgeline.ops.policy_heads.reference import HeadWeights, policy_heads_reference

IMPLEMENTATIONS = ("reference", "triton", "cuda")
MAX_WIDTH = 4096  # state and earlier logits: a tile holds whole rows of a weight in registers
MAX_CLASSES = 128  # of a head, and of all heads that are heard: a tile holds a row's logits


def available(impl: str, device: torch.device) -> str | None:
    """Why `impl` cannot run on `device`, or None when it can."""
    reason = availability(impl, IMPLEMENTATIONS, device)
    if reason is not None or impl != "cuda":
        return reason
    if device.type != "cuda":
        return f"the heads' Hopper kernel needs a CUDA device, got {device}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"the heads' Hopper kernel needs compute capability 9.0, got {torch.cuda.get_device_name(device)}"
    return triton_missing(device)  # the sums over rows, and what has no backward pass


def policy_heads(
    x_NC: Tensor, heads: Sequence[HeadWeights], targets_NK: Tensor, *, eps: float = 1e-5, impl: str = "reference"
) -> Tensor:
    """Losses of K heads, each of which hears the state and the earlier heads' raw logits, detached.

    Args:
        x_NC: the state; fp32, bf16 or fp16.
        heads: K heads' weights in x's dtype; head k takes C + (classes of the heads before it) numbers.
        targets_NK: classes of any integer dtype; −100 does not count. For "triton" one out of range gives NaN.
        eps: of the norms.
        impl: "reference", "triton" or "cuda" (Hopper; see `unsupported`).

    Returns:
        (K,) mean losses in nats, fp32; NaN where no target counts.

    Raises:
        UnsupportedError: the implementation cannot run here, or a shape, dtype or device it does not take.
    """
    reason = available(impl, x_NC.device)
    if reason is not None:
        raise UnsupportedError(f"impl={impl!r} cannot run: {reason}")
    _check(x_NC, heads, targets_NK)
    if impl == "reference":
        return policy_heads_reference(x_NC, heads, targets_NK, eps=eps)
    shapes = [(head.up_HS.shape[0], head.down_VH.shape[0]) for head in heads]
    reason = unsupported(impl, x_NC.shape[1], shapes, x_NC.dtype)
    if reason is not None:
        raise UnsupportedError(reason)
    checks.storage(**{f"heads[{i}].{name}": w for i, head in enumerate(heads) for name, w in head._asdict().items()})
    from ridgeline.ops.policy_heads.function import PolicyHeads  # imports Triton

    return PolicyHeads.apply(
        x_NC, targets_NK.contiguous(), eps, impl == "cuda", *(weight for head in heads for weight in head)
    )


def unsupported(impl: str, width: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> str | None:
    """Why an implementation cannot serve heads of these (inner width, classes) on a state of this width, or None."""
    classes = [count for _, count in shapes]
    if width % 8:
        return f"impl={impl!r} takes a state whose width is a multiple of 8, got {width}"
    if width + sum(classes[:-1]) > MAX_WIDTH:
        return f"impl={impl!r} takes at most {MAX_WIDTH} inputs of a head, got {width + sum(classes[:-1])}"
    if max(*classes, sum(classes[:-1])) > MAX_CLASSES:
        return f"impl={impl!r} takes at most {MAX_CLASSES} classes of a head and of all but the last, got {classes}"
    if impl != "cuda":
        return None
    from ridgeline.ops.policy_heads import hopper  # imports Triton

    return hopper.unfit(layout(width, tuple(shapes), hopper.STEP), dtype)


def _check(x_NC: Tensor, heads: Sequence[HeadWeights], targets_NK: Tensor) -> None:
    checks.axes(2, x_NC=x_NC)
    if not heads:
        raise UnsupportedError("policy_heads takes at least one head, got none")
    checks.shape("targets_NK", targets_NK, (x_NC.shape[0], len(heads)))
    if targets_NK.is_floating_point() or targets_NK.dtype == torch.bool:
        raise UnsupportedError(f"targets_NK must be integers, got {targets_NK.dtype}")
    checks.floats(x_NC=x_NC)
    S = x_NC.shape[1]
    for index, head in enumerate(heads):
        checks.axes(2, **{f"heads[{index}].up_HS": head.up_HS, f"heads[{index}].down_VH": head.down_VH})
        H, V = head.up_HS.shape[0], head.down_VH.shape[0]
        shapes = ((S,), (S,), (H, S), (H,), (V, H), (V,))
        for (name, weight), shape in zip(head._asdict().items(), shapes, strict=True):
            checks.shape(f"heads[{index}].{name}", weight, shape)
            if weight.dtype != x_NC.dtype:
                raise UnsupportedError(f"heads[{index}].{name} must be {x_NC.dtype} like x_NC, got {weight.dtype}")
        checks.devices(x_NC.device, **head._asdict())
        S += V
    checks.devices(x_NC.device, targets_NK=targets_NK)
