"""Squares that kernels leave of the gradients they write: the norm is the same, whatever of them may be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.helpers import LANGUAGE, gather, language_batch
from models.test_fused_choices import grouped
from ridgeline.engine import FlatParameters, LossScale, TrainStep, Update
from ridgeline.engine import step as engine
from ridgeline.models import build
from ridgeline.models.fused import gradients, stack
from ridgeline.models.fused.choices import Choices
from ridgeline.ops.optimizer import KnownSquares, triton
from ridgeline.ops.sink import ROOM, GradientSink, Squares, room_for
from ridgeline.optim import OptimizerConfig

CONFIG = OptimizerConfig(lr=1e-2, clip=0.1)
Known = list[KnownSquares | None]


def leaving(group: Any, also: Any, room: Callable[[int], Tensor | None] | None = None) -> None:
    """The grouped launch played by plain torch: one number a gradient, what lies beyond is not looked at."""
    grouped(group, also)
    targets = [g.dweight_MK for g in group] + [g.dbias_M for g in group if g.dbias_M is not None]
    targets += [job.dst_RC for job in also]
    squares = None if room is None else room(len(targets))
    if squares is not None:
        squares.copy_(torch.stack([target.square().sum() for target in targets]))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Fused blocks whose weight gradients are one launch, updated by the kernels; what each update knew."""
    seen: Known = []
    raw = triton.adamw_raw

    def spied(*arguments: Any, known: KnownSquares | None, **rest: Any) -> None:
        seen.append(known)
        raw(*arguments, known=known, **rest)

    monkeypatch.setattr(triton, "adamw_raw", spied)
    monkeypatch.setattr(gradients, "weight_gradients_raw", leaving)
    choices = Choices(attention="reference", mlp="torch", rows=frozenset(), grouped=True)
    monkeypatch.setattr(stack, "choose", lambda *_: choices)
    monkeypatch.setattr(engine, "Update", functools.partial(Update, impl="triton"))
    return seen


def trained(steps: int = 2, frozen: str = "", **rest: Any) -> TrainStep:
    model = build(LANGUAGE, impl="fused", seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    step = TrainStep(model, optimizer=CONFIG, **rest)
    for seed in range(steps):
        step(language_batch(seed))
    return step


def reported(step: TrainStep) -> float:
    """The last norm, which is that of the whole flat gradient."""
    metrics = step.metrics()[-1]
    assert not metrics.skipped
    flat = step.flat.grad[: step.flat.size].double()
    divisor = float(step.flat.lanes[0].weight) if step.update.weighted else 1.0
    assert metrics.norm == pytest.approx(float(flat.norm()) / divisor, rel=1e-5)
    return metrics.norm


def test_a_whole_step_reads_what_nobody_knows(known: Known) -> None:
    step = trained()
    assert reported(step) > CONFIG.clip
    assert len(known) == 2
    for now in known:
        assert now is not None
        rest = {slot.name for slot in step.flat.slots for start, _ in now.rest if slot.offset == start}
        assert rest
        assert not any(".blocks.0.mlp" in name or ".blocks.0.attention" in name for name in rest), rest


@pytest.mark.parametrize("cut", [{"accumulate": 2}, {"lanes": 2}])
def test_parts_and_lanes_read_everything(known: Known, cut: dict[str, int]) -> None:
    reported(trained(**cut))
    assert known == [None, None]


def test_a_frozen_weight_of_the_group_has_it_read(known: Known) -> None:
    reported(trained(frozen="decoder.blocks.0.mlp.up.weight"))
    assert known == [None, None]


def test_updates_are_those_of_a_norm_that_reads_all(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    some = trained(steps=1)
    monkeypatch.setattr(engine, "Update", functools.partial(Update, impl="torch"))
    all_read = trained(steps=1)
    assert len(known) == 1
    torch.testing.assert_close(some.flat.masters, all_read.flat.masters, rtol=1e-5, atol=1e-6)


def flat_update() -> tuple[FlatParameters, Update]:
    torch.manual_seed(0)
    flat = FlatParameters(torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.LayerNorm(90)), compute=torch.bfloat16)
    return flat, Update(flat, CONFIG, impl="triton", whole=True, scale=LossScale())


def written(flat: FlatParameters, *, bad: float = 0.0) -> None:
    """A pass in which an op writes the first two gradients and leaves their squares, and autograd gives the others."""
    lane = flat.lanes[0]
    lane.begin(add=False)
    own = lane.sinks[:2]
    for sink in own:
        sink.take()[0].normal_()
    own[1].target[0] += bad
    room = room_for(own)
    assert room is not None
    squares = room(5000)
    assert squares is not None
    squares.zero_()
    squares[4999] = sum(sink.target.square().sum() for sink in own)
    lane.gather([None, None, *(torch.randn(slot.shape) for slot in flat.slots[2:])])
    lane.loss.fill_(1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("known_ones", [True, False])
def test_what_is_not_finite_is_found(bad: float, known_ones: bool) -> None:
    flat, update = flat_update()
    before = flat.masters.clone()
    written(flat, bad=bad if known_ones else 0.0)
    if not known_ones:
        flat.lanes[0].sinks[-1].target[-1] = bad
    update()
    assert update.skipped.tolist() == [1, 1]
    assert torch.equal(flat.masters, before)
    written(flat)
    update()
    assert update.skipped.tolist() == [1, 0]
    assert not torch.equal(flat.masters, before)


def test_squares_are_of_one_pass_and_used_once() -> None:
    flat, update = flat_update()
    written(flat)
    assert flat.lanes[0].known_squares() is not None
    assert flat.lanes[0].known_squares() is None
    written(flat)
    flat.lanes[0].begin(add=True)
    assert flat.lanes[0].known_squares() is None
    gather(flat, [torch.randn(slot.shape) for slot in flat.slots])
    update()
    norm = float(flat.grad[: flat.size].norm()) / float(update.loss_scale)
    assert update.metrics()[-1].norm == pytest.approx(norm, rel=1e-5)


def test_what_is_written_twice_is_void() -> None:
    squares = Squares(torch.device("cpu"))
    first, second = (GradientSink(torch.zeros(3)) for _ in range(2))
    first.squares = second.squares = squares
    first.take(), second.take()
    assert room_for([]) is None
    assert room_for([first, GradientSink(torch.zeros(3))]) is None
    room = room_for([first, second])
    assert room is not None
    assert room(ROOM + 1) is None
    assert room(7) is not None
    second.put(torch.ones(3))
    assert room_for([second]) is None
    left, sinks = squares.settle()
    assert (len(left), sinks) == (0, set())
    second.begin(add=True)
    second.take()
    assert room_for([second]) is None
