"""Cost of an update: the gradient's norm, then clip, AdamW and the 16-bit copies in one pass.

A parameter costs 16 bytes read (weight, gradient, both moments) and 12 written for AdamW, 2 more where products read a
16-bit copy, and 4 for the norm unless the kernels that write gradients leave sums of their squares.
"""

from __future__ import annotations

from ridgeline.cost import INSTRUCTION, SPECIAL, OpCost, Storage

MASTER = 4  # bytes of a master weight, and of each moment
ADAMW_FLOPS = 14 * INSTRUCTION + 2 * SPECIAL


def accumulate(parameters: int, parts: int, *, store: Storage) -> OpCost:
    """The gradient read again by every part of a batch but the first, in the kernels that write it."""
    return OpCost(
        name="accumulation",
        phase="backward",
        vector_flops=parameters * INSTRUCTION,
        read_bytes=parameters * store.gradient,
        launches=0,
        count=parts - 1,
    )


def gradient_norm(parameters: int, *, store: Storage, rides: bool = False) -> OpCost:
    """The global norm of the gradient; with `rides` its squares are summed where the gradients are written."""
    return OpCost(
        name="grad_norm",
        phase="optimizer",
        vector_flops=parameters * INSTRUCTION,
        read_bytes=0 if rides else parameters * store.gradient,
    )


def adamw(parameters: int, *, store: Storage, clip_pass: bool = False) -> OpCost:
    """Clip and AdamW; `clip_pass` scales the gradient in a pass of its own, as torch.nn.utils does."""
    copy = store.weight if store.weight != MASTER else 0
    extra = store.gradient if clip_pass else 0
    return OpCost(
        name="adamw",
        phase="optimizer",
        vector_flops=parameters * ADAMW_FLOPS,
        read_bytes=parameters * (3 * MASTER + store.gradient + extra),
        written_bytes=parameters * (3 * MASTER + copy + extra),
        launches=2 if clip_pass else 1,
    )
