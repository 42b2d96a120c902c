"""The precisions a step can run in: what the weights are copied to and what the products round to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.errors import UnsupportedError, nearest


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a step computes. Master weights, gradients and optimiser state are fp32 in every one.

    Attributes:
        name: how it is asked for.
        compute: dtype of the weights that the model sees; fp32 means the masters themselves.
        autocast: dtype of PyTorch's autocast around the forward pass, or None.
        scaled: whether the loss is scaled against fp16's narrow range.
        tf32: whether fp32 products may round their inputs to TF32.
    """

    name: str
    compute: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    tf32: bool = False

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """Sets PyTorch's fp32 product precision for the duration, and puts the user's choice back."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def forward(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context of the forward pass: a precision's own autocast or none, whatever stands around it."""
        if self.autocast is None:
            return without_autocast(device)
        return torch.autocast(device.type, dtype=self.autocast)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No autocast, also inside somebody else's."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="fp32"),
        Precision(name="tf32", tf32=True),
        Precision(name="bf16", compute=torch.bfloat16),
        Precision(name="fp16", compute=torch.float16, scaled=True),
        Precision(name="bf16-autocast", autocast=torch.bfloat16),
        Precision(name="fp16-autocast", autocast=torch.float16, scaled=True),
    )
}


def find_precision(name: str) -> Precision:
    """The precision called `name`.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name not in PRECISIONS:
        raise UnsupportedError(nearest(name, PRECISIONS, "precision"))
    return PRECISIONS[name]
