"""What a step leaves behind and takes up: resuming, other precisions, states of something else."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from engine.helpers import LANGUAGE, SETTINGS, language_batch, strange_step, stranger, stranger_loss
from engine.recorder import Recorder
from ridgeline.engine import LossScale, TrainStep
from ridgeline.errors import CheckpointError
from ridgeline.models import build


def test_resuming_in_the_middle_changes_nothing():
    straight = TrainStep(build(LANGUAGE, impl="reference", seed=3), optimizer=SETTINGS, steps=12, precision="bf16")
    first = TrainStep(build(LANGUAGE, impl="reference", seed=3), optimizer=SETTINGS, steps=12, precision="bf16")
    for i in range(12):
        straight(language_batch(i))
    for i in range(5):
        first(language_batch(i))
    weights, state = first.model.state_dict(), first.state_dict()
    model = build(LANGUAGE, impl="reference", seed=99)
    second = TrainStep(model, optimizer=SETTINGS, steps=12, precision="bf16", capture=Recorder())
    model.load_state_dict(weights)
    second.load_state_dict(state)
    for i in range(5, 12):
        second(language_batch(i))
    assert torch.equal(straight.flat.masters, second.flat.masters)
    assert [m.loss for m in second.metrics(5)] == [m.loss for m in straight.metrics(5)]


@pytest.mark.parametrize(("first", "then"), [("fp16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_a_loss_scale_stays_in_its_precision(first, then):
    """What one precision has learnt another goes on with; a scale that it has not, or has anew, is no factor."""
    steps = [strange_step(precision=precision, scale=LossScale(start=256.0)) for precision in (first, then)]
    for number in range(3):
        steps[0](language_batch(number))
    steps[1].model.load_state_dict(steps[0].model.state_dict())
    steps[1].load_state_dict(steps[0].state_dict())
    for step in steps:
        step(language_batch(3))
    a, b = (step.metrics(3)[0] for step in steps)
    assert a.norm == pytest.approx(b.norm, rel=0.05)
    assert float(steps[1].update.loss_scale) == (256.0 if then == "fp16" else 1.0)


@pytest.mark.parametrize("name", ["first.attn.weight", "second.wte.weight", "skipped"])
def test_a_state_that_does_not_fit_changes_nothing(name):
    trained, step = strange_step(), strange_step()
    trained(language_batch())
    before = [tensor.clone() for tensor in step.update.state()]
    with pytest.raises(CheckpointError, match=r"moment of (attn|wte)|skipped of .* has 5 numbers"):
        step.load_state_dict(trained.state_dict() | {name: torch.ones(5)})
    assert all(torch.equal(tensor, old) for tensor, old in zip(step.update.state(), before, strict=True))


def zero(tensor):
    with torch.no_grad():
        tensor.zero_()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capture", [False, Recorder()])
def test_weights_and_buffers_edited_between_steps_count_at_once(precision, capture):
    class Edited(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.frozen = torch.nn.Linear(4, 1), torch.nn.Parameter(torch.ones(1), requires_grad=False)
            self.register_buffer("factor", torch.ones(1))

        def forward(self, x):
            return (self.linear(x) * self.frozen * self.factor).square().mean()

    for name in ("factor", "frozen", "linear.weight"):
        torch.manual_seed(0)
        step = TrainStep(Edited(), lambda model, x: model(x), precision=precision, capture=capture)
        step(torch.ones(4, 4))
        zero(step.model.linear.bias)
        zero(step.model.get_buffer(name) if name == "factor" else step.model.get_parameter(name))
        step(torch.ones(4, 4))
        assert step.metrics()[0].loss > 0
        assert step.metrics()[1].loss == 0, name


def test_weights_edited_by_their_data_count_at_once_where_nothing_is_captured():
    step = strange_step(precision="bf16", capture=False)
    step(language_batch())
    for parameter in step.model.parameters():
        parameter.data.zero_()
    step(language_batch())
    assert step.metrics()[1].loss == pytest.approx(torch.tensor(11.0).log().item(), rel=1e-2)


def test_a_model_with_a_shared_weight_can_be_saved_by_whatever_looks_at_storages(tmp_path):
    model, other = stranger(), stranger()
    step = TrainStep(model, stranger_loss, SETTINGS, precision="bf16")
    step(language_batch())
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.torch.load_model(other, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "all.pt")
    again = torch.load(tmp_path / "all.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert torch.equal(tensor, again[name])
    assert (tmp_path / "all.pt").stat().st_size < 4 * sum(tensor.numel() for tensor in other.parameters()) + 5000
    assert model.state_dict(keep_vars=True)["lm_head.weight"] is model.wte.weight
    step.model.load_state_dict(again)
    step(language_batch())


def test_a_model_that_other_processes_share_goes_on_being_trained():
    step = strange_step()
    step(language_batch())
    step.model.state_dict()
    step.model.share_memory()
    step(language_batch())
    step.check()
    assert step.model.wte.weight.is_shared()
    assert torch.equal(step.flat.views(step.flat.masters)["wte.weight"], step.model.wte.weight)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_set_by_the_state_dict_count_at_once(precision):
    """As code does that swaps in a mean of the weights."""
    step = strange_step(precision=precision, capture=Recorder())
    step(language_batch())
    for name, tensor in step.model.state_dict().items():
        if name != "bias":  # the mask
            tensor.zero_()
    step(language_batch())
    assert step.metrics()[1].loss == pytest.approx(torch.tensor(11.0).log().item(), rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "holds tensors by name, got NoneType"),
        ({"applied": [1.0]}, "holds tensors by name, got dict"),
        ({"seed_step": torch.tensor([0, -5])}, "counts no steps"),
        ({"applied": torch.tensor([float("nan")])}, "counts no steps"),
    ],
)
def test_states_that_cannot_be(change, message):
    step = strange_step()
    step(language_batch())
    before = step.state_dict()
    with pytest.raises(CheckpointError, match=message):
        step.load_state_dict(change and before | change)
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
