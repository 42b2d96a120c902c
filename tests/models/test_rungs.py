"""The rungs: names, and that each computes the reference's losses and gradients, masks included."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from error_budget import DEVICE, check
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.errors import UnsupportedError
from ridgeline.models import (
    Category,
    ControllerPolicy,
    DecoderConfig,
    Head,
    LanguageConfig,
    LanguageModel,
    ModelConfig,
    PolicyConfig,
    build,
)
from ridgeline.models.rungs import RUNGS, find_rung
from ridgeline.ops.dropout import DropoutState
from ridgeline.optim import OptimizerConfig

pytest.importorskip("triton")

B, T = 2, 13
TRUNK = {"layers": 1, "width": 32, "heads": 2, "context": T}
LADDER = [*RUNGS, "fused"]
SINGLES = ["m1+pointwise", "m1+attention", "m2+reuse", "m3+pointwise", "r16+recompute", "r16-pointwise+recompute"]
POLICY = PolicyConfig(
    decoder=DecoderConfig(**TRUNK, positions="relative", position_table=21, dropout=0.2),  # type: ignore[arg-type]
    categories=(Category(name="stage", rows=5, width=4), Category(name="action", rows=30, width=6, columns=2)),
    numbers=3,
    heads=(Head(name="c", classes=9), Head(name="main", classes=13), Head(name="buttons", classes=6)),
    previous=("main", "c"),
)
LANGUAGE = LanguageConfig(
    decoder=DecoderConfig(**TRUNK, kv_heads=1, norm="rmsnorm", bias=False, gelu="tanh", mlp_width=40),  # type: ignore[arg-type]
    vocabulary=11,
)
CONFIGS = {"policy": POLICY, "language": LANGUAGE}
STATE = DropoutState(torch.tensor([3, 4], device=DEVICE), sample_offset=2)


def make(task: str) -> nn.Module:
    """A small model of a task."""
    return perturbed(CONFIGS[task])


def perturbed(config: ModelConfig) -> nn.Module:
    """A model of weights that bf16 holds, biases and scales off their trivial values."""
    model = build(config, impl="reference", seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
    return model.to(DEVICE)


def make_batch(task: str, seed: int = 3, samples: int = B) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*highs: int) -> Tensor:
        return torch.stack([torch.randint(high, (samples, T), generator=generator) for high in highs], dim=-1)

    if task == "language":
        batch = {"tokens": draw(11)[..., 0], "targets": draw(11)[..., 0]}
    else:
        numbers = torch.randn(samples, T, 3, generator=generator).bfloat16().float()
        batch = {
            "categories": draw(5, 30, 30), "numbers": numbers, "previous": draw(9, 13, 6), "targets": draw(9, 13, 6)
        }  # fmt: skip
    batch["targets"][1, 4:] = -100
    return {name: part.to(DEVICE) for name, part in batch.items()}


def run(model: nn.Module, impl: str, dtype: torch.dtype, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every loss and the gradient of every weight."""
    model = copy.deepcopy(model).to(dtype)
    assert isinstance(model, LanguageModel | ControllerPolicy)
    model.decoder.impl = impl
    batch = {name: part.to(dtype) if part.is_floating_point() else part for name, part in batch.items()}
    losses = model.losses(batch, STATE)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(torch.stack(list(losses.values())).sum(), list(named.values()))
    return {name: loss.detach() for name, loss in losses.items()} | dict(zip(named, gradients, strict=True))


