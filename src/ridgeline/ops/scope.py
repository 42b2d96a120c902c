"""What a kernel works for, said where it is launched, so that a profile can tell kernels apart that look alike."""

from __future__ import annotations

import contextlib

import torch

PREFIX = "ridgeline::"
PRODUCT = "product:"
_NOTHING = contextlib.nullcontext()


def scope(name: str) -> contextlib.AbstractContextManager[object]:
    """Names the kernels launched inside it by the op of the accounting that they work for.

    Costs nothing worth mention unless a profiler runs, and leaves no trace in a captured graph.

    Args:
        name: qkv, attention, relative_table, out, mlp_up, mlp_down, gelu, norm, dropout, residual, bias gradients,
            embedding, input, head, cross_entropy, copies and fills; a product's gradients with `.input_gradient` or
            `.weight_gradient` behind it.
    """
    return torch.profiler.record_function(PREFIX + name) if torch.autograd._profiler_enabled() else _NOTHING


def product_scope(kind: str, rows: int, inputs: int, outputs: int) -> contextlib.AbstractContextManager[object]:
    """Names a kernel of ops/linear by its shape, as a product launched through PyTorch is told by its own.

    Args:
        kind: forward or input_gradient.
        rows: of x and y.
        inputs, outputs: of the linear layer.
    """
    return scope(f"{PRODUCT}{kind}:{rows}:{inputs}:{outputs}") if torch.autograd._profiler_enabled() else _NOTHING
