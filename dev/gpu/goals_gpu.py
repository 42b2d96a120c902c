"""Benchmark records: the rows of a wave start together and are timed one at a time; a line each printed.

    RIDGELINE_REVISION=… PYTHONPATH=src OUT=$OUT python dev/gpu/goals_gpu.py [SECONDS] ROW… [-- ROW…]…
    RIDGELINE_REVISION=… PYTHONPATH=src OUT=$OUT python dev/gpu/goals_gpu.py [SECONDS] build ROW… [-- ROW…]…

Rows stand in order of value: once all of a wave are built they are timed in that order, and only then looked into
(phases, kernels). A row of a workload that an earlier row measured becomes a further group of its record. SECONDS
(default 150 a wave) ends it: what a wave looks into leaves LATER_S to each wave after it, and a wave that would have
less than LEAST_S is left out. Records are in $OUT/bench_records.json as soon as they are timed, by their file names.
Scripts of several cards keep who builds and who needs a quiet host out of each other's way (HOST).
`build` measures nothing: the first step of every contender that compiles, so that a later run finds its kernels.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ridgeline.bench import run
from ridgeline.bench.contenders import find_contender
from ridgeline.bench.nvml import merged
from ridgeline.bench.plan import Plan
from ridgeline.bench.ratios import over_pytorch
from ridgeline.bench.workloads import workload
from ridgeline.models.rungs import RUNGS, is_rung
from ridgeline.records import write_record

OUT, CARD = Path(os.environ.get("OUT", "/tmp")), torch.device("cuda:0")
PAIR = "best,compile+graph"
PYTORCH = f"{PAIR},reduce-overhead,graph,eager"  # what the second article compares; torch.compile alone is in ladders
ALL_RUNGS, SINGLES = ",".join(RUNGS), "m2+zero_fill,m2+reuse,m2+capture,r16-lanes"
MQA = "gpt2-c256+kv_heads=1"
NAMES = (MQA, "gpt2-124m", "gpt2-c256", "fast-c256", "hal-20m", "hal-5m")
LEAST_S, LATER_S, SPARE_S, SHORT_TURN_S = 35, 60, 8, 0.25
BUILD_S = 130  # longest time in which a wave is built
ANSWER_S = 45  # longest turn, or look into a contender; who takes longer is ended
LARGE = {"hal-20m": 25, "gpt2-124m": 36, "hal-5m": 6}  # GiB of a contender, 2 where none is given
LENT_GIB = 60  # what `build` takes of a card that others use
CORES = os.cpu_count() or 2
HOST = Path(tempfile.gettempdir()) / "ridgeline-host"  # locked: shared by who builds, alone by who needs a quiet host
QUIET_S = 70  # longest that one waits for the other


@dataclasses.dataclass(frozen=True)
class Row:
    """Sizes, contenders, steps of a turn, its shortest length, steps whose phases are measured, steps profiled, rounds, who
    is profiled, whether it is looked into last, when the memory of the others is free, and whether it is timed on a quiet
    host, because kernels that are launched one by one would wait for it."""

    sizes: dict = dataclasses.field(default_factory=dict)
    contenders: str = PAIR
    steps: int = 30
    turn_s: float = SHORT_TURN_S
    phases: int = 0
    profile: int = 0
    rounds: int = 4
    within: tuple = ()
    last: bool = False
    quiet: bool = False


def rows():
    """By name; what stands before a colon or a size is the workload."""
    short = {"rounds": 2, "phases": 2}
    rungs = ("best", *RUNGS)
    found = {
        # a card holds about six of hal-20m's contenders and none of hal-5m's beside them: three groups, a wave each.
        # At the power limit a step is faster until the limit is felt: turns long enough that it is, most of the time
        "hal-20m": Row({}, f"{PAIR},compile+graph:explicit", 10, 1.2, rounds=6, phases=3, last=True),
        "hal-20m:pytorch": Row(
            {}, f"{PAIR},compile+graph:explicit,reduce-overhead,compile", 10, 1.2, phases=3, last=True
        ),
        "hal-20m:ladder": Row({}, f"{PAIR},m1,m2,m3,r16", 4, profile=1, quiet=True, **short),
        "hal-20m:foot": Row({}, f"{PAIR},m0,eager", 3, profile=1, within=("m0",), **short),
        "hal-20m:graph": Row({}, f"{PAIR},graph,max-autotune", 4, **short),
        "hal-20m:singles": Row({}, f"{PAIR},m2,{SINGLES}", 4, rounds=2),
        "hal-5m": Row({}, f"{PYTORCH},compile+graph:explicit", 10, 0.6, phases=3),
        "hal-5m:ladder": Row(
            {}, f"{PAIR},{ALL_RUNGS},r16+recompute,compile", 6, profile=1, within=rungs, quiet=True, **short
        ),
        "gpt2-124m": Row({}, PAIR, 8, 1.2, rounds=6, phases=3, last=True),
    }
    for name in ("gpt2-c256", "fast-c256"):
        peers = "transformers,liger" if name == "gpt2-c256" else "liger"
        found[name] = Row({}, PYTORCH, 30, phases=3, quiet=True)
        ladder = f"{PAIR},{ALL_RUNGS},{peers},compile,{SINGLES}"
        found[f"{name}:ladder"] = Row({}, ladder, 30, profile=1, within=rungs, quiet=True, **short)
        found[f"{name}:autotune"] = Row({}, f"{PAIR},max-autotune", 30, **short)
        found[f"{name}-512"] = Row({"batch": 512}, steps=12, turn_s=0.8)
        found[f"{name}-fp32"] = Row({"precision": "fp32"}, steps=15)
        for context in (128, 512, 1024):
            sizes = {"batch": 8192 // context, "context": context}
            found[f"{name}-t{context}"] = Row(sizes, PYTORCH, rounds=2, quiet=True)
        found[f"{name}-2048"] = Row({"batch": 4, "context": 2048}, PYTORCH, quiet=True)
    found[f"{MQA}-2048"] = Row({"batch": 4, "context": 2048})
    for name in ("gpt2-c256", "fast-c256", MQA):  # what one KV head does for long windows
        found[f"{name}-4096"] = Row({"batch": 4, "context": 4096})
    pairs = {key: row for key, row in found.items() if row.contenders == PYTORCH}  # what the goals ask of them
    return found | {f"{key}:pair": dataclasses.replace(row, contenders=PAIR, quiet=False) for key, row in pairs.items()}


ROWS = rows()


def name_of(key):
    return next(name for name in NAMES if key.startswith(name))


def tunes(keys):
    """Whether one of the rows has a contender that times what it compiles before it takes a step."""
    return any("max-autotune" in ROWS[key].contenders for key in keys)


@contextlib.contextmanager
def host(alone):
    """While someone else uses the host otherwise this waits; it goes on after QUIET_S, and says so."""
    with open(HOST, "w") as file:
        end, kind = time.time() + QUIET_S, fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.time() > end:
                    print("the host is not quiet", "for" if alone else "while this builds:", row_here(), flush=True)
                    break
                time.sleep(0.1)
        yield


class Wave:
    """The rows of a wave: all are built before any is timed, all are timed before any is looked into.

    Args:
        keys: rows in order of value.
        build_s: longest time until all are built.
        end: clock at which nothing more is looked into.
        host: holds the host while this builds.
    """

    def __init__(self, keys, build_s, end, host):
        self.keys, self.end, self.limit = keys, end, time.time() + build_s
        self.began, self.change = time.time(), threading.Condition()
        self.left = sum(len(ROWS[key].contenders.split(",")) for key in keys)  # contenders that are not built
        self.few = 0 if tunes(keys) else max(1, self.left // 10)  # who tunes takes minutes, and the others seconds
        self.building = set(keys)  # rows
        self.host = host
        looks = sorted(keys, key=lambda key: ROWS[key].last)
        self.order = [("turns", key) for key in keys] + [("look", key) for key in looks]

    def built(self, teams):
        """Waits for the contenders of a row; the last tenth of a wave has half as long again, and 15 s."""

        def wait(team):
            team.wait(max(1.0, self.limit - time.time()))
            with self.change:
                self.left -= 1
                self.change.notify_all()

        threads = [threading.Thread(target=wait, args=(team,), daemon=True) for team in teams]
        for thread in threads:
            thread.start()
        with self.change:
            self.change.wait_for(lambda: self.left <= self.few, max(0.0, self.limit - time.time()))
            spare = min(self.limit, time.time() + 15 + 0.5 * (time.time() - self.began))
            self.change.wait_for(lambda: not any(thread.is_alive() for thread in threads), spare - time.time())
        for team, thread in zip(teams, threads, strict=True):
            if thread.is_alive():
                team.error = team.error or f"not built after {time.time() - self.began:.0f} s"
                for worker in team._workers:
                    worker._process.kill()
            thread.join(5)

    def arrive(self, key):
        """Nobody is timed while another still compiles or warms up."""
        with self.change:
            self.building.discard(key)
            self.change.notify_all()
            self.change.wait_for(lambda: not self.building, max(0.0, self.limit + 10 - time.time()))
            self.host.close()

    def leave(self, key, *what):
        """The row has done it, or will not."""
        with self.change:
            self.building -= {key} if not what else set()
            if not self.building:
                self.host.close()
            self.order = [(w, k) for w, k in self.order if k != key or (what and w not in what)]
            self.change.notify_all()

    def wait_turn(self, key, what):
        """Returns when everything before it is done."""
        with self.change:
            self.change.wait_for(lambda: self.order[0] == (what, key))


wave: Wave
records, lock = {}, threading.Lock()
start, turns, look = run._Bench._start, run._Bench._turns, run._Bench._look_inside


def row_here():
    return threading.current_thread().name


def started(self, names, teams):
    teams += [run.Team(self.case, name, self.device, self.plan, 1) for name in names]
    wave.built(teams)
    for team in teams:
        run.settle(team, self.plan)
        if team.out_of_memory:  # no further group: it would compile under the others' turns
            team.error = "found no memory beside the others"
    wave.arrive(row_here())
    return []


def timed(self, teams):
    wave.wait_turn(row_here(), "turns")
    with host(alone=True) if ROWS[row_here()].quiet else contextlib.nullcontext():
        turns(self, teams)
    print(row_here(), "took turns:", *medians(teams), f"at {time.time() - wave.began:.0f} s", flush=True)
    wave.leave(row_here(), "turns")


def medians(teams):
    found = [(t.name, f"{statistics.median(t.times_ms):.4g}" if t.times_ms else t.error[:60]) for t in teams]
    return [" ".join(pair) for pair in found]


def looked(self, teams):
    """As far as there is time: whoever is left out has no phases and kernels, and keeps its times."""
    plan, within = self.plan, ROWS[row_here()].within
    if not plan.phases and not plan.profile:
        return  # its memory is free for the others
    wave.wait_turn(row_here(), "look")
    for team in sorted(teams, key=lambda team: "+" in team.name and team.name != "compile+graph"):
        if time.time() < wave.end - SPARE_S:
            self.plan = plan if team.name in (within or (team.name,)) else dataclasses.replace(plan, profile=0)
            look(self, [team])
    self.plan = plan


run._Bench._start, run._Bench._turns, run._Bench._look_inside = started, timed, looked


def joined(before, record):
    """Two records of one workload as one: the groups of the later behind those of the earlier."""
    run._check_alike(before, record)
    shift = 1 + max(c.group for c in before.contenders)
    later = [dataclasses.replace(c, group=c.group + shift) for c in record.contenders]
    clocks = merged(before.clocks, record.clocks) if record.clocks else before.clocks
    return dataclasses.replace(record, contenders=[*before.contenders, *later], clocks=clocks)


def keep(key, record):
    """Writes all records, this one in place of what its row had before; one without times is none."""
    if not any(c.step_ms for c in record.contenders):
        return
    info = record.workload
    stem = f"bench-{info.name}-b{info.batch}-t{info.context}-{info.precision}"
    with lock:
        records.setdefault(stem, {})[key] = record
        values = {}
        for name, parts in records.items():
            whole, *more = parts.values()
            for part in more:
                whole = joined(whole, part)
            file = write_record(whole, OUT / f"{whole.date[:10]}-{name}.json")
            values[file.name] = json.loads(file.read_text())
            file.unlink()
        fresh = OUT / "bench_records.json.new"
        fresh.write_text(json.dumps(values))
        fresh.replace(OUT / "bench_records.json")


def told(c):
    if c.error:
        return f"{c.name}: {c.error[:110]}"
    groups = c.groups_ms_per_layer or {}
    sums = [sum(v for k, v in groups.items() if k.startswith(p)) for p in ("forward", "backward")]
    untold = sum(v for k, v in groups.items() if k.endswith("not told"))
    layer = " (%.2f+%.2f, ? %.3f)" % (*sums, untold) if groups else ""
    return f"{c.name} {c.step_ms:.4g}±{100 * c.spread:.0f}%{layer}"


def one(key):
    row = ROWS[key]
    try:
        case = workload(name_of(key), **row.sizes)
        plan = Plan(
            rounds=row.rounds, steps=row.steps, turn_s=row.turn_s, warm_s=1.5, build_s=ANSWER_S,
            phases=row.phases, profile=row.profile, together=True,
        )  # fmt: skip
        names = row.contenders.split(",")
        record = run.run_bench(case, names, CARD, plan, keep=lambda record: keep(key, record))
        print(key, *map(told, record.contenders), over_pytorch(record), sep="  ", flush=True)
    except Exception as error:
        print(key, type(error).__name__, str(error)[:200], flush=True)
    finally:
        wave.leave(key)


def compiles(name):
    """Whether a contender's kernels are compiled when it is built, by PyTorch or by Triton."""
    return bool(find_contender(name).settings.compile) or is_rung(name.split(":")[0]) or name == "liger"


