"""Benchmark records: the rows of a wave start together and are timed one at a time; a line each printed.

    RIDGELINE_REVISION=… PYTHONPATH=src OUT=$OUT python dev/gpu/goals_gpu.py [SECONDS] ROW… [-- ROW…]…

The next wave starts when all rows of one are done. A row of a workload that an earlier row measured becomes a further
group of its record. SECONDS (default 150 a wave) ends it: a wave that would have less than 35 is left out, and what is
not built by its share of the time records that. `warm` as a row compiles hal-20m's rungs at a small batch, beside the
others. Records are in $OUT/bench_records.json after each row: the keys are file names for benchmarks/results.
"""

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

from ridgeline.bench import run
from ridgeline.bench.nvml import merged
from ridgeline.bench.plan import Plan
from ridgeline.bench.processes import Team
from ridgeline.bench.ratios import over_pytorch
from ridgeline.bench.run import run_bench
from ridgeline.bench.workloads import workload
from ridgeline.models.rungs import RUNGS
from ridgeline.records import write_record

OUT, CARD = Path(os.environ.get("OUT", "/tmp")), torch.device("cuda:0")
PAIR, PYTORCH = "best,compile+graph", "eager,compile,graph,reduce-overhead"
ALL_RUNGS, SINGLES = ",".join(RUNGS), "m2+zero_fill,m2+reuse,m2+capture,r16-lanes"
MQA = "gpt2-c256+kv_heads=1"
LEAST_S, SHORT_TURN_S, SPARE_S = 35, 0.25, 8


@dataclasses.dataclass(frozen=True)
class Row:
    """Sizes, contenders, steps of a turn, steps whose phases are measured, steps profiled, rounds, who is profiled."""

    sizes: dict = dataclasses.field(default_factory=dict)
    contenders: str = PAIR
    steps: int = 30
    phases: int = 0
    profile: int = 0
    rounds: int = 4
    within: tuple = ()


