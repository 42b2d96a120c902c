"""The linear layer: every implementation against fp64, PyTorch's own error in the same storage as the yardstick."""

import itertools

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import Masks, linear
from ridgeline.ops.linear.products import forward_raw, input_gradient_raw, slope_empty, weight_gradient_raw

EPILOGUES = ["plain", "bias", "exact", "tanh", "residual", "dropout"]
Inputs = dict[str, Tensor | None]


def make(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, epilogue: str) -> Inputs:
    B, T, K, M = shape
    normal = lambda *s, scale=1.0: (torch.randn(*s) * scale).to(device, dtype)  # noqa: E731
    return {
        "x": normal(B, T, K),
        "weight_MK": normal(M, K, scale=K**-0.5),
        "bias_M": None if epilogue == "plain" else normal(M),
        "residual": normal(B, T, M) if epilogue in ("residual", "dropout") else None,
    }


def run(inputs: Inputs, epilogue: str, dtype: torch.dtype, dout: Tensor, impl: str) -> dict[str, Tensor]:
    """The output and every gradient, computed in `dtype`."""
    tensors = {k: None if v is None else v.detach().to(dtype).requires_grad_() for k, v in inputs.items()}
    x = tensors["x"]
    masks = None
    if epilogue == "dropout":
        state = DropoutState(torch.tensor([12345678901, 9], device=x.device), 3)
        masks = Masks(0.2, state, 5, x.shape[1])
    out = linear(**tensors, gelu=epilogue if epilogue in ("exact", "tanh") else None, masks=masks, impl=impl)
    out.backward(dout.to(dtype))
    return {"out": out.detach()} | {f"d{k}": v.grad for k, v in tensors.items() if v is not None}


