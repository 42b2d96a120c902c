"""Bias and GELU against fp64, within PyTorch's own error."""

import math

import pytest
import torch

from error_budget import DEVICE, DTYPES, compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops.activation import GeluKind, bias_gelu

pytest.importorskip("triton")


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["exact", "tanh"])
@pytest.mark.parametrize(("shape", "bias"), [((3, 7, 52), True), ((13, 600), True), ((9, 20), False)])
def test_bias_gelu(shape: tuple[int, ...], bias: bool, kind: GeluKind, dtype: torch.dtype) -> None:
    inputs = {
        "x": draw(*shape, dtype=dtype, seed=1),
        "bias": draw(shape[-1], dtype=dtype, seed=2) if bias else None,
    }
    compare(lambda x, b, impl: bias_gelu(x, b, kind=kind, impl=impl), inputs, "triton")


@pytest.mark.parametrize("kind", ["exact", "tanh"])
def test_far_out(kind: GeluKind) -> None:
    """Neither overflow nor NaN where the exponentials end; the tail keeps its relative precision."""
    x = torch.tensor([-3e4, -60.0, -8.0, -4.0, 0.0, 4.0, 60.0, 3e4], device=DEVICE, dtype=torch.float16)
    x = x.requires_grad_()
    out = bias_gelu(x, kind=kind, impl="triton")
    (slope,) = torch.autograd.grad(out.sum(), [x])
    assert out[[0, 1, 4]].tolist() == [0, 0, 0]
    assert torch.equal(out[5:], x[5:].detach())
    assert slope.tolist()[0] == 0
    assert slope.tolist()[-1] == 1
    if kind == "exact":
        assert out[3].item() == pytest.approx(-4 * 0.5 * math.erfc(4 / math.sqrt(2)), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"impl": "cuda"}, "unknown implementation 'cuda'"),
        ({"kind": "relu"}, "kind must be exact or tanh, got 'relu'"),
        ({"bias_F": torch.ones(3, device=DEVICE)}, r"bias_F must have shape \(8,\), got \(3,\)"),
        ({"x": torch.ones(8, 4, device=DEVICE).t()}, "x must be contiguous"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        bias_gelu(**({"x": torch.ones(4, 8, device=DEVICE), "impl": "triton"} | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["exact", "tanh"])
@pytest.mark.parametrize("shape", [(131072, 2048), (8192, 1024)])
def test_real_shapes(shape: tuple[int, int], kind: GeluKind) -> None:
    inputs = {
        "x": draw(*shape, dtype=torch.bfloat16, seed=1),
        "bias": draw(shape[-1], dtype=torch.bfloat16, seed=2),
    }
    compare(lambda x, b, impl: bias_gelu(x, b, kind=kind, impl=impl), inputs, "triton")
