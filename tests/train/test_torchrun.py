"""Runs of several processes under torchrun: one process' losses, either's checkpoints, a process that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ridgeline import checkpoint
from ridgeline.train.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS = 24
SETTINGS = {"layers": 1, "width": 16, "heads": 2, "context": 16, "dropout": 0.0}


def command(processes: int, *arguments: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "ridgeline", *map(str, arguments)]


def tiny(text: Path, out: Path, *more: object) -> list[object]:
    model = [part for name, value in SETTINGS.items() for part in (f"--model.decoder.{name}", value)]
    length = ["--window.context", 16, "--batch", 8, "--steps", STEPS, "--eval-interval", 8, "--checkpoint-interval", 4]
    return ["train", "gpt2-c256", "--data", text, *model, *length, "--device", "cpu", "--out", out, "--json", *more]


def environment(slow: Path | None = None) -> dict[str, str]:
    """Environment of a child; with a folder one in which every step takes a while, so that it can be caught in one."""
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    if slow is None:
        return own
    (slow / "sitecustomize.py").write_text(
        "import time\n"
        "from ridgeline.engine import step as own\n"
        "from ridgeline.train import step as pytorch\n"
        "for kind in (own.TrainStep, pytorch.TorchStep):\n"
        "    kind.__call__ = lambda self, batch, call=kind.__call__: (time.sleep(0.1), call(self, batch))[1]\n"
    )
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [str(slow), os.environ.get("PYTHONPATH", "")]))}


def run(processes: int, *arguments: object) -> dict[str, object]:
    done = subprocess.run(
        command(processes, *arguments), env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (summary,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # one speaks for all
    return summary


def curve(folder: Path) -> list[float]:
    return [record.get("loss", record.get("val_loss")) for record in read_metrics(folder)]


def stopped(processes: int, stop: int, arguments: list[object], folder: Path, home: Path) -> tuple[int, str]:
    """A run that is disturbed after its eighth step: its exit code, and what it said."""
    child = subprocess.Popen(
        command(processes, *arguments),
        env=environment(home),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    end = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < 9:
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    if stop == signal.SIGKILL:
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        os.kill(int(workers[-1]), stop)
    else:
        child.send_signal(stop)
    _, said = child.communicate(timeout=120)
    return child.returncode, said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, and its text."""
    home = tmp_path_factory.mktemp("alone")
    text, folder = home / "words.txt", home / "run"
    text.write_text("the cat sat on the mat and the rat ran at the cat; " * 80)
    run(1, *tiny(text, folder))
    return folder, text


def test_processes_train_as_one(alone, tmp_path):
    folder, text = alone
    summary = run(2, *tiny(text, tmp_path / "run", "--accumulation", 2))
    assert summary["tokens"] == STEPS * 8 * 16
    assert curve(tmp_path / "run") == pytest.approx(curve(folder), rel=1e-4)
    assert checkpoint.load(tmp_path / "run/last").meta["data"]["position"] == STEPS * 8


def test_a_killed_process_ends_the_run_and_one_goes_on(alone, tmp_path):
    folder, text = alone
    killed = tmp_path / "killed"
    code, said = stopped(2, signal.SIGKILL, tiny(text, killed), killed, tmp_path)
    assert code not in (0, -signal.SIGKILL)
    assert "ridgeline: " in said
    assert "is gone" in said
    assert "Traceback" not in said.split("ridgeline: ")[1].splitlines()[0]
    assert checkpoint.load(killed / "last").meta["step"] in (4, 8, 12, 16)  # that of step 8 may have been under way
    run(1, "train", "--resume", killed, "--json")
    assert curve(killed) == pytest.approx(curve(folder), rel=1e-4)


def test_one_process_is_interrupted_and_two_go_on(alone, tmp_path):
    folder, text = alone
    code, _ = stopped(1, signal.SIGINT, tiny(text, tmp_path / "run"), tmp_path / "run", tmp_path)
    assert code == 130
    assert checkpoint.load(tmp_path / "run/last").meta["step"] < STEPS
    run(2, "train", "--resume", tmp_path / "run", "--json")
    assert curve(tmp_path / "run") == pytest.approx(curve(folder), rel=1e-4)
