"""How far a kernel may be from the truth: measured against PyTorch in the same storage, not against a tolerance.

The truth is the op's reference in fp64. A kernel passes when its relative L2 error is at most 1.5 times that of
PyTorch's own ops with the same storage dtypes, and its largest error at most 2 times (3 for gradients) theirs. A few
units of fp32 rounding are added, so that PyTorch being exact by luck fails nobody.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32 = torch.finfo(torch.float32).eps


def relative(got: Tensor, truth: Tensor) -> float:
    """‖got − truth‖ / ‖truth‖; NaN where anything is."""
    return float((got.double() - truth).norm() / truth.norm().clamp(min=1e-300))


def check(name: str, got: Tensor, yardstick: Tensor, truth: Tensor, *, gradient: bool = False) -> None:
    """Assert that `got` is within the budget that `yardstick` sets."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    luck = 2 * FP32 if truth.numel() > 1 else max(2 * FP32, torch.finfo(yardstick.dtype).eps / 4)
    error, allowed = relative(got, truth), 1.5 * relative(yardstick, truth) + luck
    assert error <= allowed, f"{name}: relative error {error:.3g}, PyTorch's budget {allowed:.3g}"
    largest = float((got.double() - truth).abs().max())
    times = 3 if gradient else 2
    allowed = times * float((yardstick.double() - truth).abs().max()) + 2 * luck * float(truth.abs().max())
    assert largest <= allowed, f"{name}: largest error {largest:.3g}, PyTorch's budget {allowed:.3g}"


def evaluate(
    op: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor | None], seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of `op` on leaves made from `inputs`, and the gradients of a random weighting of the outputs.

    The weighting is drawn in the first output's storage dtype from `seed`, so that it is the same number in fp64.
    """
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = op(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out) for out in outputs]
    wanted = [x for x in leaves if x is not None]
    return [out.detach() for out in outputs], list(torch.autograd.grad(outputs, wanted, weights))


def compare(
    op: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: dict[str, Tensor | None],
    impl: str,
    yardstick: str = "torch",
) -> None:
    """Hold `op(*inputs, impl=impl)`, outputs and gradients, against the reference in fp64 and PyTorch's error."""
    tensors = list(inputs.values())
    wide = [None if x is None else x.double() for x in tensors]
    truth = evaluate(lambda *x: op(*x, impl="reference"), wide)
    budget = evaluate(lambda *x: op(*x, impl="torch"), tensors)
    got = evaluate(lambda *x: op(*x, impl=impl), tensors)
    again = evaluate(lambda *x: op(*x, impl=impl), tensors)
    names = [f"output {index}" for index in range(len(truth[0]))], [f"d{n}" for n, x in inputs.items() if x is not None]
    for kind in range(2):
        for name, *values, repeated in zip(names[kind], got[kind], budget[kind], truth[kind], again[kind], strict=True):
            check(name, *values, gradient=kind == 1)
            assert torch.equal(values[0], repeated), f"{name} differs between two runs"
