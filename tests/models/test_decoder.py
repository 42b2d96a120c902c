"""The reference decoder: its definition checked against independent arithmetic."""

import math

import pytest
import torch

from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.models import Decoder, DecoderConfig, LanguageConfig, LanguageModel, build
from ridgeline.ops.attention.reference import attention_reference
from ridgeline.ops.dropout import DropoutState, attention_keep, quantise

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16}


def language(**overrides: object) -> LanguageModel:
    config = LanguageConfig(vocabulary=11, decoder=DecoderConfig(**{**SMALL, **overrides}))  # type: ignore[arg-type]
    return LanguageModel(config, impl="reference", seed=0)


def test_attention_equals_a_loop_over_positions() -> None:
    torch.manual_seed(0)
    B, T, H, G, D, R = 2, 7, 4, 2, 8, 12
    q, k, v = (torch.randn(B, T, n, D, dtype=torch.float64) for n in (H, G, G))
    table = torch.randn(R, D, dtype=torch.float64)
    out = attention_reference(q, k, v, table, scale=0.3)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(T):
                scores = [0.3 * float(q[b, i, h] @ (k[b, j, g] + table[R - 1 - (i - j)])) for j in range(i + 1)]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                expected = sum(weights[j] * v[b, j, g] for j in range(i + 1))
                torch.testing.assert_close(out[b, i, h], expected)


def test_a_probability_that_no_mask_has_is_refused_where_masks_are_drawn() -> None:
    config = DecoderConfig(layers=1, width=16, heads=2, context=8, dropout=0.99999)
    Decoder(config, impl="torch")
    with pytest.raises(UnsupportedError, match="p must be from 0 to"):
        Decoder(config, impl="reference")


def test_attention_dropout_scales_what_it_keeps() -> None:
    torch.manual_seed(0)
    B, T, H, D = 1, 20, 2, 4
    q, k = (torch.zeros(B, T, H, D, dtype=torch.float64) for _ in range(2))
    v = torch.randn(B, T, H, D, dtype=torch.float64)
    state = DropoutState(torch.tensor([5, 9]), sample_offset=3)
    out = attention_reference(q, k, v, None, scale=1.0, p=0.25, dropout=state, site=4)
    keep = attention_keep(state, 4, (B, H, T), 0.25, v.device)
    i, h = 13, 1
    expected = sum(v[0, j, h] * keep[0, h, i, j] for j in range(i + 1)) * quantise(0.25)[1] / (i + 1)
    torch.testing.assert_close(out[0, i, h], expected)


@pytest.mark.parametrize("positions", ["learned", "relative", "none"])
@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_torch_implementation_computes_the_same_function(positions: str, kv_heads: int | None, norm: str) -> None:
    reference = language(positions=positions, kv_heads=kv_heads, norm=norm).double()
    other = LanguageModel(reference.config, impl="torch").double()
    other.load_state_dict(reference.state_dict())
    tokens = torch.randint(11, (3, 16))
    torch.testing.assert_close(reference(tokens), other(tokens))


@pytest.mark.parametrize("positions", ["learned", "relative", "none"])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_single_states_are_those_of_the_whole_and_the_last_block_computes_no_others(positions: str, impl: str) -> None:
    decoder = LanguageModel(language(positions=positions, kv_heads=2, dropout=0.1).config, impl=impl, seed=1).decoder
    x_BTC, at_B, rows = torch.randn(3, 12, 32, dtype=torch.float64), torch.tensor([11, 0, 5]), []
    decoder.double().eval()
    for block in decoder.blocks:
        block.mlp.up.register_forward_hook(lambda layer, given, out: rows.append(given[0].shape[:-1].numel()))
    torch.testing.assert_close(decoder.state_at(x_BTC, at_B), decoder(x_BTC)[[0, 1, 2], at_B])
    assert rows == [3 * 12, 3, 3 * 12, 3 * 12]
    decoder.train()  # with masks, which are those of all positions
    torch.manual_seed(0)
    state = decoder.seed_step.clone()
    once = decoder.state_at(x_BTC, at_B)
    decoder.seed_step.copy_(state)
    torch.manual_seed(0)
    torch.testing.assert_close(decoder(x_BTC)[[0, 1, 2], at_B], once)
    with pytest.raises(ConfigError, match="a sequence of 17 positions is longer"):
        decoder.eval().state_at(torch.randn(1, 17, 32, dtype=torch.float64), at_B[:1])


def test_the_future_is_not_seen() -> None:
    model = language(positions="relative").double()
    tokens = torch.randint(11, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 11
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])


def test_residual_projections_start_smaller() -> None:
    model = language(width=64, heads=4)
    block = model.decoder.blocks[0]
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not block.mlp.up.bias.any()
    assert language(positions="relative").decoder.blocks[1].attention.relative.std().item() == pytest.approx(1, rel=0.2)


def test_seed_repeats_the_weights() -> None:
    first, second = language(), language()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_dropout_masks_follow_the_state_and_advance_without_one() -> None:
    model = language(dropout=0.3)
    tokens = torch.randint(11, (2, 16))
    state = DropoutState(torch.tensor([1, 2]))
    assert torch.equal(model(tokens, state), model(tokens, state))
    assert not torch.equal(model(tokens, state), model(tokens, DropoutState(torch.tensor([1, 3]))))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens, state))


def test_a_half_batch_draws_its_part_of_the_whole_batchs_masks() -> None:
    model = language(dropout=0.3, positions="relative")
    tokens = torch.randint(11, (4, 16))
    seed_step = torch.tensor([7, 1])
    whole = model(tokens, DropoutState(seed_step))
    halves = [model(tokens[i : i + 2], DropoutState(seed_step, i)) for i in (0, 2)]
    torch.testing.assert_close(whole, torch.cat(halves))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"heads": 3}, r"set head_width \(--model.decoder.head-width\), or heads to a divisor"),
        ({"kv_heads": 3}, r"heads=4; set kv_heads \(--model.decoder.kv-heads\) to a divisor of heads"),
        ({"positions": "learned", "position_table": 8}, r"raise position_table \(--model.decoder.position-table\)"),
        ({"dropout": 1.0}, "dropout"),
        ({"layers": 0}, "layers must be at least 1 and at most 16,777,216, got 0"),
        ({"position_table": 2**70}, "position_table must be at least 1 and at most 16,777,216"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive"),
        ({"norm": "batchnorm"}, "norm must be one of"),
    ],
)
def test_impossible_configs_say_what_to_change(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        DecoderConfig(**{**SMALL, **change})  # type: ignore[arg-type]


def test_unknown_implementation_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="torch"):
        build(language().config, impl="troch")


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the model's context=16"):
        language()(torch.randint(11, (1, 17)))
