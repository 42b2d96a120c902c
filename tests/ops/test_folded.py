"""A norm that no pass makes: the chain of products from a residual stream to its gradient, against fp64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from error_budget import DEVICE
from ridgeline.errors import UnsupportedError
from ridgeline.ops._triton.columns import column_sums_raw
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import gemm, products
from ridgeline.ops.linear.folded import SHARE, FoldedNorm, FoldedWeights
from ridgeline.ops.linear.folded_triton import folded_gradient_raw, folded_statistics_raw, folded_weights_raw
from ridgeline.ops.linear.reference import Masks, masked
from ridgeline.ops.norm.reference import NormKind, norm_reference
from ridgeline.ops.norm.triton import norm_backward_raw, partial_rows

EPS = 1e-5


class Chain(NamedTuple):
    """r = residual + x Wout; a = gelu(norm(r) Wup + b); z = a Wdown; the gradient of z."""

    x: Tensor
    out: Tensor
    residual: Tensor
    scale: Tensor
    shift: Tensor
    up: Tensor
    bias: Tensor
    down: Tensor
    dz: Tensor


def chain_of(N: int, C: int, F: int, device: str, dtype: torch.dtype) -> Chain:
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator) * scale).to(device, dtype)  # noqa: E731
    return Chain(
        draw(N, C), draw(C, C, scale=C**-0.5), draw(N, C) + 0.5, 1 + draw(C, scale=0.3), draw(C, scale=0.3),
        draw(F, C, scale=C**-0.5), draw(F, scale=0.3), draw(C, F, scale=F**-0.5), draw(N, C),
    )  # fmt: skip


def plainly(chain: Chain, kind: NormKind, dtype: torch.dtype) -> dict[str, Tensor]:
    """By autograd, in one precision; the residual stream is rounded as it is stored."""
    c = Chain(*(x.to(dtype) for x in chain))
    r = (c.residual + c.x @ c.out.t()).to(chain.x.dtype).to(dtype).requires_grad_()
    weights = [w.detach().requires_grad_() for w in (c.scale, c.shift, c.up, c.bias)]
    h = norm_reference(r, weights[0], weights[1], eps=EPS, kind=kind)
    a = torch.nn.functional.gelu(h @ weights[2].t() + weights[3])
    grads = torch.autograd.grad(a @ c.down.t(), [r, *weights], c.dz)
    return dict(zip(("a", "r", "scale", "shift", "up", "bias"), (a.detach(), *grads), strict=True))


def folded(chain: Chain, kind: NormKind, impl: str, add: float, coded: bool = False) -> dict[str, Tensor]:
    """By the raw products; gradients of weights are added to `add`."""
    c, (N, C), F = chain, chain.x.shape, len(chain.up)
    fresh = lambda *shape: torch.full(shape, float("nan"), device=c.x.device)  # noqa: E731
    norm = FoldedNorm(
        kind, EPS, c.scale, c.shift, fresh(C // SHARE, N, 2), fresh(N) if kind == "layernorm" else None, fresh(N)
    )
    r, a, du, dr = (fresh(N, width).to(c.x.dtype) for width in (C, F, F, C))
    slope, product = products.slope_empty(a, N, F, coded=coded), fresh(F, C)
    products.forward_raw(c.x, c.out, r, residual_NM=c.residual, norm=norm, impl=impl)
    products.forward_raw(r, c.up, a, bias_M=c.bias, gelu="exact", slope_NM=slope, norm=norm, impl=impl)
    sums = products.input_gradient_raw(c.dz, c.down, du, slope_NK=slope, norm=norm, impl=impl)
    assert sums is not None
    products.weight_gradient_raw(du, r, product, accumulate=False)
    up, bias, small = torch.full((F, C), add, device=r.device), torch.full((F,), add, device=r.device), fresh(2 * C)
    folded_gradient_raw(product, sums, norm, up, bias, add_weight=True, add_bias=True)
    partials = fresh(partial_rows(N, C, r), 2 * C)
    norm_backward_raw(
        du @ c.up, r, c.scale, norm.mean_M, norm.rstd_M, partials, kind=kind, bias=True, divided=True, dr_NC=dr
    )
    column_sums_raw(partials, small, accumulate=False)
    return {"a": a, "r": dr, "scale": small[:C], "shift": small[C:], "up": up - add, "bias": bias - add}


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_in_fp32_it_is_the_norm(kind: NormKind) -> None:
    chain = chain_of(150, 128, 200, DEVICE, torch.float32)
    right, got = plainly(chain, kind, torch.float64), folded(chain, kind, "torch", 0.25)
    assert {key: error(got[key], right[key]) < 3e-6 for key in right} == dict.fromkeys(right, True)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "coded"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", [(4133, 512, 2048), (700, 192, 264)])
def test_hopper_kernels_err_as_little_as_pytorch(
    shape: tuple[int, int, int], kind: NormKind, dtype: torch.dtype, coded: bool
) -> None:
    chain = chain_of(*shape, "cuda", dtype)
    right, plain = plainly(chain, kind, torch.float64), plainly(chain, kind, dtype)
    got, again = (folded(chain, kind, "cuda", 0.0, coded) for _ in range(2))
    ratios = {key: error(got[key], right[key]) / error(plain[key], right[key]) for key in right}
    assert max(ratios.values()) <= 1.5, ratios
    assert all(torch.equal(got[key], again[key]) for key in got)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_weights_and_statistics_are_those_of_the_norm(kind: NormKind) -> None:
    N, C, M, generator = 300, 128, 10, torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)  # noqa: E731
    r, weight, bias, scale, shift = draw(N, C) + 0.5, draw(M, C), draw(M), draw(C), draw(C)
    parts = r.unflatten(1, (-1, SHARE))
    shares = torch.stack([parts.sum(2), parts.square().sum(2)], 2).transpose(0, 1).contiguous()
    unknown = lambda: torch.full((N,), float("nan"), device=DEVICE)  # noqa: E731
    norm = FoldedNorm(kind, EPS, scale, shift, shares, unknown() if kind == "layernorm" else None, unknown())
    folded = FoldedWeights(torch.empty_like(weight), torch.empty_like(bias))
    folded_statistics_raw(norm)
    folded_weights_raw(weight, bias, norm, folded)
    h = norm_reference(r.double(), scale.double(), shift.double(), eps=EPS, kind=kind)
    got = r @ folded.scaled_MK.t() * norm.rstd_M[:, None] + folded.bias_M
    torch.testing.assert_close(got.double(), h @ weight.double().t() + bias.double(), rtol=1e-4, atol=1e-4)
    if norm.mean_M is not None:
        torch.testing.assert_close(norm.mean_M, r.mean(1))


def test_short_samples_under_dropout_leave_the_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streaming product takes them, which knows of no norm."""

    def streaming(a: Tensor, b: Tensor, out: Tensor, config: gemm.Config, **given: Tensor | Masks | None) -> None:
        masks, residual = given["masks"], given["residual_MN"]
        assert isinstance(masks, Masks)
        assert isinstance(residual, Tensor)
        out.copy_(masked(a @ b.t(), masks) + residual)

    monkeypatch.setattr(gemm, "gemm", streaming)
    N, C, generator = 96, 128, torch.Generator().manual_seed(6)
    x, weight, residual = (torch.randn(rows, C, generator=generator).bfloat16() for rows in (N, C, N))
    unknown = torch.full((N,), float("nan"))
    norm = FoldedNorm("rmsnorm", EPS, weight[0], None, torch.full((C // SHARE, N, 2), float("nan")), None, unknown)
    masks, r = Masks(0.2, DropoutState(torch.tensor([3, 4]), 0), 1, 32), torch.empty_like(x)
    products.forward_raw(x, weight, r, residual_NM=residual, masks=masks, norm=norm, impl="cuda")
    torch.testing.assert_close(norm.shares_SM2[..., 0].sum(0), r.float().sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(norm.shares_SM2[..., 1].sum(0), r.float().square().sum(1))


def test_products_of_floats_refuse_a_folded_norm():
    x = torch.ones(4, SHARE)
    norm = FoldedNorm("rmsnorm", EPS, x[0], x[0], torch.zeros(1, 4, 2), None, torch.ones(4))
    out, weight = torch.empty(4, SHARE), torch.ones(SHARE, SHARE)
    with pytest.raises(UnsupportedError, match="fp32 no product takes a folded norm"):
        products.forward_raw(x, weight, out, norm=norm, impl="cuda")
    with pytest.raises(UnsupportedError, match="fp32 no product takes a folded norm"):
        products.forward_raw(x, weight, out, residual_NM=x, norm=norm, impl="cuda")
    with pytest.raises(UnsupportedError, match="fp32 no product takes a folded norm"):
        products.input_gradient_raw(x, weight, out, norm=norm, impl="cuda")
