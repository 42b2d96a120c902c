"""Losses of best, bf16 copies and autocast beside fp32, gpt2-c256; one JSON.  PYTHONPATH=src python dev/gpu/agreement_gpu.py [SEEDS]"""

import json
import os
import sys
import time

import torch

from ridgeline.bench.agreement import agreement, chain
from ridgeline.bench.workloads import workload

began = time.time()
seeds = int(sys.argv[1]) if sys.argv[1:] else 5
found = agreement(
    workload("gpt2-c256", precision="bf16"),
    chain(65, 1_000_000, 7),
    seeds=seeds,
    steps=500,
    device=torch.device("cuda:0"),
)
table = {r.variant: {"distance": r.distance, "worst": r.worst, "final": [run[-1] for run in r.losses]} for r in found}
print(json.dumps(table, indent=1), f"{time.time() - began:.0f} s", flush=True)
with open(f"{os.environ.get('OUT', '/tmp')}/agreement.json", "w") as file:
    json.dump(
        {**table, "curves": {r.variant: [[round(x, 5) for x in run[::5]] for run in r.losses] for r in found}}, file
    )
