"""Cost of LayerNorm and RMSNorm, alone and joined with the residual stream.

alone     forward reads x, writes h; backward reads dh and x, writes dx
joined    forward reads branch and residual, writes residual and h; backward reads dh, x and the residual's
          gradient, writes their sum, and the branch's gradient where dropout makes it another tensor
"""

from __future__ import annotations

from typing import Literal

from ridgeline.cost import INSTRUCTION, OpCost, Storage
from ridgeline.ops.dropout.cost import MASK_FLOPS

NormKind = Literal["layernorm", "rmsnorm"]


def statistics(kind: NormKind) -> int:
    """Numbers a row leaves for the backward pass: mean and 1/σ, or 1/σ alone."""
    return 2 if kind == "layernorm" else 1


def _weights(kind: NormKind, width: int, bias: bool) -> int:
    return width * (2 if kind == "layernorm" and bias else 1)


def norm_forward(
    name: str,
    rows: int,
    width: int,
    *,
    kind: NormKind,
    bias: bool,
    store: Storage,
    joined: bool = False,
    dropout: bool = False,
    count: int = 1,
) -> OpCost:
    """Normalise `rows` × `width`; `joined` first adds a branch, with its `dropout`, and writes the new residual."""
    passes = 2 if joined else 1
    instructions = (6 if kind == "layernorm" else 4) + joined
    return OpCost(
        name=name,
        phase="forward",
        vector_flops=rows * width * (instructions * INSTRUCTION + dropout * MASK_FLOPS),
        read_bytes=rows * width * passes * store.activation + _weights(kind, width, bias) * store.weight,
        written_bytes=rows * width * passes * store.activation + rows * statistics(kind) * store.statistic,
        count=count,
    )


def norm_backward(
    name: str,
    rows: int,
    width: int,
    *,
    kind: NormKind,
    bias: bool,
    store: Storage,
    residual: bool = False,
    branch: bool = False,
    count: int = 1,
) -> OpCost:
    """Gradient of the norm's input, scale and shift.

    Args:
        name, rows, width, kind, bias, store, count: as in the forward pass.
        residual: the residual stream's gradient is read and added.
        branch: the gradient through the branch's dropout is written as a tensor of its own.
    """
    instructions = (11 if kind == "layernorm" else 8) + residual
    weights = _weights(kind, width, bias)
    return OpCost(
        name=name,
        phase="backward",
        vector_flops=rows * width * (instructions * INSTRUCTION + branch * MASK_FLOPS),
        read_bytes=rows * (width * (2 + residual) * store.activation + statistics(kind) * store.statistic)
        + width * store.weight,
        written_bytes=rows * width * (1 + branch) * store.activation + weights * store.gradient,
        launches=2,  # the second adds the rows of partial sums of scale and shift
        count=count,
    )
