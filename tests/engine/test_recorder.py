"""The captured step equals the uncaptured one bit for bit, and the test would notice if it did not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.helpers import LANGUAGE, language_batch, stranger, stranger_loss
from engine.recorder import Recorder
from ridgeline.engine import TrainStep, Update
from ridgeline.errors import UnsupportedError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig

STEPS = 24
SETTINGS = OptimizerConfig(lr=1e-2, warmup=10, clip=0.5)


def train(model, batches, *, capture, loss=None, accumulate=2, precision="fp32", **rest):
    step = TrainStep(
        model,
        loss,
        SETTINGS,
        steps=STEPS,
        capture=capture,
        accumulate=accumulate,
        precision=precision,
        seed=5,
        **rest,
    )
    for batch in batches:
        step(batch)
    return step


def differences(a: TrainStep, b: TrainStep) -> list[str]:
    names = ["weights", *(str(i) for i in range(len(a.update.state()) - 1))]
    pairs = zip(names, a.update.state(), b.update.state(), strict=True)
    return [name for name, x, y in pairs if not torch.equal(x, y)]


@pytest.fixture
def _one_hot_as_on_cuda(monkeypatch):
    """PyTorch's checks its input's range on the CPU, and only there, by asking for values."""
    monkeypatch.setattr(F, "one_hot", lambda x, n: (x[..., None] == torch.arange(n, device=x.device)).long())


@pytest.mark.usefixtures("_one_hot_as_on_cuda")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_replays_equal_the_calls(task, precision):
    build_model, make_batch = task
    batches = [make_batch(i % 2) for i in range(STEPS)]
    plain = train(build_model(), batches, capture=False, precision=precision)
    replayed = train(build_model(), batches, capture=Recorder(), precision=precision)
    assert differences(plain, replayed) == []
    metrics = replayed.metrics()
    assert [m.step for m in metrics] == list(range(STEPS))
    assert metrics[0].lr == pytest.approx(1e-3)
    assert metrics[-1].lr < metrics[10].lr  # the schedule moved inside the replays
    assert metrics[-1].loss < metrics[0].loss


def test_two_lanes_replay():
    batches = [language_batch(i) for i in range(STEPS)]
    plain, replayed = (
        train(build(LANGUAGE, impl="reference", seed=3), batches, capture=capture, lanes=2)
        for capture in (False, Recorder())
    )
    assert differences(plain, replayed) == []


def test_dropout_masks_differ_between_replays():
    # learning rate ~0 and one batch: only the masks can change the loss
    step = TrainStep(
        build(LANGUAGE, impl="reference", seed=3),
        optimizer=OptimizerConfig(lr=1e-30),
        precision="fp32",
        capture=Recorder(),
    )
    for _ in range(4):
        step(language_batch())
    losses = [m.loss for m in step.metrics()]
    assert len(set(losses)) == 4


def test_a_strangers_module_replays():
    torch.manual_seed(0)
    batches = [language_batch(i) for i in range(STEPS)]
    plain = train(stranger(), batches, capture=False, loss=stranger_loss, precision="bf16")
    replayed = train(stranger(), batches, capture=Recorder(), loss=stranger_loss, precision="bf16")
    assert differences(plain, replayed) == []


class Counting:
    """A loss that counts its calls on the host: what a captured step must not contain."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return stranger_loss(model, batch) * (1 + 0.01 * self.calls)


class HostRate(Update):
    """A schedule that counts on the host."""

    calls = 0

    def __call__(self, loss=None) -> None:
        self.calls += 1
        self._rates.fill_(1e-3 * self.calls)
        super().__call__(loss)


class HostSeed(Update):
    """Dropout seeds from a counter on the host."""

    calls = 0

    def __call__(self, loss=None) -> None:
        super().__call__(loss)
        self.calls += 1
        self.seed_step[0].fill_(self.calls)


def test_a_counter_on_the_host_is_found():
    batches = [language_batch(i) for i in range(STEPS)]
    plain = train(stranger(), batches, capture=False, loss=Counting(), accumulate=1)
    replayed = train(stranger(), batches, capture=Recorder(), loss=Counting(), accumulate=1)
    assert "weights" in differences(plain, replayed)


@pytest.mark.parametrize("planted", [HostRate, HostSeed])
def test_a_schedule_or_seed_on_the_host_is_found(monkeypatch, planted):
    monkeypatch.setattr("ridgeline.engine.step.Update", planted)
    batches = [language_batch(i) for i in range(STEPS)]
    plain = train(build(LANGUAGE, impl="reference", seed=3), batches, capture=False)
    replayed = train(build(LANGUAGE, impl="reference", seed=3), batches, capture=Recorder())
    assert "weights" in differences(plain, replayed)


