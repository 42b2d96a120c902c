"""The controller policy: inputs, head conditioning, losses, choosing."""

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.models import Category, ControllerPolicy, DecoderConfig, Head, PolicyConfig
from ridgeline.models.config import Conditioning
from ridgeline.models.policy import choose

HEADS = (Head(name="c", classes=3), Head(name="main", classes=5))


def policy(conditioning: Conditioning = "logits") -> ControllerPolicy:
    config = PolicyConfig(
        decoder=DecoderConfig(layers=1, width=16, heads=2, positions="relative", context=8),
        heads=HEADS,
        categories=(Category(name="stage", rows=4, width=2), Category(name="action", rows=9, width=3, columns=2)),
        numbers=4,
        previous=("main", "c"),
        conditioning=conditioning,
    )
    return ControllerPolicy(config, impl="reference", seed=1).double().eval()


def batch(B: int = 2, T: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    return {
        "categories": torch.stack([draw(4, B, T), draw(9, B, T), draw(9, B, T)], -1),
        "numbers": torch.randn(B, T, 4, generator=generator, dtype=torch.float64),
        "previous": torch.stack([draw(3, B, T), draw(5, B, T)], -1),
        "targets": torch.stack([draw(3, B, T), draw(5, B, T)], -1),
    }


def test_input_vector_is_embeddings_numbers_then_one_hots_in_the_configs_order() -> None:
    model, data = policy(), batch()
    x = model.inputs(data)
    assert x.shape[-1] == model.config.input_width == 2 + 2 * 3 + 4 + 5 + 3
    torch.testing.assert_close(x[..., 5:8], model.tables["action"](data["categories"][..., 2]))
    torch.testing.assert_close(x[..., 8:12], data["numbers"])
    assert torch.equal(x[..., 12:17].argmax(-1), data["previous"][..., 1])
    assert torch.equal(x[..., 17:20].argmax(-1), data["previous"][..., 0])


def test_later_heads_hear_detached_raw_logits() -> None:
    model, data = policy(), batch()
    logits = model(data)
    seen = model.trunk(data)
    expected = model.heads["main"](torch.cat([seen, model.heads["c"](seen)], -1))
    torch.testing.assert_close(logits["main"], expected)
    logits["main"].sum().backward()
    assert model.heads["c"].down.weight.grad is None


def test_conditioning_on_classes_uses_the_targets() -> None:
    model, data = policy("classes"), batch()
    before = model(data)
    data["targets"] = (data["targets"] + 1) % 3
    after = model(data)
    assert torch.equal(before["c"], after["c"])
    assert not torch.equal(before["main"], after["main"])


def test_loss_is_the_sum_of_the_heads_means_and_skips_masked_targets() -> None:
    model, data = policy(), batch()
    total = model.loss(data)
    logits = model(data)
    manual = 0.0
    for index, head in enumerate(HEADS):
        log_p = logits[head.name].log_softmax(-1)
        manual = manual - log_p.gather(-1, data["targets"][..., index : index + 1]).mean()
    torch.testing.assert_close(total.double(), manual, rtol=1e-5, atol=1e-6)
    data["targets"][0] = -100
    kept = {name: value[1:] for name, value in data.items()}
    torch.testing.assert_close(model.loss(data), model.loss(kept))


def test_greedy_choice_equals_the_full_forwards_argmax() -> None:
    model, data = policy(), batch()
    at = torch.tensor([3, 7])
    logits = model(data)
    chosen = model.act(data, at, temperature=0)
    for row in range(2):
        for index, head in enumerate(HEADS):
            assert chosen[row, index] == logits[head.name][row, at[row]].argmax()


def test_sampling_follows_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(30_000, 3)
    for temperature in (0.5, 1.0, 3.0):
        noise = torch.empty_like(logits.contiguous()).exponential_(generator=generator)
        counts = torch.bincount(choose(logits, noise, temperature), minlength=3) / 30_000
        torch.testing.assert_close(counts, (logits[0] / temperature).softmax(0), atol=0.012, rtol=0)


def test_no_temperature_overflows() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, -80.0]])
    noise = torch.tensor([[1e-30, 1.0, 5.0], [0.0, 1e-45, 0.0]])
    for temperature, wanted in ((1e-300, [2, 0]), (1e300, [0, 0])):
        assert choose(logits, noise, temperature).tolist() == wanted
    assert choose(logits, None, 0.0).tolist() == [2, 0]


def test_bad_policies_are_refused() -> None:
    trunk = DecoderConfig(layers=1, width=16, heads=2)
    with pytest.raises(ConfigError, match="distinct names"):
        PolicyConfig(decoder=trunk, heads=(HEADS[0], HEADS[0]), numbers=1)
    with pytest.raises(ConfigError, match="do not exist: z"):
        PolicyConfig(decoder=trunk, heads=HEADS, previous=("z",))
    with pytest.raises(ConfigError, match="at least one input"):
        PolicyConfig(decoder=trunk, heads=HEADS)
