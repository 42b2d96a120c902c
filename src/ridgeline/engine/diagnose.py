"""Which tensor went bad first: a step run again, call by call, with every module watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.engine.feed import Feed
from ridgeline.engine.passes import Passes
from ridgeline.models.plan import fused_plan


def _watch(found: list[str], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
                found.append(f"output of {name or type(module).__name__}")

    return hook


def first_bad(model: nn.Module, passes: Passes, feed: Feed) -> str:
    """The first output of a module, in the order of the forward pass, or else gradient, that is not finite.

    Args:
        model: what `passes` runs.
        passes: forward and backward, uncompiled; waits for the device, so not to be captured.
        feed: holds the batch.
    """
    found: list[str] = []
    fused = {module: module.impl for module in model.modules() if fused_plan(getattr(module, "impl", None))}
    for module in fused:  # whose blocks are no calls of modules; the reference computes the same function by such
        module.impl = "reference"  # type: ignore[assignment]
    handles = [module.register_forward_hook(_watch(found, name)) for name, module in model.named_modules()]
    try:
        for part in range(passes.cut.accumulate):
            for lane in range(passes.cut.lanes):
                target = passes.forward(feed, part, lane)
                if found:
                    return found[0]
                if not bool(torch.isfinite(target)):
                    return "the loss"
                passes.backward(target, part, lane)
                for name, view in passes.flat.views(passes.flat.lanes[lane].buffer).items():
                    if not bool(torch.isfinite(view).all()):
                        return f"gradient of {name}"
    finally:
        for handle in handles:
            handle.remove()
        for module, impl in fused.items():
            module.impl = impl
    return "none; the batch of the bad steps was another one"
