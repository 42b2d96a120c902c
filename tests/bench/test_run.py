"""A run: turns, order, failures that stay with their contender, groups, and circumstances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench import run
from ridgeline.bench.run import Plan, WorkerProcess, run_bench
from ridgeline.bench.workloads import workload
from ridgeline.errors import ConfigError
from ridgeline.records import read_record, write_record

CPU = torch.device("cpu")
CASE = workload("gpt2-c256").reduced()


class Fake:
    """A worker without a process; logs its turns, fails as it is told to."""

    log: list[tuple[str, str]] = []  # noqa: RUF012
    crowd = 99  # workers that fit in memory beside each other
    alive = 0

    def __init__(self, case, contender, device, plan):
        self.name, self.error, self.first_step_s = contender, "", None
        self.times_ms: list[float] = []
        self.peak = None
        Fake.alive += 1
        self.late = Fake.alive > Fake.crowd and contender not in run.ANCHORS
        self.log.append(("start", contender))

    def send(self, command):
        self.command = command
        self.log.append(("time", self.name)) if "time" in command else None

    def wait(self, limit_s, watch=None, seen=None):
        if self.late:
            self.error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
            return {}
        if self.name == "graph":
            self.error = "UnsupportedError: cannot"
            return {}
        count = getattr(self, "command", {}).get("time", 0)
        return {"first_step_s": 1.5, "times_ms": [2.0] * count, "peak_memory_bytes": 7}

    @property
    def out_of_memory(self):
        return "out of memory" in self.error

    def close(self):
        Fake.alive -= 1


@pytest.fixture
def _fakes(monkeypatch):
    monkeypatch.setattr(run, "WorkerProcess", Fake)
    monkeypatch.setattr(Fake, "log", [])
    monkeypatch.setattr(Fake, "crowd", 99)


@pytest.mark.usefixtures("_fakes")
def test_turns_are_interleaved_and_their_order_swapped():
    record = run_bench(CASE, ["eager", "graph", "compile"], CPU, Plan(rounds=2, steps=4))
    turns = [name for what, name in Fake.log if what == "time"]
    assert turns == ["eager", "compile", "eager", "compile", "compile", "eager"]  # two short ones after each start
    eager, graph, compiled = record.contenders
    assert graph.error == "UnsupportedError: cannot"
    assert graph.tokens_per_s is None
    for result in (eager, compiled):
        assert result.error is None
        assert result.step_ms == 2.0
        assert result.tokens_per_s == CASE.tokens / 2e-3
        assert result.windows_per_s == CASE.batch / 2e-3
        assert result.first_step_s == 1.5


@pytest.mark.usefixtures("_fakes")
def test_contenders_start_alone_unless_told_otherwise():
    run_bench(CASE, ["eager", "compile"], CPU, Plan(rounds=2, steps=2))
    assert Fake.log[:4] == [("start", "eager"), ("time", "eager"), ("start", "compile"), ("time", "compile")]
    Fake.log.clear()
    record = run_bench(CASE, ["eager", "compile"], CPU, Plan(rounds=2, steps=2, together=True))
    assert Fake.log[:2] == [("start", "eager"), ("start", "compile")]
    assert all(result.first_step_s is None for result in record.contenders)


@pytest.mark.usefixtures("_fakes")
def test_who_finds_no_memory_runs_in_a_further_group_with_the_anchors(monkeypatch):
    monkeypatch.setattr(Fake, "crowd", 2)
    record = run_bench(CASE, ["eager", "compile+graph", "compile", "max-autotune"], CPU, Plan(rounds=2, steps=2))
    assert [(r.name, r.group) for r in record.contenders] == [
        ("compile+graph", 0),
        ("eager", 0),
        ("compile+graph", 1),
        ("compile", 1),
        ("compile+graph", 2),
        ("max-autotune", 2),
    ]
    assert all(r.error is None for r in record.contenders)


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("names", [["compile", "eager"], ["compile"]])
def test_who_finds_no_memory_alone_has_failed(monkeypatch, names):
    monkeypatch.setattr(Fake, "crowd", 0)
    record = run_bench(CASE, names, CPU, Plan(rounds=2, steps=2))
    assert sorted(r.name for r in record.contenders) == names
    assert all("out of memory" in (r.error or "") for r in record.contenders)


@pytest.mark.usefixtures("_fakes")
def test_who_fits_only_alone_runs_alone(monkeypatch):
    monkeypatch.setattr(Fake, "crowd", 1)
    record = run_bench(CASE, ["compile+graph", "eager", "compile"], CPU, Plan(rounds=2, steps=2))
    assert [(r.name, r.group) for r in record.contenders] == [
        ("compile+graph", 0),
        ("compile+graph", 1),
        ("compile+graph", 2),
        ("eager", 3),
        ("compile", 4),
    ]
    assert all(r.error is None for r in record.contenders)


@pytest.mark.parametrize(("names", "message"), [([], "one or more"), (["eager", "eager"], "different")])
def test_asking_for_nothing_or_twice(names, message):
    with pytest.raises(ConfigError, match=message):
        run_bench(CASE, names, CPU)


def test_plans_that_cannot_be():
    with pytest.raises(ConfigError, match="even number of rounds"):
        Plan(rounds=3)


def test_real_processes_measure_and_fail_apart(tmp_path):
    case = replace(CASE, batch=1, context=16)
    plan = Plan(rounds=2, steps=2, warm_s=0.1, together=True)
    record = run_bench(case, ["eager", "graph"], CPU, plan)
    eager, graph = record.contenders
    assert eager.error is None
    assert eager.step_ms is not None
    assert "needs a CUDA device" in (graph.error or "")
    assert record.versions["torch"] == torch.__version__
    assert record.gpus == 0
    assert read_record(write_record(record, tmp_path / "r.json")) == record


def test_a_worker_that_dies_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    worker = WorkerProcess(CASE, "eager", CPU, Plan())
    assert worker.wait(20) == {}
    assert "ended with 1" in worker.error
    worker.close()


def test_a_worker_that_hangs_is_an_error(monkeypatch, tmp_path):
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\nexec sleep 30\n")
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    worker = WorkerProcess(CASE, "eager", CPU, Plan())
    assert worker.wait(0.3) == {}
    assert "no answer within" in worker.error
    worker.close()
