"""Cost of GELU: its arithmetic, and its traffic where it is a pass of its own.

In a product's epilogue it costs arithmetic alone, beside the pre-activation that may have to be written for backward.
"""

from __future__ import annotations

from typing import Literal

from ridgeline.cost import INSTRUCTION, SPECIAL, OpCost, Storage

Gelu = Literal["exact", "tanh"]


def gelu_flops(kind: Gelu) -> int:
    """Vector FLOPs of one GELU: erf as a polynomial takes 25 instructions, tanh a special function and 6."""
    return 25 * INSTRUCTION if kind == "exact" else SPECIAL + 6 * INSTRUCTION


def gelu_gradient_flops(kind: Gelu) -> int:
    """Vector FLOPs of one derivative of GELU times the gradient that arrives."""
    return gelu_flops(kind) + (SPECIAL + 4 * INSTRUCTION if kind == "exact" else 6 * INSTRUCTION)


def gelu_pass(name: str, rows: int, width: int, kind: Gelu, *, store: Storage, count: int = 1) -> tuple[OpCost, OpCost]:
    """GELU as a pass of its own, forward and backward."""
    size = rows * width * store.activation
    return (
        OpCost(
            name=name,
            phase="forward",
            vector_flops=rows * width * gelu_flops(kind),
            read_bytes=size,
            written_bytes=size,
            count=count,
        ),
        OpCost(
            name=name,
            phase="backward",
            vector_flops=rows * width * gelu_gradient_flops(kind),
            read_bytes=2 * size,
            written_bytes=size,
            count=count,
        ),
    )
