"""A guard for backward passes that keep what they need outside autograd's care.

Autograd watches what `save_for_backward` has: it survives until the graph is let go, and a change in place is an error.
A pass that frees or overwrites its own tensors as it goes, and reads weights as they are when it comes to them, has
neither, and would give wrong gradients where PyTorch's operations raise.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.errors import UnsupportedError


class Kept:
    """Made in a forward pass, asked at the beginning of its backward pass.

    Args:
        read: tensors that the backward pass reads, and has to find as the forward pass did.
        spends: the backward pass uses up what was kept for it.
    """

    def __init__(self, *read: Tensor | None, spends: bool) -> None:
        watched = [tensor for tensor in read if tensor is not None and not tensor.is_inference()]
        self._seen = [(tensor, tensor._version) for tensor in watched]
        self._spends, self._spent = spends, False

    def demand(self) -> None:
        """That the backward pass can run.

        Raises:
            UnsupportedError: it has run and spent what was kept, or what it reads has been changed in place.
        """
        if self._spent:
            raise UnsupportedError("fused operations can be differentiated once a forward pass; run that again")
        if any(tensor._version != version for tensor, version in self._seen):
            raise UnsupportedError("a weight or input was changed in place between a forward and its backward pass")
        self._spent = self._spends
