"""Norm, clip, AdamW, schedule, loss scale and counters against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.helpers import gather
from ridgeline.engine import FlatParameters, LossScale, Update
from ridgeline.engine.update import RING
from ridgeline.errors import CheckpointError, ConfigError, UnsupportedError
from ridgeline.optim import OptimizerConfig, build_adamw, learning_rate, set_learning_rate

CONFIG = OptimizerConfig(lr=1e-2, floor=1e-3, warmup=3, weight_decay=0.3, clip=0.7)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))


def flat_and_update(**rest) -> tuple[FlatParameters, Update]:
    flat = FlatParameters(model(), compute=torch.float32)
    return flat, Update(flat, rest.pop("config", CONFIG), **rest)


def test_equals_clip_and_adamw_of_pytorch():
    reference = model()
    optimizer = build_adamw(reference, lr=1.0, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=CONFIG.weight_decay)
    flat, update = flat_and_update(steps=20)
    for step in range(20):
        torch.manual_seed(step)
        size = 1.0 if step % 2 else 0.03  # what is shorter than the clip stays as it is
        gradients = {name: size * torch.randn_like(p) for name, p in reference.named_parameters()}
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name].clone()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), CONFIG.clip)
        assert (norm > CONFIG.clip) == bool(step % 2)
        rate = learning_rate(CONFIG, step, step / 20)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        gather(flat, [gradients[slot.name] for slot in flat.slots])
        flat.lanes[0].loss.fill_(step)
        update()
        reported = update.metrics(step)[0]
        assert reported.norm == pytest.approx(float(norm), rel=1e-6)
        assert reported.lr == pytest.approx(rate, rel=1e-6)
        assert reported.loss == step
    named = dict(reference.named_parameters())
    for name, view in flat.views(flat.masters).items():
        torch.testing.assert_close(view, named[name].detach(), rtol=1e-5, atol=1e-6)


def test_padding_stays_zero():
    flat, update = flat_and_update()
    for _ in range(3):
        gather(flat, [torch.randn(slot.shape) for slot in flat.slots])
        update()
    inside = torch.zeros(flat.size, dtype=torch.bool)
    for slot in flat.slots:
        inside[slot.offset : slot.offset + slot.size] = True
    for buffer in (flat.masters, update.first, update.second):
        assert not buffer[~inside].any()


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_no_weight(poison):
    flat, update = flat_and_update()
    gather(flat, [torch.randn(slot.shape) for slot in flat.slots])
    update()
    before = [tensor.clone() for tensor in (flat.masters, update.first, update.second, update.applied)]
    if poison == "gradient":
        flat.grad[3] = float("inf")
    else:
        flat.lanes[0].loss.fill_(float("nan"))
    update()
    update()
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (flat.masters, update.first, update.second, update.applied), strict=True)
    )
    assert update.skipped.tolist() == [2, 2]
    assert [m.skipped for m in update.metrics()] == [False, True, True]
    gather(flat, [torch.ones(slot.shape) for slot in flat.slots])
    flat.lanes[0].loss.fill_(1.0)
    update()
    assert update.skipped.tolist() == [2, 0]
    assert float(update.applied) == 2


def test_loss_scale_grows_and_backs_off_and_gradients_are_unscaled():
    scale = LossScale(start=8.0, growth=2.0, backoff=0.25, interval=2)
    flat, update = flat_and_update(scale=scale, config=OptimizerConfig(clip=0))
    plain, unscaled = flat_and_update(config=OptimizerConfig(clip=0))
    seen = []
    for step in range(4):
        gradients = [torch.full(slot.shape, 0.1 * (step + 1)) for slot in flat.slots]
        gather(flat, [g * update.loss_scale for g in gradients])
        gather(plain, gradients)
        update()
        unscaled()
        seen.append(float(update.loss_scale))
    assert seen == [8, 16, 16, 32]
    assert torch.equal(flat.masters, plain.masters)
    flat.grad[0] = float("nan")
    update()
    assert float(update.loss_scale) == 8


def test_the_host_may_set_the_rate_where_there_is_no_schedule():
    _flat, update = flat_and_update()
    update.set_rate(0.25)
    update()
    assert update.metrics()[0].lr == 0.25
    with pytest.raises(ConfigError, match="follows a schedule of 5 steps"):
        flat_and_update(steps=5)[1].set_rate(0.1)


def test_rate_beyond_the_schedule_is_its_last():
    _flat, update = flat_and_update(steps=4)
    for _ in range(6):
        update()
    rates = [m.lr for m in update.metrics()]
    assert rates[3] == rates[4] == rates[5]


def test_the_ring_holds_the_last_steps():
    flat, update = flat_and_update()
    for step in range(RING + 5):
        flat.lanes[0].loss.fill_(step)
        update()
    metrics = update.metrics()
    assert [m.step for m in metrics] == list(range(5, RING + 5))
    assert all(m.loss == m.step for m in metrics)
    assert [m.step for m in update.metrics(RING + 2)] == [RING + 2, RING + 3, RING + 4]


def test_state_goes_to_another_layout_and_back():
    flat, update = flat_and_update(seed=9)
    for _ in range(3):
        gather(flat, [torch.randn(slot.shape) for slot in flat.slots])
        update()
    state = update.state_dict()
    other = FlatParameters(model(), compute=torch.bfloat16, decays=lambda name, p: name == "1.bias")
    resumed = Update(other, CONFIG)
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert resumed.seed_step.tolist() == [9, 3]


def test_foreign_state_is_refused():
    _flat, update = flat_and_update()
    with pytest.raises(CheckpointError, match="lacks applied"):
        update.load_state_dict({})
    state = update.state_dict() | {"applied": torch.ones(1)}
    del state["first.0.weight"]
    with pytest.raises(CheckpointError, match=r"differs in 0\.weight"):
        update.load_state_dict(state)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_kernels_do_what_pytorchs_operations_do(precision):
    scale = LossScale(start=8.0, interval=2)
    flats = [FlatParameters(model(), compute=precision) for _ in range(2)]
    plain, kernels = (
        Update(flat, CONFIG, steps=8, weighted=True, scale=scale, seed=5, impl=impl)
        for flat, impl in zip(flats, ("torch", "triton"), strict=True)
    )
    for step in range(8):
        torch.manual_seed(step)
        gradients = [torch.randn(slot.shape) for slot in flats[0].slots]
        if step == 3:
            gradients[0][0] = float("inf")
        for flat, update in zip(flats, (plain, kernels), strict=True):
            gather(flat, [g * float(update.loss_scale) * 0.75 for g in gradients])
            flat.lanes[0].loss.fill_(float("nan") if step == 5 else 0.75 * step)
            flat.lanes[0].weight.fill_(0.75)
            update()
    for a, b in zip(plain.state(), kernels.state(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert kernels.skipped.tolist() == [2, 0]


def test_an_unknown_implementation_is_named():
    with pytest.raises(UnsupportedError, match="did you mean triton"):
        flat_and_update(impl="tritn")
