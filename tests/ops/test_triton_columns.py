"""The second stage of column sums: order, scatter, strided partials, storage."""

import pytest
import torch

from error_budget import DEVICE

pytest.importorskip("triton")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize(("P", "W"), [(1, 1), (3, 40), (65, 17), (200, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(P: int, W: int, dtype: torch.dtype) -> None:
    from ridgeline.ops._triton.columns import column_sums_raw

    partials, out = draw(P, W, dtype=dtype), torch.full((W,), float("nan"), device=DEVICE)
    column_sums_raw(partials, out, accumulate=False)
    torch.testing.assert_close(out.double(), partials.double().sum(0), rtol=1e-5, atol=1e-5)


def test_scattered_into_a_flat_buffer() -> None:
    """Two columns' worth of a strided strip, added where the index says; the rest of the buffer stays."""
    from ridgeline.ops._triton.columns import column_sums_raw

    strip, flat = draw(7, 30), draw(100)
    before, index = flat.clone(), torch.tensor([90, 3, 50, 4, 99], dtype=torch.int32, device=DEVICE)
    column_sums_raw(strip[:, 11:16], flat, index)
    expected = before.clone()
    expected[index.long()] += strip[:, 11:16].sum(0)
    torch.testing.assert_close(flat, expected)
    untouched = torch.ones(100, dtype=torch.bool, device=DEVICE).index_fill_(0, index.long(), False)
    assert torch.equal(flat[untouched], before[untouched])


def test_stored_in_sixteen_bits_after_an_fp32_sum() -> None:
    from ridgeline.ops._triton.columns import column_sums_raw

    partials, out = draw(100, 24), torch.zeros(24, dtype=torch.bfloat16, device=DEVICE)
    column_sums_raw(partials, out)
    torch.testing.assert_close(out, partials.double().sum(0).bfloat16(), rtol=8e-3, atol=0)
