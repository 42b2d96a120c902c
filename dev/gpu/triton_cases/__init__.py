"""What the cases of triton_gpu.py share, a module an op."""

import os

DEV = "cpu" if os.environ.get("DRY") else "cuda"


def rel(a, b):
    return float((a.double().flatten() - b.double().flatten()).norm() / b.double().norm())


def rand(*shape):
    import torch

    return torch.randn(*shape, device=DEV, dtype=torch.bfloat16)


def state():
    import torch

    from ridgeline.ops.dropout import DropoutState

    return DropoutState(torch.tensor([12345678901, 17], device=DEV), 3)
