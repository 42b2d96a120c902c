"""The passes of attention over (heads, T, T) in memory: softmax with the skewed term, dropout, and what goes back."""

import pytest
import torch
from torch import Tensor

from error_budget import DEVICE, DTYPES, check
from ridgeline.ops.attention.reference import skew
from ridgeline.ops.attention.short import dropping
from ridgeline.ops.dropout import DropoutState, attention_keep, quantise

pytest.importorskip("triton")

from ridgeline.ops.attention import materialised

H, B, T = 2, 3, 21


def draw(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(H * B, T, T, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weights(s: Tensor, r: Tensor | None) -> Tensor:
    scores = s if r is None else s + skew(r[None])[0]
    future = torch.ones(T, T, dtype=torch.bool, device=DEVICE).triu(1)
    return (0.3 * scores).masked_fill(future, float("-inf")).softmax(-1)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_and_its_gradient(dtype: torch.dtype, relative: bool, poisoned: None) -> None:
    s, dp, r = draw(0, dtype), draw(1, dtype), draw(2, dtype) if relative else None
    p = torch.empty_like(s)
    materialised.softmax_raw(s, r, p, 0.3)
    truth = weights(s.double(), None if r is None else r.double())
    check("softmax", p, weights(s, r), truth)

    ds, dr = torch.empty_like(s), torch.empty_like(s)
    materialised.softmax_gradient_raw(p, dp, ds, 0.3)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [None if x is None else x.to(kind).requires_grad_() for x in (s, r)]
        wanted = [x for x in leaves if x is not None]
        results.append(torch.autograd.grad(weights(*leaves), wanted, dp.to(kind)))  # type: ignore[arg-type]
    check("scores' gradient", ds, results[1][0], results[0][0], gradient=True)
    if relative:
        materialised.unskew_raw(ds, dr)
        check("relative scores' gradient", dr, results[1][1], results[0][1], gradient=True)


def test_unskew_undoes_skew() -> None:
    r = draw(0, torch.float32)
    out = torch.empty_like(r)
    materialised.unskew_raw(skew(r[None])[0].contiguous(), out)
    known = torch.arange(T)[None, :] >= T - 1 - torch.arange(T)[:, None]  # rows of the table that a query reaches
    assert torch.equal(out, r * known.to(DEVICE))


def test_dropout_draws_the_specified_mask_with_heads_first() -> None:
    state, x = DropoutState(torch.tensor([3, 4], device=DEVICE), 5), draw(0, torch.float32).view(H, B, T, T)
    out = torch.empty_like(x)
    materialised.drop_raw(x, out, dropping(0.3, state, 7))
    keep_HBTT = attention_keep(state, 7, (B, H, T), 0.3, DEVICE).transpose(0, 1)
    torch.testing.assert_close(out, x * keep_HBTT * quantise(0.3)[1])
