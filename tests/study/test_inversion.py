"""The eager inversion: order of the runs, what a disagreement of two runs does, and what is refused."""

from pathlib import Path

import pytest
import torch

from ridgeline.bench.plan import CPU_PLAN
from ridgeline.bench.workloads import Workload, workload
from ridgeline.cli import main
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import ContenderResult, Record, WorkloadInfo
from ridgeline.study import inversion as module
from ridgeline.study.inversion import Inversion, inversion

CPU = torch.device("cpu")


def case(name: str, batch: int = 4) -> Workload:
    return workload(name, batch=batch, context=64, precision="fp32")


def timed(monkeypatch: pytest.MonkeyPatch, times: dict[tuple[str, str], list[float | None]]) -> list[str]:
    """Makes run_bench give, call by call, the times of (model, way) in milliseconds; returns the models asked for."""
    asked: list[str] = []

    def run_bench(case: Workload, ways: list[str], device: torch.device, plan: object) -> Record:
        turn = asked.count(case.name)
        asked.append(case.name)
        contenders = []
        for way in ways:
            ms = times[case.name, way][turn]
            speed = None if ms is None else 1e3 * case.tokens / ms
            error = "no compiler" if ms is None else None
            contenders.append(ContenderResult(name=way, step_ms=ms, spread=0.02, tokens_per_s=speed, error=error))
        info = WorkloadInfo(name=case.name, batch=case.batch, context=case.context, precision="fp32")
        date = "2026-01-01T00:00:00+00:00"
        return Record(
            kind="bench", date=date, git=None, card="CPU", gpus=0, versions={}, workload=info, contenders=contenders
        )

    monkeypatch.setattr(module, "run_bench", run_bench)
    return asked


def measure() -> Inversion:
    return inversion(case("fast-c256"), case("gpt2-c256"), CPU, CPU_PLAN, lambda line: None)


def steady(eager: float, compiled: float) -> dict[tuple[str, str], list[float | None]]:
    return {
        ("fast-c256", "eager"): [eager, eager],
        ("fast-c256", "compile"): [5.0, 5.0],
        ("gpt2-c256", "eager"): [20.0, 20.0],
        ("gpt2-c256", "compile"): [compiled, compiled],
    }


def test_order_favours_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, steady(8.0, 10.0))
    result = measure()
    assert asked == ["fast-c256", "gpt2-c256", "gpt2-c256", "fast-c256"]
    assert (result.inverted, result.ratio) == (True, pytest.approx(1.25))
    names = [contender.name for contender in result.record.contenders]
    assert names == ["fast-c256:eager", "fast-c256:compile", "gpt2-c256:eager", "gpt2-c256:compile"]
    assert result.record.contenders[0].tokens_per_s == pytest.approx(1e3 * 256 / 8)


def test_no_inversion(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, steady(12.0, 10.0))
    assert measure().inverted is False


def test_runs_that_disagree_settle_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 and 12 ms for the same thing: a mean of 10 against 10.5 is no result."""
    timed(monkeypatch, {**steady(8.0, 10.5), ("fast-c256", "eager"): [8.0, 12.0]})
    result = measure()
    assert result.inverted is None
    assert result.record.contenders[0].spread == pytest.approx(0.4)


def test_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {**steady(8.0, 10.0), ("gpt2-c256", "compile"): [None, None]})
    with pytest.raises(RidgelineError, match="gpt2-c256 under compile was not timed: no compiler"):
        measure()


def test_unlike_cases_are_refused() -> None:
    for other, says in ((case("gpt2-c256", 8), "set them alike"), (case("fast-c256"), "got fast-c256 twice")):
        with pytest.raises(ConfigError, match=says):
            inversion(case("fast-c256"), other, CPU, CPU_PLAN, lambda line: None)


def test_two_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "inversion", "gpt2-c256", "--out", str(tmp_path / "record.json")]) == 2
    assert "name two presets" in " ".join(capsys.readouterr().err.split())
