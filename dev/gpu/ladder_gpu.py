"""The ladder as a group of hal-20m's record: every rung beside `best`, with its kernels; a line each printed.

OUT=… PYTHONPATH=src python dev/gpu/ladder_gpu.py warm      # in the background: compiles the rungs at a small batch
OUT=… PYTHONPATH=src python dev/gpu/ladder_gpu.py run       # after goals_gpu.py hal-20m, with the same $OUT
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch

from ridgeline.bench.plan import Plan
from ridgeline.bench.processes import Team
from ridgeline.bench.run import run_bench
from ridgeline.bench.workloads import workload
from ridgeline.models.rungs import RUNGS
from ridgeline.records import read_record, write_record

OUT = Path(os.environ.get("OUT", "/tmp"))
CARD, NAMES = torch.device("cuda:0"), ["best", *RUNGS]


def warm():
    plan = Plan(rounds=2, steps=2, warm_s=0, together=True)
    teams = [Team(workload("hal-20m", batch=16), name, CARD, plan, 1) for name in RUNGS]
    for team in teams:
        team.wait(60)
        print("warm", team.name, team.error[:150], flush=True)
        team.close()


def goal_record():
    """hal-20m's record of goals_gpu.py, if there is one, to go on with."""
    file = OUT / "bench_records.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name, values in found.items():
        if "-hal-20m-b512-" in name:
            (OUT / "onto.json").write_text(json.dumps(values))
            return read_record(OUT / "onto.json")
    return None


def climb():
    began = time.time()
    plan = Plan(rounds=2, steps=4, turn_s=0.3, warm_s=1, build_s=60, phases=2, profile=1, together=True)
    onto = goal_record()

    def keep(record):
        write_record(record, OUT / f"{record.date[:10]}-bench-hal-20m-ladder-b512-t256-bf16.json")

    record = run_bench(workload("hal-20m"), NAMES, CARD, plan, onto=onto, keep=keep)
    for c in record.contenders:
        groups = c.groups_ms_per_layer or {}
        sums = [sum(v for k, v in groups.items() if k.startswith(p)) for p in ("forward", "backward")]
        untold = sum(v for k, v in groups.items() if k.endswith("not told"))
        print(c.group, c.name, c.error or f"{c.step_ms:.4g}±{100 * c.spread:.0f}%",
              "layer %.2f + %.2f ms, not told %.3f" % (*sums, untold) if groups else "",
              f"overlap {c.overlap:.0%}" if c.overlap is not None else "", flush=True)
    print(f"{time.time() - began:.0f} s", "with the goal's record" if onto else "alone", dataclasses.asdict(plan)["steps"])


if __name__ == "__main__":
    warm() if sys.argv[1:] == ["warm"] else climb()
