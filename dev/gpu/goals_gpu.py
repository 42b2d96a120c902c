"""Records for the goals: several workloads start together, then take turns; one JSON of records.

RIDGELINE_REVISION=… PYTHONPATH=src OUT=$OUT python dev/gpu/goals_gpu.py hal-20m gpt2-c256 [hal-5m fast-c256]
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from ridgeline.bench import run
from ridgeline.bench.plan import Plan
from ridgeline.bench.run import run_bench
from ridgeline.bench.view import table
from ridgeline.bench.workloads import workload
from ridgeline.records import write_record

OUT = Path(os.environ.get("OUT", "/tmp"))
ROWS = {
    "hal-20m": ({}, "best,compile+graph:explicit", 8),
    "hal-5m": ({}, "best,compile+graph", 20),
    "gpt2-c256": ({}, "best,compile+graph", 40),
    "fast-c256": ({}, "best,compile+graph", 40),
    "gpt2-c256-512": ({"batch": 512}, "best,compile+graph", 15),
    "fast-c256-512": ({"batch": 512}, "best,compile+graph", 15),
    "gpt2-c256-2048": ({"batch": 4, "context": 2048}, "best,compile+graph", 30),
    "fast-c256-2048": ({"batch": 4, "context": 2048}, "best,compile+graph", 30),
    "gpt2-c256-fp32": ({"precision": "fp32"}, "best,compile+graph", 20),
    "fast-c256-fp32": ({"precision": "fp32"}, "best,compile+graph", 20),
    **{
        f"{name}-t{context}": ({"batch": 8192 // context, "context": context}, "best,compile+graph", 30)
        for name in ("gpt2-c256", "fast-c256")
        for context in (128, 512, 1024)
    },
    "gpt2-124m": ({}, "best,compile+graph", 8),
}
asked = sys.argv[1:] or ["hal-20m", "gpt2-c256"]
barrier, turn, written = threading.Barrier(len(asked)), threading.Lock(), {}
start, turns, look = run._Bench._start, run._Bench._turns, run._Bench._look_inside


def started(self, *given):
    found = start(self, *given)
    barrier.wait(150)  # nobody is timed while another still compiles or warms up
    return found


def locked(method):
    def call(self, workers):
        with turn:
            return method(self, workers)

    return call


run._Bench._start, run._Bench._turns, run._Bench._look_inside = started, locked(turns), locked(look)


def one(key):
    sizes, contenders, steps = ROWS[key]
    name = next(n for n in ("gpt2-124m", "gpt2-c256", "fast-c256", "hal-20m", "hal-5m") if key.startswith(n))
    try:
        case = workload(name, **sizes)
        record = run_bench(
            case,
            contenders.split(","),
            torch.device("cuda:0"),
            Plan(rounds=6, steps=steps, warm_s=2, build_s=110, phases=3, profile=0, together=True),
        )
        file = write_record(
            record, Path("/tmp") / f"{record.date[:10]}-{name}-b{case.batch}-t{case.context}-{case.precision}.json"
        )
        with turn:
            written[file.name] = json.loads(file.read_text())
            (OUT / "bench_records.json").write_text(json.dumps(written))
            print(table(record), *(f"  {c.name} {c.phases_ms}" for c in record.contenders), sep="\n", flush=True)
    except Exception as error:
        barrier.abort()
        print(key, type(error).__name__, error, flush=True)


began = time.time()
threads = [threading.Thread(target=one, args=(key,)) for key in asked]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"{time.time() - began:.0f} s")
