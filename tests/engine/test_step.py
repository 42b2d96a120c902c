"""TrainStep: any module, accumulation, shapes, guards, resuming, bad input."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.helpers import LANGUAGE, SETTINGS, language_batch, strange_step, stranger, stranger_loss
from engine.recorder import Recorder
from ridgeline.engine import TrainStep
from ridgeline.engine.slots import ALIGN
from ridgeline.engine.step import MAX_SHAPES
from ridgeline.errors import ConfigError, OutOfMemoryError, RidgelineError, UnsupportedError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig, build_adamw


def test_trains_as_a_pytorch_loop_does():
    model, step = stranger(), strange_step()
    optimizer = build_adamw(
        model, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    losses = []
    for i in range(15):
        loss = stranger_loss(model, language_batch(i % 3))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step(language_batch(i % 3))
    assert [m.loss for m in step.metrics()] == pytest.approx(losses, rel=1e-4)
    for name, tensor in step.model.state_dict().items():
        if name != "attn.bias":  # the keys' share has no gradient but rounding, which Adam blows up
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_made_ready_without_a_step(caplog):
    """A shape can be captured before its turn: nothing is learned from the batch, and the first step is the first."""
    steps = [strange_step(capture=Recorder()) for _ in range(2)]
    steps[0].prepare(language_batch(0))
    steps[0].prepare({name: tensor[:1] for name, tensor in language_batch(0).items()})
    assert steps[0].taken == 0
    assert not caplog.records  # a further shape that was announced is no surprise
    for step in steps:
        step(language_batch(1))
    assert torch.equal(steps[0].flat.masters, steps[1].flat.masters)
    assert steps[0].metrics() == steps[1].metrics()


@pytest.mark.parametrize("cut", [{"accumulate": 3}, {"lanes": 3}, {"accumulate": 3, "lanes": 2}])
def test_a_cut_batch_equals_the_whole_with_missing_targets(cut):
    batch = language_batch(batch=6)
    batch["targets"][0] = -100  # parts with unequal numbers of targets
    batch["targets"][1, :5] = -100
    whole, parts = (
        TrainStep(build(LANGUAGE, impl="reference", seed=3), optimizer=SETTINGS, precision="fp32", seed=4, **how)
        for how in ({}, cut)
    )
    for _ in range(5):
        whole(batch)
        parts(batch)
    for a, b in zip(whole.metrics(), parts.metrics(), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.norm == pytest.approx(b.norm, rel=1e-4)
    torch.testing.assert_close(whole.flat.masters, parts.flat.masters, rtol=1e-3, atol=1e-4)


def test_a_part_without_any_target_counts_for_nothing():
    batch = language_batch(batch=4)
    batch["targets"][:2] = -100
    step = TrainStep(build(LANGUAGE, impl="reference", seed=3), precision="fp32", accumulate=2)
    step(batch)
    assert not step.metrics()[0].skipped


def test_a_batch_that_a_model_made_brings_no_graph_along():
    step = TrainStep(nn.Linear(3, 1), lambda model, x: model(x).square().mean(), precision="fp32")
    maker = nn.Linear(3, 3)
    for _ in range(2):
        step(maker(torch.randn(4, 3)))
    assert not any(tensor.requires_grad for tensor in step._last.feed.static)


def test_a_model_that_was_changed_is_noticed():
    step = strange_step(capture=Recorder())
    step(language_batch())
    step.check()
    step.model.attn.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"attn\.weight was added, frozen or thawed"):
        step.check()
    step = strange_step(capture=False)
    step(language_batch())
    step.model.ln.weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(ConfigError, match=r"LayerNorm\.weight was replaced"):
        step(language_batch())
    assert not step.model.ln.weight.any()


@pytest.mark.parametrize("settings", [{"capture": False}, {"capture": Recorder()}])
def test_a_batch_that_finds_no_memory_says_what_needs_how_much(settings):
    def loss(model, batch):
        return stranger_loss(model, batch) + torch.zeros(10**14 if len(batch["tokens"]) > 4 else 1).sum()

    step = TrainStep(stranger(), loss, precision="fp32", **settings)
    step(language_batch())
    before = step.flat.masters.clone()
    told = r"out of memory on a batch of \(8, 8\) int64.*GiB the step keeps master weights 0\.00, .*lower the batch"
    with pytest.raises(OutOfMemoryError, match=told):
        step(language_batch(batch=8))
    assert torch.equal(step.flat.masters, before)
    step(language_batch())
    assert step.taken == 2


def test_a_new_shape_is_a_new_program_and_says_so(caplog):
    step = strange_step(capture=Recorder())
    with caplog.at_level(logging.WARNING, logger="ridgeline.engine"):
        step(language_batch())
        assert not caplog.records
        step(language_batch(batch=2, context=5))
        step(language_batch())
    assert len(caplog.records) == 1
    assert "(2, 5)" in caplog.text
    assert step.taken == 3
    for context in range(1, MAX_SHAPES - 1):
        step(language_batch(batch=3, context=context))
    with pytest.raises(ConfigError, match="pad batches"):
        step(language_batch(batch=7))


def test_weights_for_evaluation_are_those_of_the_step():
    step = strange_step(precision="bf16")
    step(language_batch())
    expected = copy.deepcopy(step.model).bfloat16()
    with step.weights() as model:
        assert torch.equal(stranger_loss(model, language_batch()), stranger_loss(expected, language_batch()))


def test_the_run_stops_with_the_first_bad_tensor():
    step = strange_step(bad_steps=3)
    step(language_batch())
    step.check()
    with torch.no_grad():
        step.model.attn.weight[0, 0] = float("nan")
    for _ in range(3):
        step(language_batch())
    with pytest.raises(
        RidgelineError, match=r"step 4: .* 3 times in a row; first bad tensor: output of attn; .*step 1$"
    ):
        step.check()


def test_a_bad_tensor_among_several_results_is_named():
    class Pair(nn.Module):
        def forward(self, x):
            return x, [x / 0]

    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.pair = nn.Parameter(torch.ones(3)), Pair()

        def forward(self, x):
            first, (second,) = self.pair(x * self.scale)
            return (first + second).sum()

    step = TrainStep(Paired(), lambda model, batch: model(batch), precision="fp32", bad_steps=1)
    step(torch.ones(2, 3))
    with pytest.raises(RidgelineError, match="output of pair"):
        step.check()


def test_a_bad_gradient_is_named():
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return (x * self.scale.sqrt()).sum()  # derivative at 0 is infinite

    step = TrainStep(Rooted(), lambda model, batch: model(batch), precision="fp32", bad_steps=1)
    step(torch.ones(2, 3))
    with pytest.raises(RidgelineError, match="gradient of scale"):
        step.check()


def test_autocast_and_floating_inputs():
    class Regressor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

    seen = []

    def loss(model, batch):
        x, y = batch
        seen.append((x.dtype, model.linear(x).dtype, model.linear.weight.dtype))
        return (model.linear(x) - y).square().mean()

    for precision in ("bf16", "bf16-autocast", "fp32"):
        step = TrainStep(Regressor(), loss, precision=precision)
        step((torch.randn(8, 4), torch.randn(8, 1)))
    half, full = torch.bfloat16, torch.float32
    assert seen == [(half, half, half), (full, half, full), (full, full, full)]


def test_the_users_product_precision_is_left_alone():
    before = torch.get_float32_matmul_precision()
    strange_step(precision="tf32")(language_batch())
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strange_step(precision="bf61"), "unknown precision 'bf61'; did you mean bf16"),
        (lambda: strange_step(capture=True), "capture=False"),
        (lambda: strange_step(capture="yes"), "capture must be True, False, None or a function"),
        (lambda: strange_step(accumulate=0), r"integers of at least 1, got \(0, 1, 20\)"),
        (lambda: strange_step(lanes=1.5), r"integers of at least 1, got \(1, 1\.5, 20\)"),
        (lambda: strange_step(weight=3), "weight must be a function of a part of a batch, got 3"),
        (lambda: strange_step(weight=lambda part: 1.0, lanes=2)(language_batch()), "return a scalar tensor; got float"),
        (lambda: strange_step(compile="fastest"), r"torch\.compile: Unrecognized mode=fastest"),
        (lambda: TrainStep(nn.Linear(2, 2)), r"no method loss\(batch, dropout\)"),
        (lambda: TrainStep(nn.Linear), r"must be an nn\.Module, got <class"),
        (
            lambda: TrainStep(nn.Linear(2, 2), "cross-entropy"),
            "must be a function of the model and a batch, got 'cross",
        ),
        (
            lambda: TrainStep(nn.Linear(2, 2), torch.sum, torch.optim.SGD([torch.ones(1)])),
            "must be of class OptimizerConfig, got SGD",
        ),
        (lambda: TrainStep(nn.Linear(2, 2, device="meta"), torch.sum), "weight is on meta and has no values"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(RidgelineError, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "one common number of samples"),
        ({"tokens": [1, 2]}, "holds tensors"),
        ({"tokens": torch.zeros(4, 8).long(), "targets": torch.zeros(3, 8).long()}, r"\[3, 4\]"),
        (torch.tensor(1.0), "of no dimension"),
        ({"tokens": torch.zeros(5, 8).long(), "targets": torch.zeros(5, 8).long()}, "does not divide a batch of 5"),
    ],
)
def test_batches_that_cannot_be(batch, message):
    with pytest.raises(ConfigError, match=message):
        strange_step(accumulate=2)(batch)


@pytest.mark.parametrize("capture", [False, Recorder()])
def test_a_loss_that_is_no_scalar(capture):
    step = TrainStep(stranger(), lambda model, batch: model(**batch_names(batch))[0], precision="fp32", capture=capture)
    before = step.flat.masters.clone()
    with pytest.raises(ConfigError, match=r"scalar tensor.*shape \(4, 8, 11\)"):
        step(language_batch())
    assert torch.equal(before, step.flat.masters)
    assert step.taken == 0


@pytest.mark.parametrize("capture", [False, Recorder()])
def test_a_loss_that_nothing_can_be_learned_from(capture):
    for loss in (lambda model, batch: stranger_loss(model, batch).detach(), lambda model, batch: torch.tensor(1.0)):
        step = TrainStep(stranger(), loss, precision="fp32", capture=capture)
        with pytest.raises(ConfigError, match="the loss has no gradient: it was detached"):
            step(language_batch())
        assert step.taken == 0


class Roundabout(nn.Module):
    """Parameters that its forward pass reads from a list; a block under a checkpoint; a backward pass of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(3, 3), nn.Linear(3, 3)
        self.kept = list(self.first.parameters())

    def forward(self, x):
        if self.way == "list":
            return self.second(nn.functional.linear(x, *self.kept)).mean()
        if self.way == "checkpoint":
            return self.second(checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=True)).mean()
        self.first(x).mean().backward()
        return self.second(x).mean()


