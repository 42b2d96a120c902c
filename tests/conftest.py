"""One torch thread a worker; Triton kernels run in the interpreter where there is no CUDA card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.ops._triton import interpreter

torch.set_num_threads(1)
interpreter.enable()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh floating-point memory is full of NaN, so that an element nobody writes shows."""

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
