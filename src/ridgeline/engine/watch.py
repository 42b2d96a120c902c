"""What the first pass of a batch shape is watched for: gradients that would go past the step, and state that it loses.

A step sees gradients where they reach the weights that it lends to the model, and a captured one repeats kernels alone.
What a model does besides is found here, before anything is learned, and told with its cure.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.engine.flat import FlatParameters, lies_in_a_step, version
from ridgeline.engine.precision import Precision
from ridgeline.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

Buffers = list[tuple[nn.Module, str, Tensor | None]]


def _graph(loss: Tensor) -> Iterator[Any]:
    """The nodes of a loss's autograd graph, each once."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(source for source, _ in node.next_functions)
            yield node


class _Before:
    """What a tensor was before a pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor.detach().clone()
        self._version = version(tensor)

    def differs(self, tensor: Tensor) -> bool:
        """Whether the tensor was written to: openly, or by way of its `data`, to other numbers than NaN for NaN."""
        kept = self.values
        same = (tensor == kept) | ((tensor != tensor) & (kept != kept))
        return version(tensor) != self._version or not bool(same.all())


class Watch:
    """Around the forward pass of one lane.

    Args:
        flat: whose weights are lent to the model.
        model: all of it.
        precision: of the pass.
        captured: what the pass does is recorded and repeated.
        lane: the pass's.
    """

    def __init__(self, flat: FlatParameters, model: nn.Module, precision: Precision, captured: bool, lane: int) -> None:
        self.flat, self.lane, self.precision = flat, lane, precision
        self._held = [(name, tensor, _Before(tensor)) for name, tensor in flat.held(lane)]
        self._buffers: Buffers = []
        self._beside: list[tuple[Tensor, _Before]] = []  # what a pass that is refused has written with good right
        if captured or self._held:
            self._buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
            self._beside = [(buffer, _Before(buffer)) for buffer in model.buffers()]

    def over(self, loss: Tensor) -> None:
        """The pass is over.

        Raises:
            ConfigError: gradients go past the leaves.
            UnsupportedError: it has written to, or replaced, what a step keeps elsewhere.
        """
        self._gradients(loss)
        try:
            self._replaced()
            self._written()
        except UnsupportedError:
            self._undo()
            raise

    def _gradients(self, loss: Tensor) -> None:
        leaves = self.flat.lanes[self.lane].leaves
        lent = {id(leaf) for leaf in leaves}
        for node in _graph(loss):
            tensor = getattr(node, "variable", None)
            name = self.flat.name_at_rest(tensor)
            if name is not None:
                raise ConfigError(
                    f"the loss reads parameter {name} from a list, closure or the like, where a step cannot put its "
                    "own; read it from its module whenever it is used"
                )
            if isinstance(tensor, nn.Parameter) and id(tensor) not in lent and not lies_in_a_step(tensor):
                log.warning(
                    "the loss reads a parameter of shape %s that the model does not hold: this step does not train it; "
                    "make its module part of the model",
                    tuple(tensor.shape),
                )
            if type(node).__name__ == "CheckpointFunctionBackward":
                raise ConfigError("a step would lose gradients of a checkpoint with use_reentrant=True; pass False")
        if any(leaf.grad is not None for leaf in leaves):
            raise ConfigError("the loss runs a backward pass of its own; return the sum of all that is to be minimised")

    def _replaced(self) -> None:
        found = [(m, name, kept) for m, name, kept in self._buffers if m._buffers.get(name) is not kept]
        if found:
            names = ", ".join(f"{type(module).__name__}.{name}" for module, name, _ in found)
            raise UnsupportedError(
                f"the forward pass puts another tensor in the place of buffer {names}, which a step would lose; write "
                "to it in place (copy_, add_, mul_)"
            )

    def _written(self) -> None:
        written = ", ".join(name for name, tensor, kept in self._held if kept.differs(tensor))
        if written and self.precision.compute == torch.float32:
            raise UnsupportedError(
                f"the forward pass writes to {written}, which the lanes would do at the same time; use lanes=1"
            )
        if written:
            raise UnsupportedError(
                f"the forward pass writes to {written}, which {self.precision.name} replaces by copies; use "
                f"precision='{self.precision.name}-autocast'"
            )

    @torch.no_grad()
    def _undo(self) -> None:
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for tensor, kept in (*self._beside, *((tensor, kept) for _, tensor, kept in self._held)):
            tensor.copy_(kept.values)


def _numbers(model: nn.Module) -> dict[tuple[str, str], int | float]:
    """Plain numbers that modules hold, by module and attribute."""
    return {
        (type(module).__name__ if name == "" else name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (int, float)
    }


def _chances(device: torch.device) -> list[Any]:
    """The states of the host's random numbers; PyTorch's own where the model has others."""
    kind, keys, *rest = np.random.get_state()
    own = [torch.get_rng_state().tolist()] if device.type != "cpu" else []
    return [random.getstate(), (kind, np.asarray(keys).tolist(), rest), *own]


@contextlib.contextmanager
def steady(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Around the recording of a step: what its code changes on the host would be frozen as it was then.

    Raises:
        UnsupportedError: it has drawn random numbers there, or changed a number that a module holds.
    """
    numbers, chances = _numbers(model), _chances(device)
    yield
    if _chances(device) != chances:
        raise UnsupportedError(
            "the model or loss draws random numbers on the host, which a captured step would repeat for ever; draw "
            "them on the model's device, or pass capture=False"
        )
    now = _numbers(model)
    changed = [".".join(place) for place in now if place in numbers and now[place] != numbers[place]]
    if changed:
        raise UnsupportedError(
            f"{changed[0]} changes with every call on the host, where a captured step keeps its value for ever; hold "
            "it in a buffer and write to that in place, or pass capture=False"
        )
