"""Seconds to the first step of `best`, with empty caches and with full ones, the choice of lanes beside it; one JSON.

PYTHONPATH=src OUT=$OUT python dev/gpu/first_gpu.py [PRESET …]      (about 60 s; presets side by side)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PRESETS = ("gpt2-c256", "fast-c256", "hal-20m", "gpt2-124m")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "RIDGELINE_CACHE", "CUDA_CACHE_PATH")
LIMIT = 90  # seconds of one process


def one(name):
    """What a training run does before its second step, from the model on."""
    import torch

    from ridgeline.bench.contenders import OPTIMIZER
    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.engine import TrainStep, choose_lanes
    from ridgeline.models import build

    case, device = workload(name, precision="bf16"), torch.device("cuda:0")
    batch = random_batch(case, device)

    def make(lanes):
        model = build(case.model, impl="fused", seed=0).to(device).train()
        return TrainStep(model, optimizer=OPTIMIZER, precision="bf16", lanes=lanes)

    torch.zeros(1, device=device)
    began = time.perf_counter()
    step = make(1)
    step(batch)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    del step
    began = time.perf_counter()
    lanes = choose_lanes(make, batch)
    print("RESULT " + json.dumps({"first_step_s": round(first, 2), "lanes_s": round(time.perf_counter() - began, 2)}))
    print(lanes, file=sys.stderr)


def main():
    """Each preset twice: the second time its caches are full."""
    asked, report = sys.argv[1:] or PRESETS, {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(asked)) as pool:

        def run(name, state):
            caches = {variable: str(Path(folder) / name / variable) for variable in CACHES}
            command = [sys.executable, __file__, "--one", name]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **caches}
                )
                line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
                found = json.loads(line[7:]) if line else {"error": done.stderr[-400:]}
            except subprocess.TimeoutExpired:
                found = {"error": f"more than {LIMIT} s"}
            report.setdefault(name, {})[state] = found
            print(name, state, json.dumps(found), flush=True)

        def both(name):
            for state in ("cold", "warm"):
                run(name, state)

        list(pool.map(both, asked))
    (Path(os.environ.get("OUT", "/tmp")) / "first.json").write_text(json.dumps(report, indent=1))


if sys.argv[1:2] == ["--one"]:
    one(sys.argv[2])
else:
    main()
