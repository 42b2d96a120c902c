import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_own_model_learns():
    losses = [float(line.split()[-1]) for line in run("own_model.py", 120).splitlines()]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]


def test_from_python_goes_on_and_writes(text, tmp_path):
    first, *written = run("from_python.py", text, tmp_path / "run").splitlines()
    losses = [float(word.strip(",")) for word in first.split() if word[0].isdigit()]
    assert losses[1] < losses[0]
    assert written
