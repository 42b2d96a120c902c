"""Runs that really are killed or interrupted, as processes of the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline.train.metrics import read_metrics

STEPS = 60


def command(*arguments):
    return [sys.executable, "-m", "ridgeline", *map(str, arguments)]


def tiny(text, out):
    settings = {"layers": 1, "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
    flags = [part for name, value in settings.items() for part in (f"--model.decoder.{name}", value)]
    length = ["--window.context", 16, "--batch", 4, "--steps", STEPS, "--eval-interval", 20]
    saving = ["--checkpoint-interval", 7, "--eval-windows", 16, "--device", "cpu", "--out", out, "--json"]
    return command("train", "gpt2-c256", "--data", text, *flags, *length, *saving)


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def curve(folder):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in read_metrics(folder)]


def wait_for(folder, step, process):
    """Until the run's file shows that it has done `step` steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be stopped"
        try:
            if any(record["step"] >= step for record in read_metrics(folder)):
                return
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    raise AssertionError(f"the run did not reach step {step} in two minutes")


def slowed(folder):
    """Environment in which every step of a child takes a while, so that it can be caught in the middle."""
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "import ridgeline.train.step as step\n"
        "call = step.TorchStep.__call__\n"
        "step.TorchStep.__call__ = lambda self, batch: (time.sleep(0.05), call(self, batch))[1]\n"
    )
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**environment(), "PYTHONPATH": path}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Folder of a run that nothing stopped, its summary, and its text."""
    home = tmp_path_factory.mktemp("whole")
    text, folder = home / "words.txt", home / "run"
    text.write_text("the cat sat on the mat and the rat ran at the cat; " * 80)
    result = subprocess.run(tiny(text, folder), env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout.splitlines()[-1]), text


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path, uninterrupted):
    whole, expected, text = uninterrupted
    process = subprocess.Popen(tiny(text, "killed"), env=slowed(tmp_path), stderr=subprocess.DEVNULL)
    wait_for("killed", 24, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 0 < len(curve("killed")) < len(curve(whole))
    resumed = subprocess.run(
        command("train", "--resume", "killed", "--json"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert curve("killed") == curve(whole)
    summary = json.loads(resumed.stdout.splitlines()[-1])
    same = ("preset", "steps", "tokens", "train_loss", "val_loss")
    assert {name: summary[name] for name in same} == {name: expected[name] for name in same}
    weights = [next(Path(folder, "last").glob("tensors-*")).read_bytes() for folder in ("killed", whole)]
    assert weights[0] == weights[1]


def test_interrupted_it_finishes_the_step_saves_and_exits_130(tmp_path, uninterrupted):
    whole, _, text = uninterrupted
    process = subprocess.Popen(
        tiny(text, "stopped"), env=slowed(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    wait_for("stopped", 10, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads(output.splitlines()[-1])
    assert 10 <= summary["steps"] < STEPS
    assert json.loads(Path("stopped/last/checkpoint.json").read_text())["meta"]["step"] == summary["steps"]
    resumed = subprocess.run(
        command("train", "--resume", "stopped"), env=environment(), capture_output=True, timeout=240
    )
    assert resumed.returncode == 0
    assert curve("stopped") == curve(whole)
