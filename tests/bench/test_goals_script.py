"""The script that makes the goals' records on a card goes from first row to last with teams that only pretend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PRETEND = """
import sys
sys.path[:0] = sys.argv[1:3]
import goals_gpu
import torch
from test_run import Fake
goals_gpu.run.Team, goals_gpu.CARD = Fake, torch.device("cpu")
for name in ("gpt2-c256", "fast-c256-512"):
    row = goals_gpu.ROWS[name]
    goals_gpu.ROWS[name] = goals_gpu.Row(row.sizes, "eager,compile", 4, phases=2)
goals_gpu.main(["60", "gpt2-c256", "fast-c256-512"])
"""


def test_rows_are_built_timed_and_kept(tmp_path):
    scripts = HERE.parents[1] / "dev/gpu"
    done = subprocess.run(
        [sys.executable, "-c", PRETEND, str(scripts), str(HERE)],
        env=os.environ | {"OUT": str(tmp_path), "TMPDIR": str(tmp_path), "RIDGELINE_REVISION": "0" * 40},
        capture_output=True,
        text=True,
        timeout=120,
    )
    for name in ("gpt2-c256", "fast-c256-512"):
        assert f"{name} took turns: eager 2 compile 2" in done.stdout, done.stdout + done.stderr
    records = json.loads((tmp_path / "bench_records.json").read_text())
    assert [record["workload"]["batch"] for record in records.values()] == [32, 512]
    assert all(one["step_ms"] == 2.0 for record in records.values() for one in record["contenders"])
