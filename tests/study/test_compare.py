"""Comparisons: contenders by name, rates tuned alike, differences with their spread, a study that goes on."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ridgeline.cli import main
from ridgeline.errors import ConfigError
from ridgeline.presets import find_config
from ridgeline.records import read_record
from ridgeline.study import compare as module
from ridgeline.study.compare import Standing, compare, difference, sooner, tune
from ridgeline.study.contenders import device_of, distinct, same_recipe, single_changes, spread
from ridgeline.study.pace import Pace
from ridgeline.study.runs import Point, Run, run_once
from ridgeline.train.settings import read_toml

SMALL = "gpt2-c256+layers=1+width=16+heads=2"
PACE = Pace(((15, 0.5), (40, 2.0)))
QUIET = Console(quiet=True)


def run(*losses: float, error: str | None = None) -> Run:
    return Run(tuple(Point(10 * (i + 1), 100 * (i + 1), float(i + 1), loss) for i, loss in enumerate(losses)), error)


def standing(name: str, *finals: float) -> Standing:
    runs = tuple(run(9.0, final) for final in finals)
    return Standing(name=name, parameters=1, rate=1e-3, tried={}, runs=runs, pace=PACE)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text with some structure, long enough for windows of 16 in both parts."""
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and the rat ate the hat; " * 60, encoding="utf-8")
    return file


def options(text: Path, out: Path) -> list[str]:
    sizes = ["--steps", "6", "--eval-interval", "3", "--batch", "2", "--context", "16", "--device", "cpu"]
    return ["study", "compare", SMALL, f"{SMALL}+norm=rmsnorm", "--data", str(text), *sizes, "--out", str(out)]


def test_each_change_between_the_two_articles_models() -> None:
    names = single_changes("gpt2-c256", "fast-c256")
    assert {name.partition("+")[2] for name in names} == {"kv_heads=1", "mlp_width=512", "norm=rmsnorm", "bias=false"}
    for name in names:
        find_config(name)
    with pytest.raises(ConfigError, match="same decoder"):
        single_changes("gpt2-c256", "gpt2-c256")


def test_only_the_model_differs() -> None:
    """Batch, data and learning rate of the second never count."""
    names = ("gpt2-c256", "fast-c256+batch=4+optimizer.lr=1e-1")
    one, other = same_recipe({name: find_config(name) for name in names}).values()
    assert (other.batch, other.optimizer, other.model.decoder.norm) == (one.batch, one.optimizer, "rmsnorm")
    short = find_config("gpt2-c256+window.context=64+context=64")
    with pytest.raises(ConfigError, match="--context 64"):
        same_recipe({"gpt2-c256": find_config("gpt2-c256"), "short": short})


def test_contenders_named_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        distinct(["a", "a"])
    with pytest.raises(ConfigError, match="two contenders"):
        distinct(["a"])


