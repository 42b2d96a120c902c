"""The Triton masks are the specification's, bit for bit; the specification's masks have the promised frequency."""

from collections.abc import Callable

import pytest
import torch

from error_budget import DEVICE, DTYPES
from ridgeline.errors import UnsupportedError
from ridgeline.ops.dropout import DropoutState, available, dropout, hidden_keep, quantise, reference
from ridgeline.ops.dropout.reference import stream_keys

SEEDS = [(0, 0, 0), (2**40 + 12345, 7, 3), (-1, 2**33 + 5, 1000)]  # seed, step, sample offset


def make_state(seed: int, step: int, offset: int) -> DropoutState:
    return DropoutState(torch.tensor([seed, step], device=DEVICE), offset)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(2, 5, 12), (3, 7, 64), (1, 3, 516), (2, 2, 1028)])
@pytest.mark.parametrize("seed", SEEDS)
def test_masks_are_bit_for_bit_the_specification(shape: tuple[int, int, int], seed: tuple[int, int, int]) -> None:
    pytest.importorskip("triton")
    for site, p in ((0, 0.2), (17, 0.5)):
        ones = torch.ones(shape, device=DEVICE)
        kept = dropout(ones, p, make_state(*seed), site, impl="triton") != 0
        assert torch.equal(kept, hidden_keep(make_state(*seed), site, shape, p, DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradient(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype).requires_grad_()
    weighting = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    state, (_, scale) = make_state(1, 2, 3), quantise(0.2)
    keep = hidden_keep(state, 4, (2, 3, 8), 0.2, DEVICE)
    out = dropout(x, 0.2, state, 4, impl="triton")
    (slope,) = torch.autograd.grad(out, [x], weighting)
    assert torch.equal(out, (x.detach().float() * keep * scale).to(dtype))
    assert torch.equal(slope, (weighting.float() * keep * scale).to(dtype))


def test_parts_of_a_batch_draw_the_whole_batchs_masks() -> None:
    state = make_state(3, 4, 0)
    whole = hidden_keep(state, 1, (6, 4, 8), 0.3, DEVICE)
    parts = [hidden_keep(state._replace(sample_offset=start), 1, (2, 4, 8), 0.3, DEVICE) for start in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))


def test_a_probability_is_kept_to_15_bits_and_what_is_kept_is_scaled_to_the_same_mean() -> None:
    assert quantise(0.5) == (1 << 14, 2.0)
    assert quantise(0.2) == (6554, (1 << 15) / ((1 << 15) - 6554))
    assert quantise(0.0) == (0, 1.0)


def test_every_bit_of_what_a_mask_belongs_to_counts() -> None:
    seed, step, site, stream = 0x0123_4567_89AB_CDEF, 0x0F1E_2D3C, 0x55, torch.tensor(0x1234_5678)

    def keys(seed: int, step: int, site: int, stream: torch.Tensor) -> tuple[int, int]:
        key_0, key_1 = stream_keys(torch.tensor([seed, step]), site, stream)
        return int(key_0), int(key_1)

    found = [keys(seed, step, site, stream)]
    found += [keys(seed ^ (1 << bit), step, site, stream) for bit in range(63)]
    found += [keys(-1, step, site, stream)]  # a seed's 64th bit is its sign
    found += [keys(seed, step ^ (1 << bit), site, stream) for bit in range(32)]
    found += [keys(seed, step, site ^ (1 << bit), stream) for bit in range(16)]
    found += [keys(seed, step, site, stream ^ (1 << bit)) for bit in range(32)]
    for half in zip(*found, strict=True):
        assert len(set(half)) == len(found)


def correlations(words: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Correlations of the 15-bit numbers in random words, over eight keys of 2^16 counters, in standard errors."""
    counter, drawn = torch.arange(1 << 16), []
    for seed in range(8):
        keys = stream_keys(torch.tensor([seed, 3]), 1, torch.tensor(7))
        drawn.append(reference._lanes(*words(counter, *keys)).double())
    x_KNL = torch.stack(drawn)
    x_KNL = (x_KNL - x_KNL.mean(1, keepdim=True)) / x_KNL.std(1, keepdim=True)
    between_LL = torch.einsum("knl,knm->lm", x_KNL, x_KNL) / (len(drawn) * len(counter)) ** 0.5
    found = {f"lanes {a} and {b}": float(between_LL[a, b]) for a in range(4) for b in range(a)}
    flat_KM = x_KNL.flatten(1)
    for lag in (1, 2, 3, 4, 8, 16, 64, 256, 1024, 4096, 16384):
        products = flat_KM[:, :-lag] * flat_KM[:, lag:]
        found[f"{lag} apart"] = float(products.sum() / products.numel() ** 0.5)
    return found


def test_numbers_of_a_counter_and_of_its_neighbours_are_not_correlated() -> None:
    assert {name: errors for name, errors in correlations(reference.random_words).items() if abs(errors) > 5} == {}


def test_without_the_rotation_neighbouring_numbers_are_correlated() -> None:
    def unrotated(counter: torch.Tensor, key_0: torch.Tensor, key_1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, low = reference._multiply((counter ^ key_0) & reference.MASK32, reference.MULTIPLIER_0)
        middle = high ^ low ^ key_1
        high, low = reference._multiply(middle, reference.MULTIPLIER_1)
        return high ^ low, (middle + low) & reference.MASK32

    assert max(map(abs, correlations(unrotated).values())) > 30


def test_frequency() -> None:
    keep = hidden_keep(make_state(5, 6, 0), 2, (64, 32, 256), 0.2, DEVICE)
    deviation = (0.2 * 0.8 / keep.numel()) ** 0.5
    assert abs(keep.float().mean().item() - 0.8) < 5 * deviation


@pytest.mark.parametrize(
    ("shape", "p", "message"),
    [((2, 3, 6), 0.1, "C a multiple of 4"), ((6, 8), 0.1, "C a multiple of 4"), ((2, 3, 8), 1.0, "p must be from 0 to")],
)
def test_bad_input(shape: tuple[int, ...], p: float, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dropout(torch.ones(shape, device=DEVICE), p, make_state(0, 0, 0), 0)


def test_pytorchs_dropout_is_not_offered() -> None:
    assert "unknown implementation 'torch'" in (available("torch", DEVICE) or "")
