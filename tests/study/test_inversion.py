"""The eager inversion: order of the turns, what rounds that disagree do, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from ridgeline.bench.plan import CPU_PLAN
from ridgeline.bench.workloads import Workload, workload
from ridgeline.cli import main
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import read_record
from ridgeline.study import inversion as module
from ridgeline.study.inversion import Inversion, answer, inversion

CPU = torch.device("cpu")
NAMES = ["fast-c256:eager", "fast-c256:compile", "gpt2-c256:eager", "gpt2-c256:compile"]


def case(name: str, batch: int = 4) -> Workload:
    return workload(name, batch=batch, context=64, precision="fp32")


class Fake:
    """A team without processes: takes the milliseconds it is given, turn by turn, and logs its turns."""

    times: dict[str, list[float]] = {}  # noqa: RUF012
    broken = ""
    log: list[str] = []  # noqa: RUF012

    def __init__(self, case: Workload, contender: str, device: torch.device, plan: object, gpus: int) -> None:
        self.name, self.error = f"{case.name}:{contender}", ""
        self.times_ms: list[float] = []
        self.peak = None
        self.command: dict[str, float] = {}
        self.left = list(self.times[self.name])
        self.log.append(f"build {self.name}")

    def send(self, command: dict[str, float]) -> None:
        self.command = command

    def wait(self, limit_s: float, watch: object = None, seen: object = None) -> dict[str, object]:
        if self.name == self.broken:
            self.error = "no compiler"
            return {}
        if self.command.get("time") != CPU_PLAN.steps:  # built, or the turn that nobody looks at
            return {"times_ms": [99.0, 99.0]}
        self.log.append(self.name)
        ms = self.left.pop(0)
        return {"times_ms": [0.9 * ms, ms, ms, ms, 3 * ms]}

    def dismiss(self) -> None:
        self.log.append(f"dismiss {self.name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def timed(monkeypatch: pytest.MonkeyPatch, eager: list[float], compiled: list[float]) -> list[str]:
    """Lets each turn of fast-c256 eagerly and gpt2-c256 compiled take these milliseconds; returns what happens."""
    log: list[str] = []
    times = dict(zip(NAMES, (eager, [5.0] * 4, [20.0] * 4, compiled), strict=True))
    monkeypatch.setattr(module, "Team", Fake)
    monkeypatch.setattr(Fake, "times", times)
    monkeypatch.setattr(Fake, "log", log)
    return log


def measure() -> Inversion:
    return inversion(case("fast-c256"), case("gpt2-c256"), CPU, CPU_PLAN, lambda line: None)


def test_all_are_built_then_take_turns_forwards_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    log = timed(monkeypatch, [8.0] * 4, [10.0] * 4)
    result = measure()
    built, told, closed = ([f"{what} {name}" for name in NAMES] for what in ("build", "dismiss", "close"))
    assert log == [*built, *NAMES, *NAMES[::-1], *NAMES, *NAMES[::-1], *told, *closed]
    asked, other = result.answers
    assert (asked.eager, asked.compiled, asked.way) == ("fast-c256", "gpt2-c256", "compile")
    assert (asked.inverted, asked.ratio) == (True, pytest.approx(1.25))
    assert (other.eager, other.inverted, other.ratio) == ("gpt2-c256", False, pytest.approx(0.25))
    ours = result.record.result("fast-c256:eager")
    assert ours is not None
    assert (ours.step_ms, ours.tokens_per_s) == (8.0, pytest.approx(1e3 * 256 / 8))
    assert ours.spread == pytest.approx(2.1)  # of all steps, from 7.2 to 24 ms
    curves = {curve["figure"]: curve["rows"] for curve in result.record.curves or ()}
    assert [row["inverted"] for row in curves["inversion"]] == [True, False]
    assert curves["turns"][0] == {"contender": "fast-c256:eager", "ms": [8.0] * 4}


def test_a_machine_that_slows_down_under_all_alike_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that double meanwhile, with steps that vary threefold: round by round the ratio is the same."""
    timed(monkeypatch, [8.0, 10.0, 13.0, 16.0], [9.0, 11.5, 14.5, 18.0])
    asked = measure().answers[0]
    assert asked.inverted is True
    assert 1.1 < asked.low < asked.ratio < asked.high < 1.16


def test_rounds_that_disagree_settle_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, [8.0, 12.0, 8.0, 12.0], [10.5] * 4)
    asked = measure().answers[0]
    assert asked.inverted is None
    assert asked.low < 1 < asked.high


def test_the_interval_is_of_the_ratios_logarithm() -> None:
    """Ratios 0.5 and 0.25 with t of one degree of freedom, 12.706, and no matter which model is called first."""
    turns = {"a:eager": [2.0, 4.0], "b:compile": [1.0, 1.0]}
    found = answer("a", "b", "compile", turns)
    half = 12.706 / 2  # the logarithms to base 2 lie half a unit from their mean, so their mean's error is 0.5
    assert found.ratio == pytest.approx(2**-1.5)
    assert (found.low, found.high) == (pytest.approx(2 ** (-1.5 - half)), pytest.approx(2 ** (-1.5 + half)))


def test_one_that_fails_says_why_and_all_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    log = timed(monkeypatch, [8.0] * 4, [10.0] * 4)
    monkeypatch.setattr(Fake, "broken", "gpt2-c256:compile")
    with pytest.raises(RidgelineError, match="gpt2-c256 under compile was not timed: no compiler"):
        measure()
    assert log[-4:] == [f"close {name}" for name in NAMES]


def test_unlike_cases_are_refused() -> None:
    for other, says in ((case("gpt2-c256", 8), "set them alike"), (case("fast-c256"), "got fast-c256 twice")):
        with pytest.raises(ConfigError, match=says):
            inversion(case("fast-c256"), other, CPU, CPU_PLAN, lambda line: None)


def test_what_the_command_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for eager, says, inverted in (
        ([8.0] * 4, "fast-c256 eagerly is 1.25 times as fast as gpt2-c256 by compile (1.25 to 1.25)", True),
        ([20.0] * 4, "fast-c256 eagerly reaches 0.50 of the speed of gpt2-c256 by compile (0.50 to 0.50)", False),
        ([8.0, 12.5] * 2, "fast-c256 eagerly cannot be told apart from gpt2-c256 by compile (0.66 to 1.51)", None),
    ):
        timed(monkeypatch, eager, [10.0] * 4)
        asked = ["study", "inversion", "--device", "cpu", "--out", str(tmp_path / "record.json")]
        assert main(asked) == 0
        assert says in " ".join(capsys.readouterr().out.split())
        timed(monkeypatch, eager, [10.0] * 4)
        assert main([*asked, "--json"]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["answers"][0]["inverted"] is inverted
        assert [c.name for c in read_record(Path(told["record"])).contenders] == NAMES


def test_two_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "inversion", "gpt2-c256", "--out", str(tmp_path / "record.json")]) == 2
    assert "name two presets" in " ".join(capsys.readouterr().err.split())
