"""Cached keys and values: the decoder's own function, until the window rolls."""

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.models import Decoder, DecoderConfig
from ridgeline.models.cache import DecoderCache
from ridgeline.models.init import initialise

SHAPES = {
    "relative": {"positions": "relative"},
    "a longer table": {"positions": "relative", "position_table": 64},
    "learned": {"positions": "learned"},
    "no positions, one key head, RMSNorm, no biases": {
        "positions": "none",
        "kv_heads": 1,
        "norm": "rmsnorm",
        "bias": False,
    },
    "grouped": {"positions": "relative", "kv_heads": 2, "head_width": 12, "gelu": "tanh"},
}
T = 12


def decoder(**shape):
    made = Decoder(DecoderConfig(layers=3, width=32, heads=4, context=T, dropout=0.2, **shape))
    initialise(made, 3, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():  # so that attention and MLP matter beside the residual stream
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return made.double().eval()


def stepped(cache, x_BTC):
    with torch.no_grad():
        return torch.stack([cache.step(x_BTC[:, t]) for t in range(x_BTC.shape[1])], dim=1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_step_by_step_it_is_the_whole_decoder(shape):
    trunk = decoder(**shape)
    x_BTC = torch.randn(3, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cache = DecoderCache(trunk, 3)
    whole = trunk(x_BTC).detach()
    torch.testing.assert_close(stepped(cache, x_BTC), whole, rtol=1e-10, atol=1e-10)
    cache.clear()
    torch.testing.assert_close(stepped(cache, x_BTC), whole, rtol=1e-10, atol=1e-10)


def test_fewer_slots_than_the_context_are_a_shorter_window():
    trunk = decoder(positions="relative")
    x_BTC = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(stepped(DecoderCache(trunk, 2, 7), x_BTC), trunk(x_BTC).detach(), rtol=1e-10, atol=1e-10)


def test_one_block_rolls_exactly_and_more_do_not():
    """In the first block keys see no other position, so there rolling is the window itself; deeper it is not."""
    x_BTC = torch.randn(2, 3 * T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for layers in (1, 3):
        trunk = decoder(positions="relative")
        trunk.blocks = trunk.blocks[:layers]
        rolled = stepped(DecoderCache(trunk, 2, rolls=True), x_BTC)
        for t in (T - 1, T, 2 * T + 5, 3 * T - 1):
            window = trunk(x_BTC[:, max(0, t + 1 - T) : t + 1])[:, -1]
            same = torch.allclose(rolled[:, t], window, rtol=1e-10, atol=1e-10)
            assert same == (layers == 1 or t < T), (layers, t)


def test_rows_that_are_kept_go_on_as_they_were():
    trunk = decoder(positions="relative")
    x_BTC = torch.randn(3, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cache = DecoderCache(trunk, 3)
    stepped(cache, x_BTC[:, :5])
    cache.keep(torch.tensor([2, 0]))
    rest = stepped(cache, x_BTC[[2, 0], 5:])
    torch.testing.assert_close(rest, trunk(x_BTC)[[2, 0], 5:].detach(), rtol=1e-10, atol=1e-10)


def test_what_cannot_be_cached_is_refused():
    with pytest.raises(UnsupportedError, match="eval"):
        DecoderCache(decoder(positions="relative").train(), 1)
    with pytest.raises(UnsupportedError, match="learned positions"):
        DecoderCache(decoder(positions="learned"), 1, rolls=True)
