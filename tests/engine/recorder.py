"""A CUDA graph for the CPU: records a program's operations and replays them on the same memory.

What a CUDA graph freezes, this freezes: which operations run, every Python number among their arguments, and the
addresses they read and write. A counter, rate or seed that lives on the host therefore stands still in a replay, and
whatever asks for a tensor's value (`.item()`, `bool(tensor)`) cannot be recorded. Unlike a graph it runs the program
once while it records; TrainStep undoes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VALUES_ASKED = ("_local_scalar_dense", "item", "nonzero", "is_nonzero")


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket.__name__ in VALUES_ASKED:
            raise RuntimeError(f"{func} asks for a value while the operation is being captured (synchronizing)")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output


def _storages(values: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


class Recorder:
    """Takes the place of CudaCapture; `operations` holds the names of what was recorded last."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, program: Callable[[], None]) -> Callable[[], None]:
        with _Log() as log:
            program()
        self.operations = [str(func) for func, *_ in log.calls]

        @torch.no_grad()
        def replay() -> None:
            for func, args, kwargs, output in log.calls:
                result = func(*args, **kwargs)
                known = _storages((args, kwargs))
                for was, now in zip(tree_leaves(output), tree_leaves(result), strict=True):
                    if isinstance(was, Tensor) and was.untyped_storage()._cdata not in known:
                        was.copy_(now)  # a fresh result goes where it went when it was recorded

        return replay