@pytest.mark.parametrize("capture", [False, Recorder()])
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("list", r"reads parameter first\.(weight|bias) from a list"),
        ("checkpoint", "use_reentrant=True; pass False"),
        ("backward", "a backward pass of its own"),
    ],
)
def test_gradients_that_would_go_past_the_step_are_refused(way, message, capture):
    step = TrainStep(Roundabout(way), lambda model, x: model(x), precision="fp32", capture=capture)
    before = step.flat.masters.clone()
    with pytest.raises(ConfigError, match=message):
        step(torch.randn(4, 3))
    assert step.taken == 0
    assert torch.equal(step.flat.masters, before)


def test_a_complex_loss_and_sparse_gradients_are_refused():
    step = TrainStep(nn.Linear(3, 1), lambda model, x: model(x).mean() + 0j, precision="fp32")
    with pytest.raises(ConfigError, match=r"scalar tensor.*complex64 of shape \(\)"):
        step(torch.ones(4, 3))
    step = TrainStep(nn.Embedding(5, 3, sparse=True), lambda model, ids: model(ids).mean(), precision="fp32")
    with pytest.raises(UnsupportedError, match=r"must be dense, got torch\.sparse_coo"):
        step(torch.ones(4, 2).long())


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"lanes": 2}])
def test_a_batch_that_fails_leaves_no_trace(settings):
    def loss(model, batch):
        if batch["tokens"].max() == 0:
            raise ValueError("no tokens")
        return stranger_loss(model, batch)

    steps = [TrainStep(stranger(), loss, precision="bf16", capture=False, **settings) for _ in range(2)]
    spoilt = {name: tensor.clone() for name, tensor in language_batch().items()}
    spoilt["tokens"][2:] = 0  # the second of two pieces fails, when the first one's gradients are there
    if not settings:
        spoilt["tokens"][:] = 0
    for number in range(3):
        for step in steps:
            step(language_batch(number))
        with pytest.raises(ValueError, match="no tokens"):
            steps[1](spoilt)
    assert torch.equal(steps[0].flat.masters, steps[1].flat.masters)
    assert [m.loss for m in steps[0].metrics()] == [m.loss for m in steps[1].metrics()]
    assert steps[1].taken == 3


