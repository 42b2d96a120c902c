"""What the cases of compute-sanitizer share: the device, the register of cases, data made on the host."""

import os

import torch
from ridgeline.ops._triton import interpreter

interpreter.enable()  # does nothing on a card; before any kernel is imported

from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import Masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOOL = os.environ.get("SANITIZER_TOOL", "memcheck")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def draw(*shape, dtype=None, scale=1.0, shift=0.0):
    """Made on the host, so that no kernel but those under test has to be instrumented."""
    return (torch.randn(shape) * scale + shift).to(dtype or torch.bfloat16).to(DEVICE).requires_grad_()


def differentiate(outputs, leaves):
    """A forward pass has run; its backward pass, of random gradients."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    leaves = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(outputs, leaves, [draw(*out.shape, dtype=out.dtype).detach() for out in outputs])
    for x in (*outputs, *grads):
        assert torch.isfinite(x.detach().cpu()).all(), "not finite"


def masks(T, p=0.2):
    return Masks(p, dropout_state(), 4, T)


def dropout_state():
    return DropoutState(torch.tensor([2**40 + 17, 5]).to(DEVICE), 3)


def impl(name):
    return name if DEVICE == "cuda" or not name.startswith("cuda") else "reference"
