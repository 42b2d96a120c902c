"""Cost of the half-blocks: what the fused kernels of this folder do and move.

    mlp forward     reads h, r, weights; writes gelu'(u), a, r', h', statistics              4 N C F FLOPs
    mlp backward    reads dz, gelu'(u), r, dresidual, weights; writes du, dr (and dbranch)   4 N C F FLOPs
    project + join  reads x, r, W; writes r', h', statistics                                 2 N K C FLOPs
    its backward's  reads dy, r, dresidual, W; writes dr (and dbranch)                       2 N K C FLOPs

a = gelu(u) is never read back but by the weight gradient. Partial sums of small gradients are left out.
"""

from __future__ import annotations

from ridgeline.cost import INSTRUCTION, OpCost, Storage
from ridgeline.ops.activation.cost import Gelu, gelu_gradient_flops
from ridgeline.ops.dropout.cost import MASK_FLOPS
from ridgeline.ops.norm.cost import NormKind, statistics


def _join_forward(rows: int, width: int, kind: NormKind, dropout: bool, store: Storage) -> tuple[int, int, int]:
    """Vector FLOPs, bytes read and bytes written by a join beyond its product."""
    instructions = (7 if kind == "layernorm" else 5) * INSTRUCTION + dropout * MASK_FLOPS
    size = rows * width * store.activation
    return rows * width * instructions, size, 2 * size + rows * statistics(kind) * store.statistic


def _join_backward(rows: int, width: int, kind: NormKind, dropout: bool, store: Storage) -> tuple[int, int, int]:
    instructions = (12 if kind == "layernorm" else 9) * INSTRUCTION + dropout * MASK_FLOPS
    size = rows * width * store.activation
    return rows * width * instructions, 2 * size + rows * statistics(kind) * store.statistic, (1 + dropout) * size


def mlp_forward(
    name: str, rows: int, width: int, inner: int, *, kind: NormKind, gelu: Gelu, dropout: bool, store: Storage,
    count: int = 1,
) -> OpCost:  # fmt: skip
    """The MLP and the join after it."""
    vector, reads, writes = _join_forward(rows, width, kind, dropout, store)
    return OpCost(
        name=name,
        phase="forward",
        flops=4 * rows * width * inner,
        vector_flops=vector + rows * inner * gelu_gradient_flops(gelu),
        read_bytes=reads + rows * width * store.activation + 2 * width * inner * store.weight,
        written_bytes=writes + 2 * rows * inner * store.activation,
        count=count,
    )


def mlp_backward(
    name: str, rows: int, width: int, inner: int, *, kind: NormKind, dropout: bool, store: Storage, count: int = 1
) -> OpCost:
    """Both input gradients of the MLP and the gradient of the join before it (with its `dropout`)."""
    vector, reads, writes = _join_backward(rows, width, kind, dropout, store)
    return OpCost(
        name=name,
        phase="backward",
        flops=4 * rows * width * inner,
        vector_flops=vector + rows * inner * INSTRUCTION,
        read_bytes=reads + rows * (width + inner) * store.activation + 2 * width * inner * store.weight,
        written_bytes=writes + rows * inner * store.activation,
        count=count,
    )


def project_forward(
    name: str, rows: int, inputs: int, width: int, *, kind: NormKind, dropout: bool, store: Storage, count: int = 1
) -> OpCost:
    """A projection and the join after it."""
    vector, reads, writes = _join_forward(rows, width, kind, dropout, store)
    return OpCost(
        name=name,
        phase="forward",
        flops=2 * rows * inputs * width,
        vector_flops=vector,
        read_bytes=reads + rows * inputs * store.activation + width * inputs * store.weight,
        written_bytes=writes,
        count=count,
    )


def project_backward(
    name: str, rows: int, outputs: int, width: int, *, kind: NormKind, dropout: bool, store: Storage, count: int = 1
) -> OpCost:
    """The input gradient of a projection and the gradient of the join before it."""
    vector, reads, writes = _join_backward(rows, width, kind, dropout, store)
    return OpCost(
        name=name,
        phase="backward",
        flops=2 * rows * outputs * width,
        vector_flops=vector,
        read_bytes=reads + rows * outputs * store.activation + width * outputs * store.weight,
        written_bytes=writes,
        count=count,
    )
