"""`best` on one card and on two, all in one run whose turns go round: a line each, and a record a workload.

RIDGELINE_REVISION=… PYTHONPATH=src OUT=$OUT python dev/gpu/scaling_gpu.py [SECONDS]      (two cards, both alone)
"""

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace

import torch

from ridgeline.bench import run
from ridgeline.bench.nvml import merged
from ridgeline.bench.plan import Plan
from ridgeline.bench.usual import record_file
from ridgeline.bench.workloads import workload
from ridgeline.records import write_record

OUT = os.environ.get("OUT", "/tmp")
ROWS = [  # preset, windows a card, cards, the first one
    ("hal-20m", 512, 1, 0),
    ("hal-20m", 512, 2, 0),
    ("hal-20m", 256, 2, 0),
    ("gpt2-c256", 512, 1, 0),
    ("gpt2-c256", 512, 2, 0),
]
ROUNDS, STEPS, TURN_S = 6, 10, 0.4
began, limit = time.time(), float(sys.argv[1]) if sys.argv[1:] else 70.0
turn, gone, number, found = threading.Condition(), set(), 0, {}
writing, files = threading.Lock(), {}
start = run._Bench._start


def pass_on(row):
    """The next one's turn, over those that are gone."""
    global number
    with turn:
        if row is not None:
            gone.add(row)
        else:
            number += 1
        while len(gone) < len(ROWS) and number % len(ROWS) in gone:
            number += 1
        turn.notify_all()


def started(self, names, teams):
    """In place of a run's start: nobody is timed while another still compiles."""
    late = start(self, names, teams)
    with contextlib.suppress(threading.BrokenBarrierError):
        arrived.wait(max(1.0, limit - 15 - time.time() + began))
    return late


def turns(self, teams):
    """In place of a run's turns: one in each round of all."""
    row = int(threading.current_thread().name)
    team = teams[0]
    for _ in range(self.plan.rounds):
        with turn:
            if not turn.wait_for(lambda: number % len(ROWS) == row, max(0.1, limit - 3 - time.time() + began)):
                break
        team.send({"time": self.plan.steps, "at_least_s": self.plan.turn_s})
        team.times_ms += team.wait(30.0, self.watch, self.load).get("times_ms", [])
        pass_on(None)
        if team.error:
            break
    pass_on(row)


def write(row, record):
    """The record of a row's workload, with every number of cards that was measured until now in a group of its own."""
    with writing:
        found[row] = record
        key = ROWS[row][:2]
        rows = [other for other in sorted(found) if ROWS[other][:2] == key]
        results, clocks = [], None
        for group, other in enumerate(rows):
            results += [replace(c, group=group, gpus=ROWS[other][2]) for c in found[other].contenders]
            clocks = merged(clocks, found[other].clocks) if found[other].clocks else clocks
        most = max(ROWS[other][2] for other in rows)
        whole = replace(found[rows[0]], gpus=most, clocks=clocks, contenders=results)
        if key not in files:
            files[key] = record_file(replace(whole, gpus=max(r[2] for r in ROWS if r[:2] == key)), OUT)
        write_record(whole, files[key])


def measure(row):
    """One row."""
    name, batch, cards, first = ROWS[row]
    case = workload(name, batch=batch, precision="bf16")
    plan = Plan(
        rounds=ROUNDS, steps=STEPS, turn_s=TURN_S, warm_s=3.0, build_s=limit, phases=0, profile=0, together=True
    )
    try:
        record = run.run_bench(case, ["best"], torch.device("cuda", first), plan, gpus=[cards])
        result = record.contenders[0]
        print(name, batch, cards, result.error or f"{result.step_ms:.4f} ms, {result.spread:.1%}", flush=True)
        write(row, record)
    except Exception as error:
        print(name, batch, cards, f"{type(error).__name__}: {error}"[:300], flush=True)
        pass_on(row)


arrived = threading.Barrier(len(ROWS))
run._Bench._start, run._Bench._turns = started, turns
threads = [threading.Thread(target=measure, args=(row,), name=str(row), daemon=True) for row in range(len(ROWS))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(max(1.0, limit - time.time() + began))
for one, two, what in ((0, 1, "hal-20m, 512 windows a card"), (0, 2, "hal-20m, 512 in all"), (3, 4, "gpt2-c256, 512")):
    a, b = (found[row].contenders[0].tokens_per_s if row in found else None for row in (one, two))
    if a and b:
        print(f"{what}: {a / 1e6:.2f} M tokens/s on one card, {b / 1e6:.2f} on two: {b / a:.3f} x", flush=True)
os._exit(0)