def relative(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "M"), [(48, 40), (33, 36)])
def test_torch_matches_fp64_as_well_as_pytorch_does(epilogue: str, dtype: torch.dtype, K: int, M: int) -> None:
    torch.manual_seed(0)
    inputs, dout = make((3, 20, K, M), dtype, "cpu", epilogue), torch.randn(3, 20, M).to(dtype)
    truth = run(inputs, epilogue, torch.float64, dout, "reference")
    plain = run(inputs, epilogue, dtype, dout, "reference")
    for name, got in run(inputs, epilogue, dtype, dout, "torch").items():
        assert got.dtype == dtype
        assert relative(got, truth[name]) <= 1.5 * relative(plain[name], truth[name]) + 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    "shape", [(3, 100, 256, 512), (2, 333, 512, 1536), (1, 41, 521, 260), (2, 30, 37, 558), (16, 256, 512, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hopper_kernels_match_fp64_as_well_as_pytorch_does(
    epilogue: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    B, T, K, M = shape
    if epilogue == "dropout" and M % 4:
        pytest.skip("masks come four columns at a time")
    if dtype == torch.float32 and (K % 4 or M % 4):
        pytest.skip("fp32 takes multiples of four columns")
    inputs, dout = make(shape, dtype, "cuda", epilogue), torch.randn(B, T, M, device="cuda").to(dtype)
    truth = run(inputs, epilogue, torch.float64, dout, "reference")
    plain = run(inputs, epilogue, dtype, dout, "reference")
    torch.full((64 * 2**20,), float("nan"), device="cuda")  # what is allocated next holds NaN
    first = run(inputs, epilogue, dtype, dout, "cuda")
    for name, got in first.items():
        assert relative(got, truth[name]) <= 1.5 * relative(plain[name], truth[name]) + 1e-6, name
    for name, again in run(inputs, epilogue, dtype, dout, "cuda").items():
        assert torch.equal(first[name], again), name


@pytest.mark.parametrize("impl", ["torch", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("M", [256, 576])
def test_input_gradient_through_gelu_and_its_column_sums(impl: str, M: int) -> None:
    torch.manual_seed(1)
    device = "cuda" if impl == "cuda" else "cpu"
    N, K = 300, 520
    dy_NM, weight_MK = (torch.randn(*s, device=device).bfloat16() for s in ((N, M), (M, K)))
    slope_NK = slope_empty(dy_NM, N, K).uniform_(-0.2, 1.2)
    truth = dy_NM.double() @ weight_MK.double() * slope_NK.double()
    dx_NK = torch.full((N, K), float("nan"), device=device).bfloat16()
    sums = input_gradient_raw(dy_NM, weight_MK, dx_NK, slope_NK=slope_NK, impl=impl)
    assert relative(dx_NK, truth) < 4e-3
    assert relative(sums.sum(0), truth.sum(0)) < 4e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_is_fp32_and_can_accumulate(device: str, accumulate: bool) -> None:
    torch.manual_seed(2)
    dy_NM, x_NK = torch.randn(1000, 40, device=device).bfloat16(), torch.randn(1000, 24, device=device).bfloat16()
    before = torch.randn(40, 24, device=device)
    got = before.clone() if accumulate else torch.full_like(before, float("nan"))
    weight_gradient_raw(dy_NM, x_NK, got, accumulate=accumulate)
    truth = dy_NM.double().t() @ x_NK.double() + (before.double() if accumulate else 0)
    assert relative(got, truth) < 1e-5


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_forward_raw_writes_the_derivative_of_gelu(gelu: str) -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(10, 16), torch.randn(24, 16), torch.randn(24)
    out, slope = torch.empty(10, 24), torch.empty(10, 24)
    forward_raw(x, weight, out, bias_M=bias, gelu=gelu, slope_NM=slope)
    u = (x @ weight.t() + bias).requires_grad_()
    value = torch.nn.functional.gelu(u, approximate="none" if gelu == "exact" else "tanh")
    torch.testing.assert_close(out, value)
    torch.testing.assert_close(slope, torch.autograd.grad(value.sum(), u)[0])


def test_derivatives_of_gelu_are_kept_in_half_precision_beside_16_bits() -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ):
        slope = slope_empty(torch.empty(1, dtype=dtype), 3, 5)
        assert (slope.shape, slope.dtype, slope.stride(0) * slope.element_size() % 16) == ((3, 5), kept, 0)


def test_bad_input_is_refused_in_words() -> None:
    x, weight = torch.randn(2, 6, 16), torch.randn(24, 16)
    masks = Masks(0.2, DropoutState(torch.tensor([1, 2])), 0, 5)
    cases = [
        ({"weight_MK": torch.randn(24, 8)}, r"x must have shape \(2, 6, 8\), got \(2, 6, 16\)"),
        ({"weight_MK": torch.randn(24)}, "weight_MK must have 2 axes"),
        ({"x": torch.tensor(1.0)}, "x must have at least one axis"),
        ({"x": torch.ones(6, 16, dtype=torch.int32)}, "x must be float32, bfloat16 or float16, got torch.int32"),
        ({"bias_M": torch.randn(16)}, r"bias_M must have shape \(24,\)"),
        ({"residual": torch.randn(2, 6, 16)}, "residual must have shape"),
        ({"bias_M": torch.randn(24).double()}, "bias_M must be torch.float32 like x"),
        ({"weight_MK": weight.to("meta")}, "weight_MK must be on cpu"),
        ({"gelu": "relu"}, "unknown gelu"),
        ({"gelu": "exact", "residual": torch.randn(2, 6, 24)}, "gelu does not go with"),
        ({"masks": masks}, "need a residual"),
        ({"masks": masks, "residual": torch.randn(2, 6, 24)}, r"shape \(B, 5, K\)"),
        ({"impl": "cudo"}, "did you mean cuda"),
    ]
    if not torch.cuda.is_available():
        cases.append(({"impl": "cuda"}, "needs a CUDA device"))
    for (extra, words), impl in itertools.product(cases, ("reference", "torch")):
        with pytest.raises(UnsupportedError, match=words):
            linear(**({"x": x, "weight_MK": weight, "impl": impl} | extra))