def share_cores(contenders):
    """As many compiler processes for each contender that compiles as there are cores for."""
    compiling = max(1, sum(bool(find_contender(name).settings.compile) for name in contenders))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(16, max(1, CORES // compiling)))


def worth(name):
    """The order in which contenders are built: what every group has first."""
    order = "max-autotune compile+graph compile+graph:explicit reduce-overhead transformers liger compile".split()
    return order.index(name) if name in order else len(order)


def build(keys, end):
    """Takes the first step of every contender that compiles: what a later run finds in its caches."""
    asked = {}
    for key in keys:
        case = workload(name_of(key), **ROWS[key].sizes)
        for name in filter(compiles, ROWS[key].contenders.split(",")):
            asked.setdefault((case.info(), name), (case, name, key))
    plan = Plan(rounds=2, steps=2, warm_s=0, together=True)
    share_cores([name for _, name, _ in asked.values()])
    free, change, began = [LENT_GIB], threading.Condition(), time.time()

    def step(case, name, key):
        needs = LARGE.get(case.name, 7 if case.batch == 512 else 2)
        with change:
            change.wait_for(lambda: free[0] >= needs)
            free[0] -= needs
        begin, left = time.time(), end - time.time()
        if left > 10:
            team = run.Team(case, name, CARD, plan, 1)
            team.wait(left)
            team.close()
            said = f"built {key} {name} {time.time() - begin:.0f} s, at {time.time() - began:.0f}"
            print(said, team.error[:150], flush=True)
        else:
            print(f"no time for {key} {name}", flush=True)
        with change:
            free[0] += needs
            change.notify_all()

    with ThreadPoolExecutor(max(2, 3 * CORES // 4)) as pool:
        for given in sorted(asked.values(), key=lambda given: worth(given[1])):
            pool.submit(step, *given)


def main(arguments):
    seconds = float(arguments.pop(0)) if arguments and arguments[0].isdigit() else None
    only_build = arguments[:1] == ["build"]
    asked = " ".join(arguments[only_build:] or ["hal-20m:pytorch", "gpt2-c256"])
    waves = [part.split() for part in asked.split(" -- ")]
    odd = {key for keys in waves for key in keys} - set(ROWS)
    if odd:
        sys.exit(f"no row is called {', '.join(sorted(odd))}; known: {', '.join(ROWS)}")
    global wave
    began = time.time()
    end = began + (seconds or 150 * len(waves))
    if only_build:
        build([key for keys in waves for key in keys], end)
        print(f"--- {time.time() - began:.0f} s", flush=True)
        os._exit(0)
    for place, keys in enumerate(waves):
        building = contextlib.ExitStack()
        building.enter_context(host(alone=False))
        left, later = end - time.time(), len(waves) - place - 1
        if left < LEAST_S:
            print("no time for", *keys, flush=True)
            building.close()
            continue
        build_s = min(BUILD_S * (2 if tunes(keys) else 1), left - 20 - 40 * later)
        share_cores([name for key in keys for name in ROWS[key].contenders.split(",")])
        wave = Wave(keys, build_s, end - LATER_S * later, building)
        threads = [threading.Thread(target=one, args=(key,), name=key) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(1.0, end + 20 - time.time()))
        print(f"--- {time.time() - began:.0f} s", flush=True)
    os._exit(0)  # a row that hangs holds nothing up


if __name__ == "__main__":
    main(sys.argv[1:])