def test_a_card_without_a_number_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What resolve() makes of "auto" names no card; PyTorch takes none but by its number."""
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    config = find_config(SMALL)
    for name in ("cpu", "cuda", "cuda:1"):
        assert device_of(dataclasses.replace(config, device=name)) == torch.device(name)
    assert taken == [0, 1]


def test_contenders_are_dealt_out_over_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card for each in turn; on which one it is trained makes it no other comparison."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    configs = {name: dataclasses.replace(find_config(SMALL), device="cuda") for name in "abc"}
    dealt = spread(configs, 2)
    assert [config.device for config in dealt.values()] == ["cuda:0", "cuda:1", "cuda:0"]
    one, other = (module._describe(module.Plan(configs=each, rates=())) for each in (configs, dealt))
    assert one == other
    assert spread(configs, 1) == configs
    with pytest.raises(ConfigError, match="at most the number of cards"):
        spread(configs, 3)


def test_tuning_goes_on_while_the_best_is_at_an_end() -> None:
    losses = {1.0: 3.0, 2.0: 2.0, 4.0: 1.5, 8.0: 1.8}
    rate, tried = tune((1.0, 2.0), lambda rate: run(losses[rate]))
    assert (rate, set(tried)) == (4.0, {1.0, 2.0, 4.0, 8.0})


def test_tuning_ends() -> None:
    """A loss that keeps falling is followed twice; the standing then says that it lies at an end."""
    rate, tried = tune((1.0, 2.0), lambda rate: run(1 / rate))
    assert (rate, len(tried)) == (8.0, 4)
    assert Standing(name="a", parameters=1, rate=rate, tried=tried, runs=(run(1.0),), pace=PACE).at_edge


def test_tuning_passes_over_what_diverges() -> None:
    rate, tried = tune((1.0, 2.0, 4.0), lambda r: run(1.0, error="diverged") if r > 2 else run(3.0 - r))
    assert (rate, tried[4.0]) == (2.0, None)
    assert math.isnan(tune((1.0,), lambda r: run(1.0, error="diverged"))[0])


def test_a_difference_is_held_against_the_spread() -> None:
    """Pairs 0.10, 0.11, 0.09: mean 0.1, s 0.01, half-width 4.303 · 0.01 / √3; noise of 0.3 hides the same mean."""
    clear = difference(standing("b", 1.10, 1.21, 1.29), standing("a", 1.0, 1.1, 1.2))
    assert clear.mean == pytest.approx(0.1)
    assert clear.high == pytest.approx(0.1 + 4.303 * 0.01 / math.sqrt(3))
    assert clear.beyond is True
    assert difference(standing("b", 1.4, 1.2, 1.0), standing("a", 1.0, 1.1, 1.2)).beyond is False
    assert difference(standing("b", 1.4), standing("a", 1.0)).beyond is None


def test_target_must_be_held() -> None:
    """One validation below the target is luck."""
    assert run(2.0, 1.4, 1.6, 1.5, 1.4).first_held(1.5) == Point(40, 400, 4.0, 1.5)
    assert run(2.0, 1.4).first_held(1.5) is None


def test_seconds_are_steps_timed_alone() -> None:
    """10 steps of half a second and 5; then 15 of two. A target held from step 20 on is held from second 17.5 on."""
    assert [PACE.seconds(steps) for steps in (0, 10, 15, 20, 40)] == [0.0, 5.0, 7.5, 17.5, 57.5]
    one, other = (
        dataclasses.replace(standing(name), runs=tuple(run(2.0, *rest) for rest in losses))
        for name, losses in (("a", [(1.4, 1.4)] * 2), ("b", [(1.6, 1.4, 1.4), (1.4, 1.4)]))
    )
    assert [one.seconds(point) for point in one.held(1.5) if point] == [17.5, 17.5]
    assert [point and point.step for point in other.held(1.5)] == [30, 20]
    later = sooner(other, one, 1.5)
    assert later is not None
    assert (later.mean, later.beyond) == (10.0, False)
    assert sooner(other, one, 1.3) is None


def test_compare_whole(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains, says what counting achieves, writes a record; asked again it trains nothing and says the same."""
    arguments = [*options(text, tmp_path / "out"), "--seeds", "2", "--rates", "1e-3", "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["contender"] for row in said["contenders"]] == [SMALL, f"{SMALL}+norm=rmsnorm"]
    assert said["contenders"][1]["difference"]["against"] == SMALL
    assert said["ngrams"]["5"] < said["ngrams"]["1"]
    record = read_record(said["record"])
    assert record.kind == "study"
    assert isinstance(record.curves, list)
    assert [curve["x"] for curve in record.curves if curve["name"] == SMALL] == [[3, 6]]
    runs = next(curve for curve in record.curves if curve["figure"] == "runs")["rows"]
    assert [(row["seed"], row["at_the_end"] == row["val_loss"][-1]) for row in runs[:2]] == [(0, True), (1, True)]
    told = next(curve for curve in record.curves if curve["figure"] == "standings")["rows"][1]["difference"]
    assert told.startswith(f"{said['contenders'][1]['difference']['mean']:+.4f} (")
    assert told.endswith(" the spread")
    assert not list((tmp_path / "out").rglob("last"))
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "runs").rglob("*.json")}
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["contenders"] == said["contenders"]
    assert stamps == {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "runs").rglob("*.json")}
    assert main([*arguments, "--steps", "9"]) == 2
    assert "another study (checkpoint_interval, steps differ)" in capsys.readouterr().err.replace("\n", " ")
    assert main([*arguments, "--seeds", "3"]) == 0  # one more run of each, the others are there
    assert {**stamps, **{file: file.stat().st_mtime_ns for file in stamps}} == stamps
    assert len(list((tmp_path / "out").rglob("result.json"))) == 2 * 3


