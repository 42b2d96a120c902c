"""Mistakes that published benchmarks of this kind contain, each made impossible here.

Phases that are constants times the step; baselines of another session; differences smaller than what a session
changes; compile times that depend on who came first.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ridgeline.bench import nvml, ratios, run
from ridgeline.bench.nvml import Clocks
from ridgeline.bench.plan import Plan
from ridgeline.bench.ratios import gain, over_pytorch, ratio
from ridgeline.bench.run import run_bench
from ridgeline.bench.workloads import workload
from ridgeline.engine import TrainStep
from ridgeline.optim import OptimizerConfig
from ridgeline.records import ContenderResult, Record
from ridgeline.train.step import TorchStep

CPU = torch.device("cpu")
CASE = workload("gpt2-c256", precision="fp32").reduced()


class Slow(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there)
        return x.clone()

    @staticmethod
    def backward(ctx, dx: Tensor):
        time.sleep(ctx.back)
        return dx, None, None


class Model(nn.Module):
    """A model whose forward and backward pass take as long as they are told to."""

    def __init__(self, there: float, back: float) -> None:
        super().__init__()
        self.there, self.back = there, back
        self.linear = nn.Linear(4, 4)

    def loss(self, batch: dict[str, Tensor], dropout: object = None) -> Tensor:
        return Slow.apply(self.linear(batch["x"]), self.there, self.back).square().mean()


@pytest.mark.parametrize(("there", "back"), [(0.06, 0.02), (0.02, 0.06)])
@pytest.mark.parametrize("kind", ["torch", "engine"])
def test_phases_are_measured_and_no_shares_of_a_total(kind, there, back):
    model, batch = Model(there, back), {"x": torch.randn(2, 4)}
    step = (
        TorchStep(model, OptimizerConfig(), steps=None, precision="fp32")  # type: ignore[arg-type]
        if kind == "torch"
        else TrainStep(model, precision="fp32", capture=False)
    )
    phases = step.phases(batch, 3)
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert phases["forward"] >= 1e3 * there
    assert phases["backward"] >= 1e3 * back
    # the two shares trade places with the work, which a constant would not
    assert (phases["forward"] > phases["backward"]) == (there > back)


class Fake:
    """A team whose every turn finds the machine in another mood."""

    moods = (1.0,)
    log: list[str] = []  # noqa: RUF012

    def __init__(self, case, contender, device, plan, gpus):
        self.name, self.error, self.first_step_s = contender, "", None
        self.times_ms: list[float] = []
        self.peak = self.phases_ms = self.groups_ms_per_layer = self.overlap = None
        self.out_of_memory, self.turn, self.command = False, 0, {}
        self.log.append(f"start {contender}")

    def send(self, command):
        self.command = command

    def wait(self, limit_s, watch=None, seen=None):
        self.log.append(f"answer {self.name}")
        if "time" not in self.command:
            return {"first_step_s": 1.0}
        base = {"compile": 101.3, "graph": 107.2}.get(self.name, 120.0)
        mood = self.moods[self.turn % len(self.moods)]
        self.turn += 1
        return {"times_ms": [base * mood] * self.command["time"], "peak_memory_bytes": None}

    def dismiss(self):
        pass

    def close(self):
        pass


@pytest.fixture
def _fakes(monkeypatch):
    monkeypatch.setattr(run, "Team", Fake)
    monkeypatch.setattr(Fake, "log", [])


@pytest.mark.usefixtures("_fakes")
def test_without_a_measurement_there_are_no_phases():
    record = run_bench(CASE, ["eager"], CPU, Plan(rounds=2, steps=4, phases=0, profile=0))
    assert record.contenders[0].phases_ms is None


@pytest.mark.usefixtures("_fakes")
def test_a_difference_smaller_than_what_a_session_changes_gives_no_ratio(monkeypatch):
    # a card whose speed wanders by 13 % between turns, and contenders 6 % apart, as in the second article
    monkeypatch.setattr(Fake, "moods", (0.94, 1.0, 1.06, 1.0))
    plan = Plan(rounds=4, steps=20, turn_s=0, phases=0, profile=0)
    record = run_bench(CASE, ["compile", "graph"], CPU, plan)
    assert all((result.spread or 0) > 0.1 for result in record.contenders)  # of all turns, not within one
    found = ratio(record, "compile", "graph")
    assert found is not None
    assert not found.distinct
    assert str(found) == "≈"
    monkeypatch.setattr(Fake, "moods", (1.0,))
    assert str(ratio(run_bench(CASE, ["compile", "graph"], CPU, plan), "compile", "graph")) == "1.06×"


@pytest.mark.usefixtures("_fakes")
def test_clocks_and_throttling_go_with_the_times(monkeypatch):
    class Watch:
        def read(self):
            return Clocks(sm_mhz=1410, power_w=69.0, throttle=("power cap",))

        def driver(self):
            return "580"

    monkeypatch.setattr(run, "monitor", lambda device: Watch())
    monkeypatch.setattr(run, "course", lambda before, load, after: nvml.course(before, [Watch().read()], after))
    record = run_bench(CASE, ["eager"], CPU, Plan(rounds=2, steps=4, phases=0, profile=0))
    assert record.clocks is not None
    assert set(record.clocks) == {"before", "during", "after"}
    assert record.clocks["during"]["throttle"] == ["power cap"]
    assert record.clocks["during"]["power_w"] == [69.0, 69.0]


@pytest.mark.usefixtures("_fakes")
def test_first_steps_are_taken_alone():
    record = run_bench(CASE, ["eager", "compile"], CPU, Plan(rounds=2, steps=4, phases=0, profile=0))
    first = Fake.log.index("start compile")
    assert Fake.log[0] == "start eager"
    assert "answer eager" in Fake.log[1:first]  # ready, and given no turn until all are
    assert all(result.first_step_s == 1.0 for result in record.contenders)
    together = run_bench(CASE, ["eager", "compile"], CPU, Plan(rounds=2, steps=4, phases=0, profile=0, together=True))
    assert all(result.first_step_s is None for result in together.contenders)


def result(name: str, ms: float, group: int, spread: float = 0.01) -> ContenderResult:
    return ContenderResult(name=name, group=group, step_ms=ms, spread=spread, tokens_per_s=8192e3 / ms)


def two_sessions() -> Record:
    """The same baseline 13 % slower in the second group, as one of the articles had it from session to session."""
    return Record(
        kind="bench",
        date="2026-12-01T00:00:00+00:00",
        git=None,
        card="card",
        gpus=1,
        versions={},
        workload=CASE.info(),
        contenders=[
            result("best", 50.0, 0), result("compile+graph", 95.3, 0), result("m2", 80.0, 0),
            result("best", 56.5, 1), result("compile+graph", 107.7, 1), result("m3", 70.0, 1),
        ],
    )  # fmt: skip


def test_a_ratio_never_crosses_groups_and_cannot_cross_records():
    record = two_sessions()
    for group, value in ((0, 95.3 / 50), (1, 107.7 / 56.5)):
        found = ratio(record, "best", "compile+graph", group)
        assert found is not None
        assert (found.value, found.group) == (pytest.approx(value), group)
    assert ratio(record, "m3", "m2") is None  # of different groups
    assert ratio(record, "m3", "compile+graph", 0) is None
    best = over_pytorch(record)
    assert best is not None
    assert best.value == pytest.approx(95.3 / 50)  # not 107.7 / 50, which crosses groups, and the smaller of the two
    for function in (ratio, gain, over_pytorch, ratios.baselines):
        kinds = [str(p.annotation) for p in inspect.signature(function).parameters.values()]
        assert kinds.count("Record") == 1


def test_a_ratio_never_mixes_numbers_of_cards():
    record = two_sessions()
    both = replace(record, gpus=2, contenders=[replace(c, gpus=2 - c.group) for c in record.contenders])
    best = over_pytorch(both)
    assert best is not None
    assert (best.value, best.group) == (pytest.approx(107.7 / 56.5), 1)  # of one card, though two gave the smaller
    two = over_pytorch(both.parts()[1])
    assert two is not None
    assert (two.value, two.group) == (pytest.approx(95.3 / 50), 0)
    assert gain(both, "m3", "m2") is None  # best, which links groups, had other cards there


def test_rungs_of_two_groups_are_linked_by_what_both_groups_have():
    record = two_sessions()
    found = gain(record, "m3", "m2")
    assert found is not None
    # each against best of its own group: the card's change between them drops out
    assert found.value == pytest.approx((56.5 / 70.0) / (50.0 / 80.0))
    assert found.noise == pytest.approx(0.02)
    assert found.distinct
    noisy = [replace(c, spread=0.2) for c in record.contenders]
    assert str(gain(replace(record, contenders=noisy), "m3", "m2")) == "≈"
    assert gain(replace(record, contenders=record.contenders[:3]), "m3", "m2") is None
