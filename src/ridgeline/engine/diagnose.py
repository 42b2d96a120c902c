"""Which tensor went bad first: a step run again, call by call, with every module watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.engine.feed import Feed
from ridgeline.engine.passes import Passes
from ridgeline.models.plan import fused_plan

NOTHING = "none in this process' last batch"


def _watch(found: list[str], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
                found.append(f"output of {name or type(module).__name__}")

    return hook


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """For the duration every module's output is looked at; the list names those that are not finite, in their order."""
    found: list[str] = []
    fused = {module: module.impl for module in model.modules() if fused_plan(getattr(module, "impl", None))}
    for module in fused:  # whose blocks are no calls of modules; the reference computes the same function by such
        module.impl = "reference"  # type: ignore[assignment]
    handles = [module.register_forward_hook(_watch(found, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for module, impl in fused.items():
            module.impl = impl


def bad_gradient(gradients: Mapping[str, Tensor]) -> str | None:
    """The first gradient that is not finite, or their norm; None where all is well."""
    for name, gradient in gradients.items():
        if not bool(torch.isfinite(gradient).all()):
            return f"gradient of {name}"
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients.values()]
    if norms and not bool(torch.isfinite(torch.linalg.vector_norm(torch.stack(norms)))):
        return "the norm of the gradients, whose squares are more than fp32 holds"
    return None


def first_bad(model: nn.Module, passes: Passes, feed: Feed) -> str:
    """The first output of a module, in the order of the forward pass, or else gradient, that is not finite.

    Args:
        model: what `passes` runs.
        passes: forward and backward, uncompiled; waits for the device, so not to be captured.
        feed: holds the batch.
    """
    with watched(model) as found:
        for part in range(passes.cut.accumulate):
            for lane in range(passes.cut.lanes):
                target = passes.forward(feed, part, lane)
                if found:
                    return found[0]
                if not bool(torch.isfinite(target)):
                    return "the loss"
                passes.backward(target, part, lane)
                bad = bad_gradient(passes.flat.views(passes.flat.lanes[lane].buffer))
                if bad is not None:
                    return bad
    return NOTHING
