"""The fused controller policy against the reference: losses and every gradient."""

from typing import Literal

import pytest
import torch

from ridgeline.models import Category, ControllerPolicy, DecoderConfig, Head, PolicyConfig
from ridgeline.models.fused import policy
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.policy_heads import HeadWeights

pytest.importorskip("triton")


def make(conditioning: Literal["logits", "classes"]) -> tuple[ControllerPolicy, dict[str, torch.Tensor]]:
    config = PolicyConfig(
        decoder=DecoderConfig(layers=1, width=24, heads=3, context=7, positions="relative", dropout=0.2),
        categories=(Category(name="stage", rows=5, width=4), Category(name="action", rows=30, width=6, columns=2)),
        numbers=3,
        heads=(Head(name="c", classes=9), Head(name="main", classes=13), Head(name="buttons", classes=6)),
        previous=("main", "c"),
        conditioning=conditioning,
    )
    model = ControllerPolicy(config, impl="reference", seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of 0 and scales of 1 would hide mistakes
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)

    def draw(*highs: int) -> torch.Tensor:
        return torch.stack([torch.randint(high, (4, 7), generator=generator) for high in highs], dim=-1)

    batch = {
        "categories": draw(5, 30, 30).to(torch.int16),
        "numbers": torch.randn(4, 7, 3, generator=generator),
        "previous": draw(9, 13, 6).to(torch.uint8),
        "targets": draw(9, 13, 6).to(torch.int8),
    }
    batch["targets"][1, 4:] = -100
    return model, batch


@pytest.mark.parametrize("conditioning", ["logits", "classes"])
def test_losses_and_gradients(conditioning: Literal["logits", "classes"]) -> None:
    model, batch = make(conditioning)
    state, results = DropoutState(torch.tensor([3, 4])), []
    for impl in ("reference", "fused"):
        model.decoder.impl = impl
        losses = model.losses(batch, state)
        loss = torch.stack(list(losses.values())).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results.append(({name: value.detach() for name, value in losses.items()}, grads))
    torch.testing.assert_close(results[1], results[0], rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("hopper", "classes", "dtype", "impl"),
    [
        (True, (9, 37, 6), torch.bfloat16, "cuda"),
        (False, (9, 37, 6), torch.bfloat16, "triton"),
        (True, (9, 37, 6), torch.float32, "triton"),
        (True, (9, 80, 6), torch.bfloat16, "triton"),
        (True, (9, 137, 6), torch.bfloat16, None),
    ],
)
def test_the_fastest_heads_that_can_run_are_taken(
    hopper: bool, classes: tuple[int, ...], dtype: torch.dtype, impl: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "available", lambda name, _: None if hopper or name != "cuda" else "no Hopper card")
    heads, width = [], 512
    for count in classes:
        shapes = ((width,), (width,), (256, width), (256,), (count, 256), (count,))
        heads.append(HeadWeights(*(torch.empty(shape, dtype=dtype) for shape in shapes)))
        width += count
    assert policy.heads_impl(heads, torch.device("cpu"), dtype) == impl
