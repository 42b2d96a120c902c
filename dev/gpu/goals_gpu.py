"""Records for the goals: several workloads start together, then take turns; one JSON of records, a line each printed.

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
from ridgeline.bench.ratios import over_pytorch
from ridgeline.bench.run import run_bench
from ridgeline.bench.workloads import workload
from ridgeline.records import write_record

OUT = Path(os.environ.get("OUT", "/tmp"))
PAIR = "best,compile+graph"
ROWS = {  # sizes, contenders, steps of a turn, steps whose phases are measured
    "hal-20m": ({}, "best,compile+graph:explicit", 8, 3),
    "hal-5m": ({}, PAIR, 15, 3),
    "gpt2-c256": ({}, PAIR, 40, 3),
    "fast-c256": ({}, PAIR, 40, 3),
    "gpt2-c256-512": ({"batch": 512}, PAIR, 12, 0),
    "fast-c256-512": ({"batch": 512}, PAIR, 12, 0),
    "gpt2-c256-2048": ({"batch": 4, "context": 2048}, PAIR, 30, 0),
    "fast-c256-2048": ({"batch": 4, "context": 2048}, PAIR, 30, 0),
    "gpt2-c256-fp32": ({"precision": "fp32"}, PAIR, 15, 0),
    "fast-c256-fp32": ({"precision": "fp32"}, PAIR, 15, 0),
    **{
        f"{name}-t{context}": ({"batch": 8192 // context, "context": context}, PAIR, 30, 0)
        for name in ("gpt2-c256", "fast-c256")
        for context in (128, 512, 1024)
    },
    "gpt2-124m": ({}, PAIR, 8, 3),
}
asked = sys.argv[1:] or ["hal-20m", "gpt2-c256"]
turn, gate, waiting, written = threading.Lock(), threading.Condition(), set(asked), {}
start, turns, look = run._Bench._start, run._Bench._turns, run._Bench._look_inside


def arrive(key):
    """Nobody is timed while another still compiles or warms up; one that fails holds nobody up."""
    with gate:
        waiting.discard(key)
        gate.notify_all()
        gate.wait_for(lambda: not waiting, 150)


def started(self, *given):
    found = start(self, *given)
    arrive(threading.current_thread().name)
    return found


def locked(method):
    def call(self, workers):
        with turn:
            return method(self, workers)

    return call


run._Bench._start, run._Bench._turns, run._Bench._look_inside = started, locked(turns), locked(look)


def one(key):
    sizes, contenders, steps, phases = ROWS[key]
    name = next(n for n in ("gpt2-124m", "gpt2-c256", "fast-c256", "hal-20m", "hal-5m") if key.startswith(n))
    try:
        case = workload(name, **sizes)
        plan = Plan(rounds=4, steps=steps, turn_s=0.25, warm_s=2, build_s=130, phases=phases, profile=0, together=True)
        record = run_bench(case, contenders.split(","), torch.device("cuda:0"), plan)
        stem = f"{record.date[:10]}-bench-{name}-b{case.batch}-t{case.context}-{case.precision}"
        file = write_record(record, Path("/tmp") / f"{stem}.json")
        with turn:
            written[file.name] = json.loads(file.read_text())
            (OUT / "bench_records.json").write_text(json.dumps(written))
            said = [f"{c.name} {c.error or f'{c.step_ms:.4g}±{100 * c.spread:.0f}%'}" for c in record.contenders]
            print(key, *said, over_pytorch(record), flush=True)
    except Exception as error:
        print(key, type(error).__name__, str(error)[:200], flush=True)
    finally:
        with gate:
            waiting.discard(key)
            gate.notify_all()


began = time.time()
threads = [threading.Thread(target=one, args=(key,), name=key) for key in asked]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"{time.time() - began:.0f} s")