def rows():
    """By name; what stands before a colon or a size is the workload."""
    small = {"rounds": 2, "phases": 2}
    found = {
        "hal-20m": Row(contenders="best,compile+graph:explicit", steps=8, phases=3),
        "hal-5m": Row(steps=15, phases=3),
        "gpt2-c256": Row(steps=40, phases=3),
        "fast-c256": Row(steps=40, phases=3),
        "gpt2-124m": Row(steps=8, phases=3),
        # a card holds about seven of hal-20m's contenders, so its ladder is in groups
        "hal-20m:ladder": Row({}, f"{PAIR},compile+graph:explicit,m1,m2,m3,r16", 4, profile=1, **small),
        "hal-20m:foot": Row({}, f"{PAIR},eager,compile,reduce-overhead,m0", 3, profile=1, within=("m0",), **small),
        "hal-20m:graph": Row({}, f"{PAIR},graph,max-autotune", 4, **small),
        "hal-20m:singles": Row({}, f"{PAIR},m2,{SINGLES}", 4, rounds=2),
        "hal-5m:ladder": Row({}, f"{PAIR},{ALL_RUNGS},r16+recompute", 6, **small),
        "hal-5m:pytorch": Row({}, f"{PAIR},{PYTORCH}", 6, **small),
    }
    for name in ("gpt2-c256", "fast-c256"):
        peers = "transformers,liger" if name == "gpt2-c256" else "liger"
        found[f"{name}:all"] = Row({}, f"{PAIR},{PYTORCH},{peers},{ALL_RUNGS},{SINGLES}", 30, **small)
        found[f"{name}:autotune"] = Row({}, f"{PAIR},max-autotune", 30, **small)
        found[f"{name}-512"] = Row({"batch": 512}, steps=12)
        found[f"{name}-fp32"] = Row({"precision": "fp32"}, steps=15)
        for context in (128, 512, 1024):
            found[f"{name}-t{context}"] = Row({"batch": 8192 // context, "context": context})
    for name in ("gpt2-c256", "fast-c256", MQA):  # what one KV head does for long windows
        found[f"{name}-2048"] = Row({"batch": 4, "context": 2048})
        found[f"{name}-4096"] = Row({"batch": 4, "context": 4096})
    return found


ROWS = rows()
turn, gate, written = threading.Lock(), threading.Condition(), {}
waiting: set = set()
end_s = float("inf")
start, turns, look = run._Bench._start, run._Bench._turns, run._Bench._look_inside


def name_of(key):
    return next(n for n in (MQA, "gpt2-124m", "gpt2-c256", "fast-c256", "hal-20m", "hal-5m") if key.startswith(n))


def arrive(key, limit_s=150):
    """Nobody is timed while another still compiles or warms up; one that fails holds nobody up."""
    with gate:
        waiting.discard(key)
        gate.notify_all()
        gate.wait_for(lambda: not waiting, limit_s)


def started(self, *given):
    found = start(self, *given)
    arrive(threading.current_thread().name)
    return found


def timed(self, teams):
    with turn:
        turns(self, teams)
        print(threading.current_thread().name, "took turns:", *medians(teams), flush=True)


def medians(teams):
    return [f"{t.name} {statistics.median(t.times_ms):.4g}" if t.times_ms else f"{t.name} {t.error[:60]}" for t in teams]


def looked(self, teams):
    """As far as there is time: whoever is left out has no phases and kernels, and keeps its times."""
    plan, within = self.plan, ROWS[threading.current_thread().name].within
    with turn:
        for team in sorted(teams, key=lambda team: "+" in team.name and team.name != "compile+graph"):
            if time.time() < end_s - SPARE_S:
                self.plan = plan if team.name in (within or (team.name,)) else dataclasses.replace(plan, profile=0)
                look(self, [team])
    self.plan = plan


run._Bench._start, run._Bench._turns, run._Bench._look_inside = started, timed, looked


def joined(before, record):
    """Two records of one workload as one: the groups of the later behind those of the earlier."""
    run._check_alike(before, record)
    shift = 1 + max(c.group for c in before.contenders)
    later = [dataclasses.replace(c, group=c.group + shift) for c in record.contenders]
    return dataclasses.replace(
        record, contenders=[*before.contenders, *later], clocks=merged(before.clocks, record.clocks)
    )


def keep(record):
    info = record.workload
    stem = f"bench-{info.name}-b{info.batch}-t{info.context}-{info.precision}"
    if stem in written:
        record = joined(written[stem], record)
    written[stem] = record
    values = {}
    for stem, each in written.items():
        file = write_record(each, OUT / f"{each.date[:10]}-{stem}.json")
        values[file.name] = json.loads(file.read_text())
        file.unlink()
    (OUT / "bench_records.json").write_text(json.dumps(values))


def told(c):
    if c.error:
        return f"{c.name}: {c.error[:110]}"
    groups = c.groups_ms_per_layer or {}
    sums = [sum(v for k, v in groups.items() if k.startswith(p)) for p in ("forward", "backward")]
    untold = sum(v for k, v in groups.items() if k.endswith("not told"))
    layer = " (%.2f+%.2f, ? %.3f)" % (*sums, untold) if groups else ""
    return f"{c.name} {c.step_ms:.4g}±{100 * c.spread:.0f}%{layer}"


def one(key, build_s):
    row = ROWS[key]
    try:
        case = workload(name_of(key), **row.sizes)
        plan = Plan(
            rounds=row.rounds, steps=row.steps, turn_s=SHORT_TURN_S, warm_s=1.5, build_s=build_s, phases=row.phases,
            profile=row.profile, together=True,
        )  # fmt: skip
        record = run_bench(case, row.contenders.split(","), CARD, plan)
        with turn:
            keep(record)
            print(key, *map(told, record.contenders), over_pytorch(record), sep="  ", flush=True)
    except Exception as error:
        print(key, type(error).__name__, str(error)[:200], flush=True)
    finally:
        with gate:
            waiting.discard(key)
            gate.notify_all()


def warm(build_s):
    """The rungs of hal-20m at a small batch: their kernels are then in Triton's cache."""
    plan = Plan(rounds=2, steps=2, warm_s=0, build_s=build_s, together=True)
    teams = [Team(workload("hal-20m", batch=16), name, CARD, plan, 1) for name in RUNGS]
    end = time.monotonic() + build_s
    for team in teams:
        team.wait(max(0.0, end - time.monotonic()))
        print("warm", team.name, team.error[:100], flush=True)
        team.close()
    with gate:
        waiting.discard("warm")
        gate.notify_all()


def share_cores(wave):
    """As many compiler processes for each contender that compiles as there are cores for."""
    names = [name for key in wave if key in ROWS for name in ROWS[key].contenders.split(",")]
    compiling = sum("compile" in name or name in ("reduce-overhead", "max-autotune", "transformers") for name in names)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(16, max(2, 2 * (os.cpu_count() or 2) // max(1, compiling))))


def main(arguments):
    seconds = float(arguments.pop(0)) if arguments and arguments[0].isdigit() else None
    waves = [wave.split() for wave in " ".join(arguments or ["hal-20m", "gpt2-c256"]).split(" -- ")]
    global end_s
    began = time.time()
    end = end_s = began + (seconds or 150 * len(waves))
    for wave in waves:
        left = end - time.time()
        if left < LEAST_S:
            print("no time for", *wave, flush=True)
            continue
        build_s = min(130, max(0.65 * left, left - 50))
        share_cores(wave)
        waiting.update(wave)
        threads = [
            threading.Thread(target=warm if key == "warm" else one, args=(build_s,) if key == "warm" else (key, build_s), name=key)
            for key in wave
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(1.0, end + 20 - time.time()))
        print(f"--- {time.time() - began:.0f} s", flush=True)
    os._exit(0)  # a row that hangs holds nothing up


if __name__ == "__main__":
    main(sys.argv[1:])
