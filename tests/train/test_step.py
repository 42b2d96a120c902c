import shutil

import pytest
import torch

from ridgeline.engine import TrainStep
from ridgeline.errors import CheckpointError, DivergedError, OutOfMemoryError, UnsupportedError
from ridgeline.models import DecoderConfig, Head, LanguageConfig, PolicyConfig, build
from ridgeline.models.language import IGNORE
from ridgeline.optim import OptimizerConfig
from ridgeline.train.step import TorchStep, split_batch

OPTIMIZER = OptimizerConfig(lr=1e-2, floor=1e-3, warmup=2, weight_decay=0.1)


def language_model(layers=2):
    decoder = DecoderConfig(layers=layers, width=16, heads=2, context=8)
    return build(LanguageConfig(decoder=decoder, vocabulary=11), seed=1)


def batch(seed, windows=4):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (windows, 9), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def torch_step(model, **changed):
    return TorchStep(model, OPTIMIZER, **{"steps": 20, "precision": "fp32", **changed})


def engine_step(model, **changed):
    return TrainStep(model, optimizer=OPTIMIZER, steps=20, **{"precision": "fp32", **changed})


def test_the_plain_step_is_the_engines_step():
    one, other = language_model(), language_model()
    plain, engine = torch_step(one), engine_step(other)
    for seed in range(6):
        plain(batch(seed))
        engine(batch(seed))
    for ours, theirs in zip(plain.metrics(), engine.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, weight in one.state_dict().items():
        if not name.endswith("qkv.bias"):  # the keys' bias has no gradient but rounding, which AdamW blows up
            torch.testing.assert_close(weight, other.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("makes", [(torch_step, engine_step), (engine_step, torch_step)])
def test_a_run_can_change_its_engine(makes):
    first_make, second_make = makes
    model = language_model()
    step = first_make(model)
    for seed in range(3):
        step(batch(seed))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in step.state_dict().items()}
    other = language_model()
    other.load_state_dict(weights)
    changed = second_make(other)
    changed.load_state_dict(state)
    for seed in range(3, 6):
        step(batch(seed))
        changed(batch(seed))
    for ours, theirs in zip(step.metrics(3), changed.metrics(3), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_parts_of_a_batch_weigh_as_much_as_their_targets():
    whole = batch(0)
    whole["targets"][:2, 3:] = IGNORE
    whole["targets"][3] = IGNORE
    one, other = language_model(), language_model()
    plain, cut = torch_step(one), torch_step(other, accumulate=4)
    for _ in range(3):
        plain(whole)
        cut(whole)
    for ours, theirs in zip(plain.metrics(), cut.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert [share for _, share in split_batch(whole, 4)] == [3 / 14, 3 / 14, 8 / 14]


def test_a_policy_trains_in_parts_too():
    decoder = DecoderConfig(layers=1, width=16, heads=2, context=8, positions="relative")
    config = PolicyConfig(
        decoder=decoder, heads=(Head(name="stick", classes=3), Head(name="fire", classes=2)), numbers=2
    )
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(2, (4, 8, 2), generator=generator)
    window = {"numbers": torch.randn(4, 8, 2, generator=generator), "previous": targets.roll(1, 1), "targets": targets}
    window["targets"][2, 5:] = IGNORE
    one, other = build(config, seed=0), build(config, seed=0)
    plain, cut = torch_step(one), torch_step(other, accumulate=2)
    for _ in range(3):
        plain(window)
        cut(window)
    for ours, theirs in zip(plain.metrics(), cut.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-autocast", "fp16-autocast"])
def test_reduced_precision_follows_fp32(precision):
    exact, rough = torch_step(language_model()), torch_step(language_model(), precision=precision)
    for seed in range(10):
        exact(batch(seed))
        rough(batch(seed))
    losses = [torch.tensor([entry.loss for entry in step.metrics()]) for step in (exact, rough)]
    assert 0 < (losses[0] - losses[1]).abs().max() < 0.05


def test_the_loss_scale_answers_an_overflow_and_is_kept():
    model = language_model()
    step = torch_step(model, precision="fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(batch(0))
    step.check()
    assert step.metrics()[0].skipped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    state = step.state_dict()
    assert state["loss_scale"].item() == 2.0**39
    other = torch_step(language_model(), precision="fp16")
    other.load_state_dict(state)
    assert other.scaler.get_scale() == 2.0**39


def test_a_scale_that_no_longer_helps_stops_the_run():
    step = torch_step(language_model(), precision="fp16")
    with torch.no_grad():
        step.model.head.weight[0, 0] = float("nan")
    for seed in range(19):
        step(batch(seed))
    step.check()
    step(batch(19))
    with pytest.raises(DivergedError, match=r"stopped at step 20: .*; first bad tensor: output of head"):
        step.check()


class Spoiled(torch.nn.Module):
    """A model whose loss is spoiled in a way of its own once `way` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.root, self.way = torch.nn.Linear(8, 1), torch.nn.Parameter(torch.zeros(1)), ""

    def loss(self, batch, dropout=None):
        x = self.linear(torch.nn.functional.dropout(batch["tokens"].float(), 0.5)).square().mean()
        if self.way == "output":
            x = self.linear(batch["tokens"] / 0).mean()
        if self.way == "loss":
            x = x / 0
        if self.way == "gradient":
            x = x + self.root.sqrt().sum()
        if self.way == "norm":
            x = x + 3e38 * (self.root.sum() + self.linear.bias.sum())
        return x


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16-autocast"}])
@pytest.mark.parametrize("make", [torch_step, lambda model, **how: engine_step(model, bad_steps=1, **how)])
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("output", "output of linear"),
        ("loss", "the loss"),
        ("gradient", "gradient of root"),
        ("norm", "the norm of the gradients, whose squares are more than fp32 holds"),
    ],
)
def test_on_the_cpu_a_step_that_is_not_finite_changes_nothing_and_names_what_is_not(way, told, make, settings):
    model = Spoiled()
    step = make(model, **settings)
    step(batch(0))
    step.check()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.way = way
    step(batch(1))
    chance = torch.get_rng_state()
    with pytest.raises(DivergedError, match=rf"stopped at step 2: .*; first bad tensor: {told}"):
        step.check()
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert step.metrics(1)[0].skipped


def test_a_batch_that_finds_no_memory_says_what_needs_how_much(monkeypatch):
    step = torch_step(language_model())
    step(batch(0))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(step, "_loss", lambda part: torch.zeros(10**14).sum())
        told = r"out of memory on a batch of \(4, 8\) int64, .* step keeps weights 0\.00, gradients .*lower the batch"
        with pytest.raises(OutOfMemoryError, match=told):
            step(batch(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    step(batch(1))
    assert len(step.metrics()) == 2


def test_after_a_step_that_is_not_finite_nothing_more_is_learned_before_it_is_told():
    model = Spoiled()
    step = torch_step(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.way = "loss"
    step(batch(0))
    model.way = ""
    step(batch(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(DivergedError, match="stopped at step 1"):
        step.check()


def test_without_a_schedule_the_rate_is_what_was_set():
    step = torch_step(language_model(), steps=None)
    step(batch(0))
    step.set_rate(0.5)
    step(batch(1))
    assert [entry.lr for entry in step.metrics()] == [OPTIMIZER.lr, 0.5]


def test_clipping_bounds_what_a_step_can_do_and_the_norm_is_told_unclipped():
    free, bound = language_model(), language_model()
    steps = [
        TorchStep(model, OptimizerConfig(lr=1e-3, clip=clip, eps=1.0), steps=None, precision="fp32")
        for model, clip in ((free, 0.0), (bound, 1e-3))
    ]
    start = language_model().state_dict()
    for step in steps:
        step(batch(0))
    norms = [step.metrics()[0].norm for step in steps]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-2
    moved = [sum((w - start[name]).abs().sum() for name, w in model.state_dict().items()) for model in (free, bound)]
    assert moved[1] < 0.2 * moved[0]


def test_state_of_another_model_is_refused():
    step = torch_step(language_model())
    step(batch(0))
    state = step.state_dict()
    del state["second.head.weight"]
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        torch_step(language_model()).load_state_dict(state)


def test_compile_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler on the CPU and no-such-compiler is missing"):
        torch_step(language_model(), compile="default")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_compiled_with_a_cpp_compiler(mode):
    if shutil.which("g++") is None:
        pytest.skip("needs the C++ compiler g++")
    one, other = language_model(layers=1), language_model(layers=1)
    plain, compiled = torch_step(one), torch_step(other, compile=mode)
    for seed in range(4):
        plain(batch(seed))
        compiled(batch(seed))
    for ours, theirs in zip(plain.metrics(), compiled.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
