"""Muon in the step: PyTorch's own update, replays, resuming, and steps that do not count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.helpers import LANGUAGE, gather, language_batch
from engine.recorder import Recorder
from ridgeline.engine import FlatParameters, LossScale, TrainStep, Update
from ridgeline.errors import ConfigError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig

CONFIG = OptimizerConfig(algorithm="muon", lr=1e-2, warmup=3, weight_decay=0.3, clip=0.7)
MATRICES = ("0.weight", "2.weight")
IMPLS = ["torch", "triton"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 16), nn.Linear(16, 3))


def flat_and_update(impl: str, compute: torch.dtype = torch.float32, **rest) -> tuple[FlatParameters, Update]:
    flat = FlatParameters(model(), compute=compute, orthogonal=MATRICES)
    return flat, Update(flat, CONFIG, impl=impl, **rest)


@pytest.mark.parametrize("impl", IMPLS)
def test_equals_pytorchs_muon_and_adamw(impl):
    pytest.importorskip("triton")
    reference = model()
    named = dict(reference.named_parameters())
    rest = {name: p for name, p in named.items() if name not in MATRICES}
    muon = torch.optim.Muon(
        [named[name] for name in MATRICES], lr=1e-2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest.values() if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in rest.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=CONFIG.betas,
    )
    flat, update = flat_and_update(impl)
    for step in range(8):
        torch.manual_seed(step)
        gradients = {name: torch.randn_like(p) for name, p in named.items()}
        for name, parameter in named.items():
            parameter.grad = gradients[name].clone()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), CONFIG.clip)
        update.set_rate(1e-2)
        muon.step()
        adamw.step()
        gather(flat, [gradients[slot.name] for slot in flat.slots])
        update()
        assert update.metrics(step)[0].norm == pytest.approx(float(norm), rel=1e-5)
    for name, view in flat.views(flat.masters).items():
        tolerance = 1e-2 * 0.2 * 24**0.5 * 8 * 2**-7 if name in MATRICES else 1e-6  # bf16 rounds the products
        torch.testing.assert_close(view, named[name].detach(), rtol=1e-5, atol=tolerance)


def test_both_implementations_agree_and_a_bad_step_changes_nothing():
    pytest.importorskip("triton")
    found = [flat_and_update(impl, torch.bfloat16, scale=LossScale(start=4.0)) for impl in IMPLS]
    for step in range(6):
        torch.manual_seed(step)
        gradients = [torch.randn(slot.shape) for slot in found[0][0].slots]
        before = [flat.masters.clone() for flat, _ in found]
        if step == 3:
            gradients[0][0, 0] = float("nan")
        for (flat, update), was in zip(found, before, strict=True):
            gather(flat, [gradient * update.loss_scale for gradient in gradients])
            update()
            assert torch.equal(flat.masters, was) is (step == 3)
            assert torch.equal(flat.copies, flat.masters.bfloat16())
    for a, b in zip(found[0][1].state(), found[1][1].state(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, equal_nan=True)


def test_only_adamws_weights_have_a_second_moment():
    flat, update = flat_and_update("torch")
    state = update.state_dict()
    assert {name.removeprefix("first.") for name in state if name.startswith("first.")} == {s.name for s in flat.slots}
    second = {name.removeprefix("second.") for name in state if name.startswith("second.")}
    assert second == {slot.name for slot in flat.slots} - set(MATRICES)
    assert len(update.second) == flat.size - flat.start


def train(steps, *, capture, resume_at=None):
    def made():
        model = build(LANGUAGE, impl="reference", seed=3)
        return TrainStep(model, optimizer=CONFIG, steps=12, precision="bf16", capture=capture)

    step = made()
    for i in range(steps):
        if i == resume_at:
            weights, state = step.model.state_dict(), step.state_dict()
            step = made()
            step.model.load_state_dict(weights)
            step.load_state_dict(state)
        step(language_batch(i % 3))
    return step


def test_replays_equal_the_calls_and_a_resumed_run_goes_on():
    calls, replays = train(12, capture=False), train(12, capture=Recorder())
    assert calls.flat.start > 0
    assert all(torch.equal(a, b) for a, b in zip(calls.update.state(), replays.update.state(), strict=True))
    assert torch.equal(train(12, capture=False, resume_at=5).flat.masters, calls.flat.masters)
    losses = [m.loss for m in calls.metrics()]
    assert losses[-1] < losses[0]


def test_matrices_that_are_none():
    with pytest.raises(ConfigError, match=r"0\.bias is no trainable one"):
        FlatParameters(model(), compute=torch.float32, orthogonal=["0.bias"])
