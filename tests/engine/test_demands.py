"""What a step is made of, and batches, that cannot be: one sentence each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.helpers import LANGUAGE, POLICY, language_batch, policy_batch, strange_step, stranger, stranger_loss
from engine.recorder import Recorder
from ridgeline.engine import LossScale, TrainStep
from ridgeline.errors import ConfigError, RidgelineError, UnsupportedError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig
from ridgeline.train.step import TorchStep


class OneArgument(nn.Linear):
    def loss(self, batch):
        return self(batch).mean()


class OwnLoss(nn.Linear):
    def loss(self, batch, dropout):
        return self(batch).square().mean()


def under_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strange_step(steps=1.5), "whole number of steps, at least one, got 1.5"),
        (lambda: strange_step(steps=0), "whole number of steps, at least one, got 0"),
        (lambda: strange_step(seed="a"), "a seed is an integer of 64 bits, got 'a'"),
        (lambda: strange_step(seed=2**63), "a seed is an integer of 64 bits"),
        (lambda: strange_step(decays="all"), "decays must be a function of a parameter's name"),
        (lambda: strange_step(replicas=2), "replicas must be of class Replicas, got int"),
        (lambda: strange_step(scale=2.0**8), "scale must be of class LossScale, got float"),
        (lambda: strange_step(orthogonal=["attn.weight"]), "the optimizer's algorithm is adamw; choose muon"),
        (lambda: strange_step(orthogonal="attn.weight"), "a list of names, got the one name 'attn.weight'"),
        (lambda: TrainStep(OneArgument(2, 2)), r"called as loss\(batch, dropout\), which it does not take"),
        (lambda: TrainStep(nn.Linear(2, 2), lambda batch: batch), r"called as loss\(model, batch\)"),
        (lambda: TrainStep(under_inference(), torch.sum), r"weight was made under torch\.inference_mode"),
        (lambda: LossScale(start=0.0), "starts at a positive, finite number, got 0"),
        (lambda: LossScale(start=float("inf")), "starts at a positive, finite number, got inf"),
        (lambda: LossScale(growth=0.5), "grows by 1 or more and falls by less, got 0.5 and 0.5"),
        (lambda: LossScale(backoff=1.0), "grows by 1 or more and falls by less, got 2.0 and 1.0"),
        (lambda: LossScale(interval=0), "at least one step, got 0"),
        (
            lambda: strange_step(accumulate=2, weight=lambda part: torch.tensor(-1.0))(language_batch()),
            "a mean of, got -1",
        ),
        (lambda: OptimizerConfig(lr="fast"), r"optimizer\.lr must be .*, got 'fast'"),
        (lambda: OptimizerConfig(warmup=1.5), r"optimizer\.warmup must be .*, got 1.5"),
        (lambda: OptimizerConfig(betas=0.9), r"optimizer\.betas must be .*, got 0.9"),
        (lambda: OptimizerConfig(clip=None), r"optimizer\.clip must be .*, got None"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(RidgelineError, match=message):
        make()


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, "fast", None])
def test_rates_that_cannot_be(rate):
    step = strange_step()
    with pytest.raises(ConfigError, match="a learning rate is a finite number of at least 0, got"):
        step.set_rate(rate)
    step(language_batch())
    assert step.metrics()[0].lr == pytest.approx(1e-2)


def ragged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(0, 4), r"a batch of \(0, 4\) is empty"),
        (lambda: torch.zeros(4, 0), r"a batch of \(4, 0\) is empty"),
        (lambda: torch.eye(4).to_sparse(), "dense tensors with values, got a sparse_coo one"),
        (lambda: torch.ones(4, 4, device="meta"), "dense tensors with values, got a meta one"),
        (ragged, "dense tensors with values, got a nested one"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_that_cannot_be(make, message):
    step = TrainStep(nn.Linear(4, 1), lambda model, x: model(x).mean(), precision="fp32")
    with pytest.raises(ConfigError, match=message):
        step(make())


def test_a_part_of_a_batch_may_be_empty():
    step = TrainStep(nn.Linear(4, 1), lambda model, batch: model(batch[0]).mean(), precision="fp32")
    step((torch.ones(4, 4), torch.ones(4, 0)))
    assert step.taken == 1


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
@pytest.mark.parametrize("impl", ["reference", "torch", "fused", "m3"])
@pytest.mark.parametrize(("config", "make"), [(LANGUAGE, language_batch), (POLICY, policy_batch)])
def test_an_empty_batch_has_no_loss(config, make, impl, shape):
    model, batch = build(config, impl=impl, seed=0), make(batch=shape[0], context=shape[1])
    with pytest.raises(ConfigError, match=r"whose targets have shape .* is empty"):
        model.loss(batch)
    if impl in ("fused", "m3"):
        with pytest.raises(UnsupportedError, match="needs at least one position"):
            model.decoder(torch.zeros(*shape, config.decoder.width))
    for accumulate in (1, 2):
        if impl == "torch":
            step = TorchStep(model, OptimizerConfig(), steps=None, precision="fp32", accumulate=accumulate)
            with pytest.raises(ConfigError, match="is empty"):
                step(batch)


def test_a_default_dtype_of_another_width():
    model = stranger()
    torch.set_default_dtype(torch.float64)
    try:
        step = TrainStep(model, stranger_loss, precision="bf16")
        step(language_batch())
        with pytest.raises(UnsupportedError, match="PyTorch's default dtype, which must be float32"):
            build(LANGUAGE, impl="fused", seed=0).float().loss(language_batch())
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = [*step.update.state(), step.flat.grad, step.update.ring]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("capture", [False, Recorder()])
def test_what_stands_around_a_step_does_not_change_it(capture):
    plain, other = strange_step(capture=capture), strange_step(capture=capture)
    for number in range(2):
        plain(language_batch(number))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            other(language_batch(number))
    assert torch.equal(plain.flat.masters, other.flat.masters)
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"under torch\.inference_mode"):
        plain(language_batch())


def test_a_strangers_own_loss_takes_any_batch():
    for settings in ({}, {"accumulate": 2}, {"lanes": 2}):
        step = TrainStep(OwnLoss(4, 1), precision="fp32", **settings)
        step(torch.ones(4, 4))
        step.check()
        assert not step.metrics()[0].skipped


@pytest.mark.parametrize("kind", [list, tuple, set, iter])
def test_names_of_matrices_may_come_in_any_way(kind):
    names, muon = kind(["attn.weight", "proj.weight"]), OptimizerConfig(algorithm="muon")
    step = TrainStep(stranger(), stranger_loss, muon, orthogonal=names, precision="fp32")
    assert {slot.name for slot in step.flat.slots if slot.offset < step.flat.start} == {"attn.weight", "proj.weight"}
