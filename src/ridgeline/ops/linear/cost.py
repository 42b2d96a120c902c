"""Cost of y = x Wᵀ + b with x (N, K), W (M, K), and of what can ride in its epilogue.

    product                 FLOPs   reads             writes
    forward                 2NKM    x, W, b           y
    input gradient          2NKM    dy, W             dx
    weight gradient         2NKM    dy, x             dW, db (fp32)

An epilogue reads or writes further (N, M) tensors: the residual it adds, GELU's derivative beside the activation.
"""

from __future__ import annotations

from ridgeline.cost import INSTRUCTION, OpCost, Storage


def linear_forward(
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    store: Storage,
    reads: int = 0,
    writes: int = 1,
    kept: int = 0,
    element_flops: int = 0,
    count: int = 1,
) -> OpCost:
    """The product with its epilogue.

    Args:
        name: row of the table.
        rows, inputs, outputs: N, K and M.
        bias: whether there is one.
        store: sizes of numbers.
        reads: (N, M) tensors that the epilogue reads, such as the residual.
        writes: (N, M) tensors written: the result, and GELU's input or derivative where that is kept like one.
        kept: bytes of each of N × M results that are written besides.
        element_flops: vector FLOPs that the epilogue does for each of the N × M results.
        count: how often a step runs it.
    """
    return OpCost(
        name=name,
        phase="forward",
        flops=2 * rows * inputs * outputs,
        vector_flops=rows * outputs * (element_flops + bias * INSTRUCTION),
        read_bytes=rows * (inputs + reads * outputs) * store.activation + outputs * (inputs + bias) * store.weight,
        written_bytes=rows * outputs * (writes * store.activation + kept),
        count=count,
    )


def linear_input_gradient(
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    store: Storage,
    reads: int = 0,
    kept: int = 0,
    element_flops: int = 0,
    count: int = 1,
) -> OpCost:
    """dx = dy W; the epilogue may read (N, K) tensors, such as GELU's derivative or the input that has it.

    With `kept` so many bytes of each of N × K results more.
    """
    return OpCost(
        name=f"{name}.input_gradient",
        phase="backward",
        flops=2 * rows * inputs * outputs,
        vector_flops=rows * inputs * element_flops,
        read_bytes=rows * (outputs + reads * inputs) * store.activation
        + rows * inputs * kept
        + outputs * inputs * store.weight,
        written_bytes=rows * inputs * store.activation,
        count=count,
    )


def linear_weight_gradient(
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    store: Storage,
    count: int = 1,
) -> OpCost:
    """dW = dyᵀ x and db = Σ dy."""
    return OpCost(
        name=f"{name}.weight_gradient",
        phase="backward",
        flops=2 * rows * inputs * outputs,
        vector_flops=rows * outputs * bias * INSTRUCTION,
        read_bytes=rows * (outputs + inputs) * store.activation,
        written_bytes=outputs * (inputs + bias) * store.gradient,
        count=count,
    )


def add_pass(name: str, rows: int, width: int, *, store: Storage, count: int = 1) -> tuple[OpCost, OpCost]:
    """A residual addition as a pass of its own: forward a sum, backward the sum of two gradients."""
    size = rows * width * store.activation
    forward = OpCost(
        name=name,
        phase="forward",
        vector_flops=rows * width * INSTRUCTION,
        read_bytes=2 * size,
        written_bytes=size,
        count=count,
    )
    backward = OpCost(
        name=name,
        phase="backward",
        vector_flops=rows * width * INSTRUCTION,
        read_bytes=2 * size,
        written_bytes=size,
        count=count,
    )
    return forward, backward
