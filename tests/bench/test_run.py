"""A run: turns, order, failures that stay with their contender, groups, and circumstances."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.bench import circumstances, processes, run
from ridgeline.bench.plan import Plan
from ridgeline.bench.processes import CACHES, Team
from ridgeline.bench.run import _Bench, run_bench
from ridgeline.bench.workloads import workload
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.hardware import card
from ridgeline.models.accounting import step_cost
from ridgeline.records import read_record, write_record

CPU = torch.device("cpu")
CASE = workload("gpt2-c256", precision="fp32").reduced()


class Fake:
    """A team without processes; logs its turns, fails as it is told to."""

    log: list[tuple[str, str]] = []  # noqa: RUF012
    crowd = 99  # teams that fit in memory beside each other
    alive = 0
    seconds = 0.0  # what the clock has gone on by with every start

    def __init__(self, case, contender, device, plan, gpus):
        self.name, self.error, self.first_step_s = contender, "", None
        self.times_ms: list[float] = []
        self.peak = self.phases_ms = self.groups_ms_per_layer = self.overlap = None
        self.command: dict = {}
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
        count = self.command.get("time", 0)
        if "phases" in self.command:
            return {"phases_ms": {"forward": 0.9, "backward": 1.0, "optimizer": 0.1}}
        if "profile" in self.command:
            self.error = "RuntimeError: no profiler" if self.name == "compile" else ""
            return {} if self.error else {"overlap": 0.25, "groups_ms_per_layer": {"forward · QKV": 0.125}}
        return {"first_step_s": 1.5, "times_ms": [2.0] * count, "peak_memory_bytes": 7}

    @property
    def out_of_memory(self):
        return "out of memory" in self.error

    def dismiss(self):
        pass

    def close(self):
        Fake.alive -= 1


@pytest.fixture
def _fakes(monkeypatch):
    monkeypatch.setattr(run, "Team", Fake)
    monkeypatch.setattr(Fake, "log", [])
    monkeypatch.setattr(Fake, "crowd", 99)
    monkeypatch.setattr(Fake, "alive", 0)


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
        assert result.phases_ms == {"forward": 0.9, "backward": 1.0, "optimizer": 0.1}
    assert (eager.overlap, eager.groups_ms_per_layer) == (0.25, {"forward · QKV": 0.125})
    assert (compiled.overlap, compiled.groups_ms_per_layer) == (None, None)  # a profile that fails costs no time


@pytest.mark.usefixtures("_fakes")
def test_times_are_kept_before_anyone_is_looked_into(monkeypatch):
    kept: list = []

    def interrupted(self, teams):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Bench, "_look_inside", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(CASE, ["eager", "graph"], CPU, Plan(rounds=2, steps=2), keep=kept.append)
    assert [(r.name, r.step_ms, r.phases_ms) for r in kept[-1].contenders] == [
        ("eager", 2.0, None),
        ("graph", None, None),
    ]
    assert Fake.alive == 0


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


@pytest.mark.usefixtures("_fakes")
def test_who_finds_no_time_runs_in_a_further_group_with_the_anchors(monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(run.time, "monotonic", lambda: float(next(clock)))
    names = ["best", "compile+graph", "eager", "compile", "reduce-overhead", "max-autotune"]
    seen = []
    record = run_bench(CASE, names, CPU, Plan(rounds=2, steps=2, group_s=600), keep=seen.append)
    groups = [[r.name for r in record.contenders if r.group == number] for number in range(4)]
    assert [name for group in groups for name in group if name not in run.ANCHORS] == names[2:]
    assert len([group for group in groups if group]) > 1
    assert all(group[:2] == ["best", "compile+graph"] for group in groups if group)
    assert [len(r.contenders) for r in seen] == [sum(map(len, groups[: n // 2 + 1])) for n in range(len(seen))]


@pytest.mark.usefixtures("_fakes")
def test_a_record_can_be_gone_on_with_in_the_same_circumstances_alone():
    plan = Plan(rounds=2, steps=2)
    first = run_bench(CASE, ["eager"], CPU, plan)
    both = run_bench(CASE, ["eager", "compile"], CPU, plan, onto=first)
    assert [(r.name, r.group) for r in both.contenders] == [("eager", 0), ("eager", 1), ("compile", 1)]
    with pytest.raises(ConfigError, match="has card another, this run CPU"):
        run_bench(CASE, ["eager"], CPU, plan, onto=replace(first, card="another"))
    with pytest.raises(ConfigError, match="has workload"):
        run_bench(replace(CASE, batch=1), ["eager"], CPU, plan, onto=first)


@pytest.mark.usefixtures("_fakes")
def test_several_numbers_of_cards_in_one_record(tmp_path):
    seen: list = []
    record = run_bench(CASE, ["eager", "best"], CPU, Plan(rounds=2, steps=2), gpus=[1, 2], keep=seen.append)
    assert [(r.name, r.group, r.gpus) for r in record.contenders] == [
        ("best", 0, 1), ("eager", 0, 1), ("best", 1, 2), ("eager", 1, 2),
    ]  # fmt: skip
    one, _, two, _ = record.contenders
    assert one.tokens_per_s == pytest.approx(CASE.tokens / 2e-3)
    assert (two.tokens_per_s, two.windows_per_s) == (2 * one.tokens_per_s, 2 * one.windows_per_s)
    assert [len(r.contenders) for r in seen] == [2, 2, 4, 4]  # what is measured is never lost
    assert read_record(write_record(record, tmp_path / "r.json")) == record
    for numbers in ([], [1, 1], [0, 1]):
        with pytest.raises(ConfigError, match=r"different numbers of cards|at least one card"):
            run_bench(CASE, ["eager"], CPU, gpus=numbers)


@pytest.mark.usefixtures("_fakes", "_h200")
def test_each_number_of_cards_has_its_own_utilisation(monkeypatch):
    monkeypatch.setattr(run, "monitor", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    work = replace(workload("hal-20m"), batch=8)
    record = run_bench(work, ["eager"], torch.device("cuda"), Plan(rounds=2, steps=2), gpus=[1, 2])
    one, two = record.contenders
    assert record.gpus == 2
    assert (two.mfu, two.bytes_per_s) == (pytest.approx(one.mfu), pytest.approx(2 * one.bytes_per_s))


def test_a_copy_names_its_revision(monkeypatch):
    assert len(circumstances.git_revision() or "") >= 40
    monkeypatch.setenv("RIDGELINE_REVISION", "abc+")
    assert circumstances.git_revision() == "abc+"


def test_an_installed_copy_in_someones_repository_has_no_revision(tmp_path, monkeypatch):
    monkeypatch.delenv("RIDGELINE_REVISION", raising=False)
    package = tmp_path / ".venv" / "ridgeline" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    monkeypatch.setattr(circumstances.ridgeline, "__file__", str(package))
    assert circumstances.git_revision() is None  # no repository at all

    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=n@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git("add", ".gitignore")
    git("commit", "-q", "-m", "theirs")
    assert circumstances.git_revision() is None
    git("add", "-f", str(package))
    git("commit", "-q", "-m", "ours")
    assert len(circumstances.git_revision() or "") == 40
    package.write_text("changed = 1\n")
    assert (circumstances.git_revision() or "").endswith("+")


def test_plans_that_cannot_be():
    with pytest.raises(ConfigError, match="even number of rounds"):
        Plan(rounds=3)


@pytest.fixture
def _h200(monkeypatch):
    monkeypatch.setattr(run, "present", lambda index: card("h200"))


@pytest.mark.usefixtures("_h200")
def test_mfu_and_floor_share_of_a_known_card():
    bench = _Bench(workload("hal-20m"), torch.device("cuda"), Plan(), None)
    used, floor_share = bench._shares(0.0744)
    # 74.4 ms under torch.compile; MFLOP a token: 113.2 of products and 7.1 of attention in the blocks, 3.1 around them
    assert used.mfu == pytest.approx(131072 * 123.4e6 / 0.0744 / 989.4e12, rel=0.005)
    assert used.mfu < floor_share < 1
    assert used.bandwidth == pytest.approx(73.21e9 / 0.0744 / 4.8e12, rel=0.0005)
    pair, floor = _Bench(workload("hal-20m"), torch.device("cuda"), Plan(), None, gpus=2)._shares(0.0744)
    assert (pair.mfu, pair.bytes_per_s, floor) == (used.mfu, pytest.approx(2 * used.bytes_per_s), floor_share)
    assert _Bench(CASE, CPU, Plan(), None)._shares(0.1) is None


@pytest.mark.usefixtures("_fakes", "_h200")
def test_a_record_holds_the_utilisation_that_was_counted(monkeypatch):
    monkeypatch.setattr(run, "monitor", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    work = replace(workload("hal-20m"), batch=8)  # a floor far below what the fakes take
    found = run_bench(work, ["eager"], torch.device("cuda"), Plan(rounds=2, steps=2)).contenders[0]
    cost, seconds = step_cost(work.model, batch=8, context=256, precision="bf16"), found.step_ms / 1e3
    assert found.mfu == pytest.approx(cost.flops / seconds / 989.4e12)
    assert found.bytes_per_s == pytest.approx(cost.bytes / seconds)
    assert found.bandwidth in (None, pytest.approx(found.bytes_per_s / 4.8e12))


@pytest.mark.usefixtures("_fakes", "_h200")
def test_an_impossible_time_is_no_result(monkeypatch):
    monkeypatch.setattr(run, "monitor", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    record = run_bench(workload("hal-20m"), ["eager"], torch.device("cuda"), Plan(rounds=2, steps=2))
    assert record.contenders[0].tokens_per_s is None
    assert "shorter than its floor" in (record.contenders[0].error or "")


def test_real_processes_measure_and_fail_apart(tmp_path):
    case = replace(CASE, batch=1, context=16)
    plan = Plan(rounds=2, steps=2, turn_s=0, warm_s=0.1, profile=0, together=True)
    record = run_bench(case, ["eager", "graph"], CPU, plan)
    eager, graph = record.contenders
    assert eager.error is None
    assert eager.step_ms is not None
    assert eager.phases_ms is not None
    assert list(eager.phases_ms) == ["forward", "backward", "optimizer"]
    assert "captures CUDA graphs and needs a GPU" in (graph.error or "")
    assert record.versions["torch"] == torch.__version__
    assert record.gpus == 0
    assert read_record(write_record(record, tmp_path / "r.json")) == record


@pytest.mark.slow
def test_two_processes_train_together():
    case = replace(CASE, batch=1, context=16)
    plan = Plan(rounds=2, steps=2, turn_s=0, warm_s=0.1, phases=2, profile=0, together=True)
    alone, pair = run_bench(case, ["eager"], CPU, plan, gpus=[1, 2]).contenders
    for eager, number in ((alone, 1), (pair, 2)):
        assert (eager.error, eager.gpus) == (None, number)
        assert eager.tokens_per_s == pytest.approx(number * case.tokens / eager.step_ms * 1e3)
        assert "backward" in (eager.phases_ms or {})


def test_more_cards_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="1 CUDA cards here, and 2"):
        run_bench(CASE, ["eager"], torch.device("cuda"), gpus=[1, 2])


def test_a_process_that_dies_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    team = Team(CASE, "eager", CPU, Plan(), 1)
    assert team.wait(20) == {}
    assert "ended with 1" in team.error
    team.close()


def show_caches(monkeypatch, tmp_path, plan: Plan) -> list[str]:
    """What two contenders' processes find in the variables that name caches."""
    script = tmp_path / "show"
    script.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in CACHES)}\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(script))
    seen: list[str] = []
    for _ in range(2):
        team = Team(CASE, "compile", CPU, plan, 1)
        team.wait(20)
        seen += team.error.rsplit(": ", 1)[1].split()
        team.close()
    return seen


