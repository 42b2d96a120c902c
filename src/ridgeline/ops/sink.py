"""Where the gradient of a weight is wanted: a way past autograd for ops that write it themselves.

A step that owns its gradients hangs a GradientSink on each weight it hands to the model. An op that computes a
weight's gradient with a kernel asks `sink_of(weight)` in its backward pass. Where there is one, it writes or adds the
gradient there in fp32 and returns None to autograd: no tensor of the weight's size is made, rounded to the weight's
dtype and copied. Where there is none, it returns the gradient as usual.
"""

from __future__ import annotations

from torch import Tensor

ATTRIBUTE = "gradient_sink"


class GradientSink:
    """The place of one weight's gradient during one pass.

    Args:
        target: fp32 tensor of the weight's shape; a view of a flat buffer.

    Attributes:
        add: the gradient of an earlier part of the batch is there already.
        written: something has been written in this pass.
    """

    def __init__(self, target: Tensor) -> None:
        self.target, self.add, self.written = target, False, False

    def begin(self, *, add: bool) -> None:
        """Starts a pass; `add` says whether it adds to what is there."""
        self.add, self.written = add, False

    def take(self) -> tuple[Tensor, bool]:
        """The target and whether to add to it; a weight that is used twice adds the second time."""
        add, self.written = self.add or self.written, True
        return self.target, add

    def put(self, gradient: Tensor) -> None:
        """Writes or adds a gradient that exists as a tensor, of any dtype."""
        target, add = self.take()
        target.add_(gradient) if add else target.copy_(gradient)


def sink_of(weight: Tensor) -> GradientSink | None:
    """The sink that hangs on a weight, or None."""
    return getattr(weight, ATTRIBUTE, None)