def within_pytorchs(
    model: nn.Module, got: dict[str, Tensor], budget: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Gradients within the error that PyTorch has in the same storage; losses, single numbers that a sum of roundings
    may hit by luck, within a quarter of a unit of that storage.
    """
    weights = dict(model.named_parameters())
    for name, value in exact.items():
        if name in weights:
            check(name, got[name], budget[name], value, gradient=True)
        else:
            assert abs(float(got[name] - value)) <= torch.finfo(torch.bfloat16).eps / 4 * abs(float(value)), name


@functools.cache
def case(task: str, samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Model, batch, the fp64 reference and PyTorch's bf16 result."""
    model, batch = make(task), make_batch(task, samples=samples)
    exact, budget = (run(model, "reference", dtype, batch) for dtype in (torch.float64, torch.bfloat16))
    return model, batch, exact, budget


def slow(task: str) -> Any:
    return pytest.param(task, marks=pytest.mark.slow)


@pytest.mark.parametrize("task", ["policy", slow("language")])
@pytest.mark.parametrize("impl", [*LADDER, *SINGLES])
def test_fp32_losses_and_gradients_equal_the_reference_to_rounding(impl: str, task: str) -> None:
    model, batch, exact, _ = case(task, B)
    for name, got in run(model, impl, torch.float32, batch).items():
        error = float((got.double() - exact[name]).norm() / exact[name].norm())
        assert error < 3e-6, f"{name}: {error:.2g}"


@pytest.mark.parametrize("task", [slow("policy"), "language"])
@pytest.mark.parametrize("impl", LADDER)
def test_bf16_error_is_within_pytorchs(impl: str, task: str) -> None:
    model, batch, exact, budget = case(task, 2 * B)
    within_pytorchs(model, run(model, impl, torch.bfloat16, batch), budget, exact)


@pytest.mark.parametrize("impl", ["m0", "m3", slow("r16"), slow("m3+pointwise")])
def test_training_steps_equal_the_references(impl: str) -> None:
    """Through the engine: sinks, lanes, and buffers that hold what an earlier step left."""
    weights = []
    for name in ("reference", impl):
        model = make("policy")
        assert isinstance(model, ControllerPolicy)
        model.decoder.impl = name
        lanes = RUNGS["r16"].lanes if name == "r16" else 1
        step = TrainStep(model, optimizer=OptimizerConfig(lr=1e-2), precision="fp32", capture=False, lanes=lanes)
        for seed in range(2):
            step(make_batch("policy", seed))
        weights.append((torch.tensor([m.loss for m in step.metrics()]), step.flat.masters.clone()))
    torch.testing.assert_close(weights[1][0], weights[0][0], rtol=2e-6, atol=0)
    # AdamW divides a gradient by its own size, so where it is nearly zero its rounding is a part of the step of 1e-2
    torch.testing.assert_close(weights[1][1], weights[0][1], rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hal-20m", "gpt2-c256"])
@pytest.mark.parametrize("impl", LADDER)
def test_real_shapes_are_within_pytorchs_error(impl: str, name: str) -> None:
    whole = workload(name, batch=4)
    trunk = dataclasses.replace(whole.model.decoder, layers=2)
    case = dataclasses.replace(whole, model=dataclasses.replace(whole.model, decoder=trunk))
    model, batch = perturbed(case.model), random_batch(case, DEVICE)
    exact, budget, got = (
        run(model, kind, dtype, batch)
        for kind, dtype in (("reference", torch.float64), ("reference", torch.bfloat16), (impl, torch.bfloat16))
    )  # fmt: skip
    within_pytorchs(model, got, budget, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["m3", "r16"])
def test_captured_steps_equal_uncaptured_ones_bit_for_bit(impl: str) -> None:
    results = []
    for capture in (False, True):
        model = make("policy")
        assert isinstance(model, ControllerPolicy)
        model.decoder.impl = impl
        step = TrainStep(model, precision="bf16", capture=capture, lanes=RUNGS[impl].lanes)
        for seed in range(5):
            step(make_batch("policy", seed))
            torch.cuda.empty_cache()  # what a graph still writes to must not go back to the card
        results.append(([m.loss for m in step.metrics()], step.flat.masters.clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("task", "impl"), [("language", "m3"), ("language", "m2-pointwise+reuse"), ("policy", "r16")])
def test_a_pass_gives_back_every_buffer_it_reuses(task: str, impl: str) -> None:
    """A captured step writes at every replay to the buffers it was captured with: none may be lost, or leave."""
    from ridgeline.models.rungs.run import _BUFFERS

    model, batch = make(task), make_batch(task)
    assert isinstance(model, LanguageModel | ControllerPolicy)
    model.decoder.impl = impl
    shelves, counts = [], []
    for _ in range(2):
        torch.autograd.grad(model.loss(batch, STATE), list(model.parameters()))
        (buffers,) = _BUFFERS[model.decoder].values()
        shelves.append({x.data_ptr() for shelf in buffers._shelves.values() for x in shelf})
        counts.append(buffers.allocated)
    assert shelves[0] == shelves[1]
    leaving = 2  # the stack's output and its input's gradient
    assert counts == [len(shelves[0]) + leaving * (step + 1) for step in range(2)]
    with torch.no_grad():
        model.loss(batch, STATE)  # no backward pass follows: it must leave the shelves alone
    (buffers,) = _BUFFERS[model.decoder].values()
    assert {x.data_ptr() for shelf in buffers._shelves.values() for x in shelf} == shelves[0]


def test_evaluation_draws_no_masks() -> None:
    model, batch = make("policy").eval(), make_batch("policy")
    assert isinstance(model, ControllerPolicy)
    expected = model.losses(batch)
    for impl in ("m0", "r16"):
        model.decoder.impl = impl
        torch.testing.assert_close(model.losses(batch), expected, rtol=1e-5, atol=1e-6)


def test_a_rung_is_the_one_before_with_its_changes() -> None:
    assert list(RUNGS) == ["m0", "m1", "m2", "m3", "r16"]
    assert find_rung("m3") == RUNGS["m3"]
    alone = find_rung("m2+zero_fill")
    assert (alone.zero_fill, alone.reuse, alone.capture) == (False, False, False)
    without = find_rung("m3-zero_fill")
    assert (without.zero_fill, without.reuse, without.capture) == (True, True, True)
    both = find_rung("m2+zero_fill+reuse")
    assert (both.zero_fill, both.reuse, both.capture) == (False, True, False)
    assert find_rung("m3+lanes").lanes == 2
    assert find_rung("r16-pointwise").pointwise == "fused"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("m4", "did you mean"),
        ("m2+capure", "did you mean capture"),
        ("m2+lanes", "unknown change"),
        ("m0-tiles", "no rung before m0"),
        ("r16+lanes", "known: recompute"),
        ("m2+", "unknown change"),
    ],
)
def test_unknown_rungs_and_changes_are_refused(name: str, part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        find_rung(name)
    with pytest.raises(UnsupportedError):
        build(LANGUAGE, impl=name)


def test_a_head_width_without_a_tile_is_refused() -> None:
    trunk = DecoderConfig(layers=1, width=24, heads=3, context=T)
    model = build(LanguageConfig(vocabulary=11, decoder=trunk), impl="m2").to(DEVICE)
    with pytest.raises(UnsupportedError, match="head widths"):
        model.loss(make_batch("language"))