def test_every_contender_starts_with_empty_caches_of_its_own(monkeypatch, tmp_path):
    # the second article's compile times depended on who came first; caches of Inductor, Triton, the CUDA driver and
    # this package's own kernels are all there
    seen = show_caches(monkeypatch, tmp_path, Plan())
    assert len(seen) == len(set(seen)) == 2 * len(CACHES) == 8
    assert not any(Path(place).exists() for place in seen)


def test_a_worker_that_hangs_is_an_error(monkeypatch, tmp_path):
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\nexec sleep 30\n")
    script.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(script))
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    team = Team(CASE, "eager", CPU, Plan(), 1)
    assert team.wait(0.3) == {}
    assert "no answer within" in team.error
    assert team._workers[0]._process.poll() is not None  # nothing of it runs on under the others' turns
    team.close()


def test_one_process_that_fails_ends_its_team(monkeypatch, tmp_path):
    script = tmp_path / "half"
    script.write_text('#!/bin/sh\n[ "$RANK" = 1 ] && { echo out of luck; exit 1; }\nexec sleep 30\n')
    script.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(script))
    start = time.monotonic()
    team = Team(CASE, "eager", CPU, Plan(), 2)
    assert team.wait(20) == {}
    assert "out of luck" in team.error
    team.close()
    assert time.monotonic() - start < 15