def test_whole_recipes(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch, rate and stages are each contender's own; what the target took is told; other windows are refused."""
    other = f"{SMALL}+batch=4+optimizer.lr=2e-2+optimizer.algorithm=muon+stages=[[0.5,2,8]]"
    arguments = [name for name in options(text, tmp_path / "out") if name not in ("--batch", "2")]
    arguments[3] = other
    assert main([*arguments, "--recipes", "--seeds", "2", "--target", "9", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out.splitlines()[-1])["contenders"]
    assert (one["learning_rate"], two["learning_rate"], two["tried"]) == (1e-3, 2e-2, {})
    assert one["target_s"] > 0
    assert one["target_steps"] == 3
    assert two["reached"] == 2
    assert two["target_difference_s"]["against"] == SMALL
    run = read_toml(next((tmp_path / "out").rglob("lr-0.02-seed-1/config.toml")))
    assert (run["batch"], run["stages"]) == (4, [[0.5, 2, 8]])
    assert main([*arguments, "--recipes", "--seeds", "2", "--target", "9"]) == 0
    said = capsys.readouterr().out
    assert "until 9 was held" in said
    assert f" {SMALL[:12]}" in said
    assert "+batch=4+opt" in said  # a change is named without what it changes, folded and not cut off
    assert "was not held" not in said
    assert main([*arguments, "--recipes", "--seeds", "2", "--target", "0.001"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the loss 0.001 was not held: the best, \S+, came to \d\.\d+; it was still falling", said)
    arguments[3] = f"{SMALL}+window.stride=2"
    assert main([*arguments, "--recipes"]) == 2
    assert "different windows" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_beside_each_other(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contenders in processes of their own learn what they learn one after another; each step is timed alone."""
    found = []
    for name, processes in (("one", "1"), ("two", "2")):
        arguments = [*options(text, tmp_path / name), "--seeds", "1", "--rates", "1e-3", "--processes", processes]
        assert main([*arguments, "--json"]) == 0
        contenders = json.loads(capsys.readouterr().out.splitlines()[-1])["contenders"]
        assert all(row.pop("tokens_per_s") > 0 for row in contenders)
        found.append(contenders)
    assert found[0] == found[1]
    record = read_record(tmp_path / "two" / "record.json")
    curve = next(curve for curve in record.curves if curve["name"] == SMALL)  # type: ignore[union-attr]
    step_ms = record.contenders[0].step_ms
    assert step_ms is not None
    assert curve["seconds"] == pytest.approx([step * step_ms / 1e3 for step in curve["x"]])


def test_goes_on_after_a_stop(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run cut off between its checkpoints is gone on with; runs that ended before it are not repeated."""
    config = find_config(f"{SMALL}+data='{text}'+steps=6+batch=2+window.context=16+eval_interval=2+eval_windows=2")
    config = dataclasses.replace(config, device="cpu", precision="fp32", engine="eager")
    whole = run_once(config, tmp_path / "whole", QUIET)
    calls = []
    real = module.run_once

    def stopping(config: object, folder: Path, console: Console) -> Run:
        calls.append(folder.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(config, folder, console)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_once", stopping)
    plan = module.Plan(configs={"a": config, "b": config}, rates=(1e-3,), seeds=1)
    with pytest.raises(KeyboardInterrupt):
        compare(plan, tmp_path / "out", QUIET)
    result = compare(plan, tmp_path / "out", QUIET)
    assert [s.finals for s in result.standings] == [[whole.final]] * 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--rates", "0"], "rates must be positive"),
        (["--rates", "1e-3", "1e-3"], "rates must differ"),
        (["--seeds", "0"], "seeds must be"),
        (["--gpus", "99"], "at most the number of cards"),
        (["--processes", "0"], "processes must be 1 or more"),
        (["--each-change", "--steps", "0"], "steps must be positive"),
    ],
)
def test_bad_input(
    text: Path, tmp_path: Path, extra: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options(text, tmp_path / "out"), *extra]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
    assert main(options(text, tmp_path / "out")) == 2
    assert "holds no study" in " ".join(capsys.readouterr().err.split())
