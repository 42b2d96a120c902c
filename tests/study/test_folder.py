"""A study's folder: one process at a time, whole files, and what is told before anything can be lost."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from command_line import refused
from ridgeline.data.api import load_dataset
from ridgeline.errors import ConfigError, DivergedError, OutOfMemoryError, RidgelineError
from ridgeline.presets import find_config
from ridgeline.study import clocked, runs
from ridgeline.study.clocked import checkpoint_name, read_points
from ridgeline.study.compare import Plan, keep_plan
from ridgeline.study.folder import check_place, claimed, write_whole
from ridgeline.study.runs import run_once
from ridgeline.train import train
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override

HOLD = "import sys, time; from pathlib import Path; from ridgeline.study.folder import claimed\n"
HOLD += "with claimed(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
POINT = {"at": 1.0, "seconds": 1.0, "steps": 2, "samples": 2, "tokens": 2, "train_loss": 1.0, "val_loss": 1.0}


def test_one_process_at_a_time_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process is at work in"), claimed(tmp_path):
            pass
        other.kill()
        with claimed(tmp_path, patience=30):
            pass


def test_points_go_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    line = json.dumps({**POINT, "setup_s": 0.5, "checkpoint": "0"})
    file = tmp_path / clocked.POINTS
    file.write_text(f"{line}\n{line[:20]}")
    clocked._append(file, line.replace('"at": 1.0', '"at": 2.0'))
    assert [point.at for point in read_points(tmp_path)] == [1.0, 2.0]


def test_no_two_times_share_a_checkpoint() -> None:
    times = [0.0, 0.01, 0.02, 0.04, 0.1, 1 / 7, 5.0, 300.0]
    assert len({checkpoint_name(at) for at in times}) == len(times)
    assert checkpoint_name(5.0) == "at-000005.0s"


@pytest.mark.parametrize("content", ["[]", "3", "{", "[" * 100_000], ids=["a list", "a number", "torn", "deep"])
def test_a_plan_that_is_none_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.json is damaged"):
        keep_plan(tmp_path, {})


@pytest.mark.parametrize("target", [float("nan"), -1.0, 0.0, float("inf")])
def test_a_target_that_cannot_be(target: float) -> None:
    with pytest.raises(ConfigError, match="the target must be a finite loss above 0"):
        Plan(configs={}, rates=(1e-3,), target=target)


def test_only_divergence_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that memory or disk ended has none: called again it is tried again."""
    folder, quiet = tmp_path / "run", Console(quiet=True)
    ends: list[Exception] = [OutOfMemoryError("no memory"), RidgelineError("no space left"), DivergedError("nan")]

    def train(config: object, console: Console) -> object:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        raise ends.pop(0)

    monkeypatch.setattr(runs, "train", train)
    for words in ("no memory", "no space left"):
        with pytest.raises(RidgelineError, match=words):
            run_once(find_config("gpt2-c256"), folder, quiet)
        assert not (folder / runs.RESULT).exists()
    assert run_once(find_config("gpt2-c256"), folder, quiet).error == "nan"
    assert run_once(find_config("gpt2-c256"), folder, quiet).error == "nan"  # read, not repeated


@pytest.mark.parametrize("moment", ["before its first checkpoint was whole", "behind its last validation"])
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path, moment: str) -> None:
    text, folder, quiet = tmp_path / "words.txt", tmp_path / "run", Console(quiet=True)
    text.write_text("the cat sat on the mat " * 100)
    settings = {"data": str(text), "steps": 4, "eval_interval": 2, "batch": 2, "window": {"context": 8}, "lanes": 1}
    asked = override(find_config("gpt2-c256+layers=1+width=16+heads=2"), {**settings, "device": "cpu"})
    config = resolve(asked, load_dataset(str(text)))
    if moment == "before its first checkpoint was whole":
        (folder / "last" / "partial").mkdir(parents=True)
    else:
        train(dataclasses.replace(config, out=str(folder)), console=quiet)
    assert [point.step for point in run_once(config, folder, quiet).points] == [2, 4]


def test_a_file_is_whole_or_told(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "{}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.json"]
    for wrong in (tmp_path, tmp_path / "a.json" / "b.json"):
        with pytest.raises(RidgelineError, match=r"is a folder|cannot write"):
            check_place(wrong)
    check_place(tmp_path / "new" / "b.json")
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("compare gpt2-c256 fast-c256 --steps 2 --data words.txt --out words.txt", "exists and holds no study"),
        (
            "compare gpt2-c256 fast-c256 --steps 2 --data words.txt --target nan",
            "the target must be a finite loss above 0",
        ),
        ("search --base gpt2-c256 --data words.txt --out words.txt", "exists and holds no search"),
        ("search --base gpt2-c256 --data words.txt --out .", "exists and holds no search"),
        ("search --base gpt2-c256 --data words.txt --out words.txt/a", "cannot write to the run's folder"),
        ("search --base gpt2-c256 --data words.txt --seed -1", "seed of a search must be from 0 to 4294967295, got -1"),
        ("search --base gpt2-c256 --data words.txt --least-steps 0", "least_steps must be at least 1, got 0"),
        ("inversion --device cpu --batch 0", "needs batch ≥ 1"),
        ("inversion --device cpu --context 0", "needs batch ≥ 1 and context ≥ 1, got 4 and 0"),
        ("inversion --device cpu --out .", "is a folder; give the name of a file"),
        ("inversion --device cpu --out words.txt/record.json", "cannot write"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("the cat sat on the mat " * 200)
    if line.startswith("search"):
        pytest.importorskip("optuna", reason="the extra search is not installed")
    assert sentence in refused(capsys, "study", *line.split())