def test_what_asks_for_a_value_cannot_be_captured_and_nothing_is_lost():
    model = stranger()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(model, batch):
        value = stranger_loss(model, batch)
        return value * 2 if value.item() > 100 else value

    step = TrainStep(model, loss, capture=Recorder(), precision="fp32")
    with pytest.raises(UnsupportedError, match="waits for the device"):
        step(language_batch())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert step.taken == 0
    after = TrainStep(model, stranger_loss, capture=Recorder(), precision="fp32")
    after(language_batch())
    assert after.taken == 1


def test_what_was_captured_at_step_0_is_right_at_step_10_000():
    batches = [language_batch(i) for i in range(4)]
    settings = OptimizerConfig(lr=1e-2, warmup=10, clip=0.5)
    first = TrainStep(build(LANGUAGE, impl="reference", seed=3), None, settings, steps=10_004, capture=False, seed=5)
    for batch in batches:
        first(batch)
    late = first.state_dict()
    late["seed_step"][1], late["applied"] = 10_000, torch.full((1,), 9_998.0)  # two were skipped
    late["skipped"] = torch.tensor([2, 0])
    found = []
    for capture in (False, Recorder()):
        model = build(LANGUAGE, impl="reference", seed=3)
        step = TrainStep(model, None, settings, steps=10_004, capture=capture, seed=5)
        step(batches[0])  # captured at step 0
        model.load_state_dict(first.model.state_dict())
        step.load_state_dict(late)
        for batch in batches:
            step(batch)
        found.append(step)
    calls, replayed = found
    assert differences(calls, replayed) == []
    metrics = replayed.metrics(10_000)
    assert [m.step for m in metrics] == [10_000, 10_001, 10_002, 10_003]
    assert metrics[-1].lr < metrics[0].lr < 1e-7  # the end of the schedule
    assert int(replayed.update.applied) == 10_002


def test_capture_and_warm_up_leave_the_first_step_first():
    step = TrainStep(stranger(), stranger_loss, capture=Recorder(), precision="fp32")
    step(language_batch())
    assert step.taken == 1
    assert int(step.update.applied) == 1
    assert len(step.metrics()) == 1


@pytest.mark.parametrize("own", [False, True])
def test_no_fill_beyond_the_named_ones(own):
    recorder = Recorder()
    model, loss = (build(LANGUAGE, impl="reference", seed=3), None) if own else (stranger(), stranger_loss)
    step = TrainStep(model, loss, capture=recorder, precision="bf16")
    step(language_batch())
    fills = {name for name in recorder.operations if any(word in name for word in ("zero", "fill", "ones", "full"))}
    # masks and embedding's gradient are the model's own; a stranger's backward pass starts with a fill
    named = {"aten.masked_fill.Scalar", "aten.full_like.default", "aten.ones.default"}
    named |= {"aten.embedding_dense_backward.default"}
    assert fills <= named | (set() if own else {"aten.ones_like.default"})
    assert own or "aten.ones_like.default" in fills


def test_a_stranger_may_write_to_the_gradient_of_its_loss():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(2)

    settings = OptimizerConfig(lr=1e-30, floor=0.0, clip=0.0)
    step = TrainStep(stranger(), lambda model, batch: Doubled.apply(stranger_loss(model, batch)), settings)
    for _ in range(3):
        step(language_batch())
    norms = [m.norm for m in step.metrics()]
    assert norms[0] == norms[1] == norms[2]


def test_a_part_of_the_model_in_evaluation_is_another_program():
    """What a step does follows from the mode of every module, and not only the model's own."""
    steps = []
    for capture in (Recorder(), False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        step = TrainStep(model, lambda model, x: model(x).square().mean(), SETTINGS, precision="fp32", capture=capture)
        for number in range(6):
            model[1].train(number % 3 != 0)
            step(torch.randn(8, 4, generator=torch.Generator().manual_seed(number)))
        steps.append(step)
    assert differences(*steps) == []
    assert torch.equal(*(step.model[1].running_mean for step in steps))


@pytest.mark.parametrize("capture", [Recorder(), False])
def test_a_buffer_that_the_model_writes_is_refused_in_bf16(capture):
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

    def loss(model, batch):
        return model.norm(model.linear(batch)).square().mean()

    step = TrainStep(Running(), loss, capture=capture, precision="bf16")
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d\.running_mean.*bf16-autocast"):
        step(torch.randn(8, 4))
    assert step.taken == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
