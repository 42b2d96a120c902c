"""What `products` asks of the Hopper kernels, with the kernels' descriptions in plain torch in their place."""

import pytest
import torch
from torch import Tensor

from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import doubles, gemm, products, stationary
from ridgeline.ops.linear.reference import GeluKind, Masks, masked

N, M = 128, 48
FORMS = {"exact": "none", "tanh": "tanh"}


def described(
    a_MK: Tensor,
    b: Tensor,
    out_MN: Tensor,
    *,
    transposed_b: bool = False,
    bias_N: Tensor | None = None,
    gelu: GeluKind | None = None,
    slope_MN: Tensor | None = None,
    residual_MN: Tensor | None = None,
    masks: Masks | None = None,
    factor_MN: Tensor | None = None,
    norm: None = None,  # test_folded.py has those
    folded: None = None,
    terms: gemm.RowTerms | None = None,
    summed: bool = True,
) -> Tensor | None:
    """As the docstrings of `gemm` and `stationary` have it."""
    acc = a_MK.double() @ (b if transposed_b else b.t()).double()
    if factor_MN is not None:
        out_MN.copy_(acc * factor_MN.double())
        return out_MN.float().sum(0, keepdim=True) if summed else None
    if terms is not None:
        shift_M, slope_M = terms.terms_2M.double()
        acc = terms.factor_1.double() * acc + shift_M[:, None] + slope_M[:, None] * terms.c_MN.double()
    acc = acc if bias_N is None else acc + bias_N.double()
    if gelu is not None:
        u = acc.requires_grad_()
        value = torch.nn.functional.gelu(u, approximate=FORMS[gelu])
        acc = value.detach()
        if slope_MN is not None:
            slope_MN.copy_(torch.autograd.grad(value.sum(), u)[0])
    if residual_MN is not None:
        acc = residual_MN.double() + (acc if masks is None else masked(acc, masks))
    out_MN.copy_(acc)
    return None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were asked, by name."""
    names: list[str] = []

    def small(a_MK: Tensor, b: Tensor, out_MN: Tensor, **rest: object) -> Tensor | None:
        names.append("stationary")
        return described(a_MK, b, out_MN, **rest)  # type: ignore[arg-type]

    def any_size(a_MK: Tensor, b: Tensor, out_MN: Tensor, config: gemm.Config, **rest: object) -> Tensor | None:
        names.append("gemm")
        return described(a_MK, b, out_MN, **rest)  # type: ignore[arg-type]

    def exact(a_MK: Tensor, b: Tensor, out_MN: Tensor, **rest: object) -> None:
        names.append("doubles")
        described(a_MK, b, out_MN, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(doubles, "product", exact)
    monkeypatch.setattr(stationary, "stationary", small)
    monkeypatch.setattr(gemm, "gemm", any_size)
    return names


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # fp64 stands for 16 bits, which would round
@pytest.mark.parametrize("K", [64, 600, 800])
@pytest.mark.parametrize("epilogue", ["plain", "bias", "exact", "tanh", "residual", "dropout", "short dropout"])
def test_forward(K: int, epilogue: str, dtype: torch.dtype, asked: list[str]) -> None:
    x, weight, bias, residual = (draw(*s, seed=i, dtype=dtype) for i, s in enumerate(((N, K), (M, K), (M,), (N, M))))
    T = 32 if epilogue == "short dropout" else 64
    state = DropoutState(torch.tensor([3, 4]))
    out: dict[str, tuple[Tensor, Tensor]] = {}
    for impl in ("torch", "cuda"):
        result, slope = torch.full((2, N, M), float("nan"), dtype=dtype)
        gelu = epilogue in FORMS
        products.forward_raw(
            x, weight, result,
            bias_M=None if epilogue == "plain" else bias, gelu=epilogue if gelu else None,
            slope_NM=slope if gelu else None,
            residual_NM=residual if epilogue.endswith(("residual", "dropout")) else None,
            masks=Masks(0.25, state, 1, T) if epilogue.endswith("dropout") else None, impl=impl,
        )  # type: ignore[arg-type]  # fmt: skip
        out[impl] = (result, slope if gelu else result)
    torch.testing.assert_close(out["cuda"], out["torch"], rtol=1e-4, atol=1e-4)
    large = K > stationary.LARGEST_K
    cublas = large and epilogue in ("plain", "bias")
    if dtype == torch.float32:
        assert asked == ["doubles"]
    else:
        assert asked == ([] if cublas else ["gemm" if large or T < 64 else "stationary"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inner", [64, 600, 800])
@pytest.mark.parametrize("through_gelu", [False, True])
def test_input_gradient(inner: int, through_gelu: bool, dtype: torch.dtype, asked: list[str]) -> None:
    dy, weight, slope = (draw(*s, seed=i, dtype=dtype) for i, s in enumerate(((N, inner), (inner, M), (N, M))))
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for impl in ("torch", "cuda"):
        dx = torch.full((N, M), float("nan"), dtype=dtype)
        sums = products.input_gradient_raw(dy, weight, dx, impl=impl, slope_NK=slope if through_gelu else None)
        assert (sums is not None) == through_gelu
        found[impl] = (dx, dx if sums is None else sums.sum(0))
        assert products.input_gradient_raw(dy, weight, dx, impl="torch", slope_NK=slope, sums=False) is None
    torch.testing.assert_close(found["cuda"], found["torch"], rtol=1e-4, atol=1e-4)
    if dtype == torch.float32:
        assert asked == ["doubles"]
        return
    large = inner > stationary.LARGEST_K
    assert asked == ([] if large and not through_gelu else ["gemm" if large else "stationary"])


def test_an_input_gradient_with_terms_of_its_rows_is_the_hopper_gemms(asked: list[str]) -> None:
    shapes = ((N, 24), (24, M), (N, M), (2, N))
    dy, weight, x, terms = (draw(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes))
    dx = torch.full((N, M), float("nan"))
    rows = gemm.RowTerms(x, terms, torch.tensor([0.5]))
    products.input_gradient_raw(dy, weight, dx, terms=rows, impl="cuda")
    torch.testing.assert_close(dx, 0.5 * dy @ weight + terms[0, :, None] + terms[1, :, None] * x)
    assert asked == ["gemm"]