def batch_names(batch):
    return {"idx": batch["tokens"], "targets": batch["targets"]}


def test_what_the_model_refuses_is_reported_with_the_shapes():
    step = strange_step(capture=Recorder())
    batch = {"tokens": torch.zeros(2, 9).long(), "targets": torch.zeros(2, 9).long()}  # longer than the context
    with pytest.raises(UnsupportedError, match=r"on a batch of \(2, 9\) int64"):
        step(batch)
    step(language_batch())
    assert step.taken == 1


def test_unused_parameters_are_fine():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    step = TrainStep(
        Spare(), lambda m, x: m.used(x).mean(), OptimizerConfig(weight_decay=0), precision="fp32", capture=Recorder()
    )
    before = step.model.spare.weight.clone()
    step(torch.randn(4, 3))
    assert torch.equal(before, step.model.spare.weight)


def test_memory_by_name():
    step = strange_step(precision="bf16", accumulate=2, capture=Recorder())
    step(language_batch())
    memory, size = step.memory(), step.flat.size
    assert memory["master weights"] == 4 * size
    assert memory["weight copies"] == 2 * size
    assert memory["optimiser moments"] == 8 * size
    assert memory["gradients"] == 4 * (2 * size + ALIGN)  # the sum, and where the second part is converted
    assert memory["batches"] == 2 * 4 * 8 * 8
    assert strange_step().memory()["weight copies"] == 0
