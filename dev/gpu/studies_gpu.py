"""Records of studies: what is trained shares all cards with anything; what is timed has a card for itself.

PYTHONPATH=src:SITE OUT=$OUT python dev/gpu/studies_gpu.py SECONDS TINYSHAKESPEARE train|time|all JOB…

`train` trains comparisons beside each other over all visible cards: models (gpt2-c256, fast-c256 and each change
between), recipe (shakespeare-fast and each part taken back or added), article (gpt2-c256 and fast-c256 by the
article's recipe), boxing (recipes on Boxing's demonstrations); with divergence (divergence_gpu.py) as a further job.
`time` first finishes what was cut off; of what is still not whole, the seeds that all contenders have make the record.
Then it times a step of every contender on the first card, which nothing else may use by then, and writes the records.
Further jobs of `time`: fresh (the preset as a user calls it, three seeds, and once with empty caches) on the first
card; inversion and search on the last one. `all` is both: it says "alone from now on" in between.

Runs are kept in $STUDIES between two calls, and come back in $OUT/runs.tgz whatever happens; a later call takes them
from there where RUNS names such a file. SECONDS ends it. A rehearsal on a CPU: REHEARSAL="--steps 4 --eval-interval 2
--batch 2 --context 16 --seeds 2" TINY="+layers=1+width=32+heads=2" DIVERGENCE="20 2".
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

BEGUN = time.monotonic()
HOME = Path(os.environ.get("STUDIES", "/tmp/studies"))
OUT = Path(os.environ.get("OUT", "out"))
GO = HOME / "go"
REHEARSAL, TINY = os.environ.get("REHEARSAL", "").split(), os.environ.get("TINY", "")
STARTED: list = []
CLOCK_S, RECORD_S, INVERSION_S = 9, 9, 64  # kept for what is timed, and for its records
FAST, TARGET, SEEDS = "shakespeare-fast", 1.4697, 3
KEPT = ("result.json", "pace.json", "plan.json", "config.toml", "metrics.jsonl", "*.txt", "fresh*.json")
RECIPES = (
    "optimizer.algorithm=adamw+optimizer.lr=2e-3+steps=2400",
    "positions=learned",
    "optimizer.stable=0.5",
    "stages=[[0.4,128,64]]",
    "stages=[[0.4,16,256]]",
)
ARTICLE = "+".join(
    f"optimizer.{setting}"
    for setting in ("lr=3e-4", "floor=3e-4", "warmup=0", "weight_decay=0.01", "betas=[0.9,0.999]")
)
MUON = "optimizer.algorithm=muon"
BOXING = (
    "boxing+steps=3200",
    f"boxing+steps=3200+{MUON}",
    "boxing+steps=1600+batch=128+optimizer.lr=4e-3",
    f"boxing+steps=1600+batch=128+optimizer.lr=4e-3+{MUON}",
    f"boxing+steps=800+batch=512+optimizer.lr=6e-3+{MUON}",
)
COMPARISONS = {  # by name: contenders, and what is asked
    "recipe": ((FAST, *(f"{FAST}+{change}" for change in RECIPES)), f"--recipes --target {TARGET}"),
    "models": (("gpt2-c256", "fast-c256"), "--each-change --steps 1000 --eval-interval 100 --rates 1e-3 2e-3 4e-3"),
    # the recipe of the article on fast-c256, and its 200 steps; the target is what counting pairs of letters achieves
    "article": (
        (f"gpt2-c256+{ARTICLE}", f"fast-c256+{ARTICLE}"),
        "--recipes --target 2.4844 --steps 200 --eval-interval 25",
    ),
    "boxing": (BOXING, "--recipes --target 0.55 --eval-interval 80"),
}
ALONE = {
    "inversion": ["inversion", "fast-c256", "gpt2-c256"],
    "search": ["search", "--base", "gpt2-c256", "--target", "loss=1.6", "--budget", "45s", "--trial", "3s"],
}


def words_of(name, seeds=SEEDS):
    """What follows `ridgeline study compare` for a comparison, without where and how many at a time."""
    contenders, asked = COMPARISONS[name]
    asked = f"{asked} --seeds {seeds} --out {HOME / name}"
    return [*(f"{contender}{TINY}" for contender in contenders), *asked.split(), *REHEARSAL]


def say(*words):
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def start(name, command, **more):
    """A process in a session of its own, its words in a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "170", "OUT": str(HOME / name), **more}
    log = (HOME / f"{name}.txt").open("a")
    STARTED.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    return STARTED[-1]


def study(name, *words, **more):
    return start(name, [sys.executable, "-m", "ridgeline", "study", *words], **more)


def mine(mode, *words, **more):
    """This file as a process of its own."""
    return start(mode.strip("-"), [sys.executable, __file__, mode, *words], **more)


def end(process):
    """Interrupts a job, then ends all that it started."""
    for sign, patience in ((signal.SIGINT, 3), (signal.SIGKILL, 3)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def wait(jobs, until, trained=lambda name: False):
    """By name of the job, the code that it ended with, or "trained", or "cut off"."""
    codes = {}
    while len(codes) < len(jobs) and time.monotonic() < until:
        for name, process in jobs.items():
            if name in codes:
                continue
            if process.poll() is not None or trained(name):
                codes[name] = "trained" if process.poll() is None else process.returncode
                end(process)
                say(name, codes[name])
        time.sleep(0.1)
    for name, process in jobs.items():
        if name not in codes:
            codes[name] = "cut off"
            end(process)
            say(name, codes[name])
    return codes


def prepare(text, names):
    """The data sets, before several jobs ask for them."""
    from ridgeline.cli.data import replay_shipped
    from ridgeline.data.api import prepare_tinyshakespeare

    prepare_tinyshakespeare(source=text)
    if {"boxing", "divergence"} & set(names):
        replay_shipped("boxing")
    say("data ready")


def train(names, until):
    """Trains comparisons, until the first step of one is timed: that is done alone, by `clock`."""
    import torch

    for file in HOME.glob("*/runs/*/pace.json"):  # of an earlier call: here they say that all is trained
        file.unlink()
    cards = torch.cuda.device_count() or 1
    spread = ["--processes", "8" if torch.cuda.is_available() else "2"]
    spread += ["--gpus", str(cards)] if cards > 1 else []
    jobs = {}
    for name in names:
        if name == "divergence":
            (HOME / name).mkdir(exist_ok=True)
            given = [str(until - time.monotonic() - 2), *os.environ.get("DIVERGENCE", "").split()]
            jobs[name] = start(name, [sys.executable, str(Path(__file__).with_name("divergence_gpu.py")), *given])
        else:
            jobs[name] = study(name, "compare", *words_of(name), *spread)
    return wait(jobs, until, lambda name: name in COMPARISONS and any((HOME / name).glob("runs/*/pace.json")))


def plan_of(name):
    """What a comparison compares, as its command line says it."""
    from ridgeline.cli import study_compare
    from ridgeline.cli.output import parse

    return study_compare.plan_of(parse(study_compare.Options, words_of(name), "study compare"))


def clock(name, contender):
    """In a process of its own: makes a contender's step ready, waits for GO and for its turn, then times it."""
    from ridgeline.study.compare import pace_file
    from ridgeline.study.pace import Stopwatch, keep_pace

    watch = Stopwatch(plan_of(name).configs[contender])
    print(f"{name} {contender}: ready at {time.monotonic() - BEGUN:.1f} s", flush=True)
    while not GO.exists():
        time.sleep(0.05)
    with (HOME / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        step_s = watch.time()
    keep_pace(step_s, pace_file(HOME / name, contender))
    print(name, contender, *(f"{1e3 * seconds:.3f} ms" for seconds in step_s), flush=True)


def clocks(names):
    """A process for every contender, which waits for GO."""
    pairs = [(name, contender) for name in names for contender in plan_of(name).configs]
    return {f"clock {name} {contender}": mine("--clock", name, contender) for name, contender in pairs}


def fresh(steps, *seeds):
    """In a process of its own: `ridgeline train` on the preset with each seed, and where its seconds went."""
    import ridgeline.cli.train
    from ridgeline.cli import main as ridgeline
    from ridgeline.data.api import load_dataset
    from ridgeline.train.metrics import read_metrics

    imported = time.monotonic()
    load_dataset("tinyshakespeare")
    loaded = time.monotonic()
    short = ["--steps", steps, "--eval-interval", steps] if steps != "all" else []
    tiny = (
        "--window.context 32 --model.decoder.layers 1 --model.decoder.width 32 --model.decoder.heads 2" if TINY else ""
    )
    for seed in seeds:
        begun, home = time.monotonic(), HOME / f"fresh-{seed}"
        shutil.rmtree(home, ignore_errors=True)
        ridgeline(["train", FAST, "--lanes", "1", "--seed", seed, "--out", str(home), *short, *tiny.split()])
        call_s = time.monotonic() - begun
        points = [(row["step"], row["seconds"], row["val_loss"]) for row in read_metrics(home) if "val_loss" in row]
        held = [a for a, b in itertools.pairwise(points) if max(a[2], b[2]) <= TARGET]
        first = seed == seeds[0]
        row = {
            "seed": int(seed),
            "imports_s": round(imported - BEGUN, 2) if first else None,
            "data_s": round(loaded - imported, 3) if first else None,
            "call_s": round(call_s, 2),
            "in_all_s": round(loaded - BEGUN + call_s, 2) if first else None,
            "training_s": points[-1][1],
            "held_at_step": held[0][0] if held else None,
            "held_s": held[0][1] if held else None,
            "validations": points,
        }
        print(json.dumps(row), flush=True)


def fresh_rows(caches):
    """What the processes of `fresh` have said so far, each with its first step's seconds."""
    log, rows = HOME / "fresh.txt", []
    said = log.read_text(errors="replace") if log.exists() else ""
    firsts = re.findall(r"first step ([0-9.]+) s", said) if caches else []
    for place, found in enumerate(re.findall(r"^\{.*\}$", said, re.MULTILINE)):
        rows.append(
            {
                **json.loads(found),
                "caches": caches,
                "first_step_s": float(firsts[place]) if place < len(firsts) else None,
            }
        )
    return rows


def fresh_runs(until):
    """Starts the preset with every seed, and returns as the last one begins; what it comes to is read later."""
    (HOME / "fresh.txt").unlink(missing_ok=True)
    job = mine("--fresh", "4" if TINY else "all", *map(str, range(SEEDS)))
    while job.poll() is None and len(fresh_rows("full")) < SEEDS - 1 and time.monotonic() < until:
        time.sleep(0.1)
    return job


def cold_start(until):
    """The preset with nothing cached, up to its first step."""
    from ridgeline import files

    with tempfile.TemporaryDirectory() as empty:
        shutil.copytree(files.cache(), f"{empty}/cache", ignore=shutil.ignore_patterns("cubin"))
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        caches["RIDGELINE_CACHE"] = f"{empty}/cache"
        wait({"cold": mine("--fresh", "2", "1000", **caches)}, until)


def write_starts(rows):
    """The record of runs as a user begins them, as far as it goes."""
    import torch

    from ridgeline.bench.circumstances import git_revision, versions
    from ridgeline.bench.nvml import monitor
    from ridgeline.records import ContenderResult, Record, WorkloadInfo, write_record

    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    record = Record(
        kind="study",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        card=torch.cuda.get_device_name(device) if cuda else "CPU",
        gpus=int(cuda),
        versions=versions(monitor(device)),
        workload=WorkloadInfo(name="tinyshakespeare", batch=32, context=256, precision="bf16" if cuda else "fp32"),
        contenders=[
            ContenderResult(name=f"{FAST}, seed {row['seed']}", first_step_s=row["first_step_s"]) for row in rows
        ],
        curves=[{"figure": "starts", "name": FAST, "target": TARGET, "rows": rows}],
    )
    write_record(record, OUT / "fresh.json")


def unfinished(names):
    """The comparisons of which a run may be missing."""
    return [name for name in names if name in COMPARISONS and trained_before().get(name) not in ("trained", 0)]


def clocked(names, clock_jobs, until):
    """Times the steps of all comparisons on the first card; returns the jobs that make their records, on no card."""
    for name in names:
        for file in (HOME / name).glob("runs/*/pace.json"):
            file.unlink()
    GO.touch()
    wait(clock_jobs, until - RECORD_S)
    tell("clock", 40)
    # these find all runs and all paces; of a study that was cut off, the seeds that all contenders have
    found = {name: seeds_of(name) for name in names}
    return {name: study(name, "compare", *words_of(name, seeds)) for name, seeds in found.items() if seeds}


def seeds_of(name):
    """How many seeds every contender of a comparison has been trained with."""
    from ridgeline.study.compare import pace_file

    plan = plan_of(name)
    homes = [pace_file(HOME / name, contender).parent for contender in plan.configs]
    return min(sum(any(home.glob(f"lr-*-seed-{seed}/result.json")) for seed in range(plan.seeds)) for home in homes)


def others(names, until):
    """Inversion and search on the last card, one after another."""
    import torch

    last = {"CUDA_VISIBLE_DEVICES": str(torch.cuda.device_count() - 1)} if torch.cuda.device_count() > 1 else {}
    for name in names:
        record = ["--out", str(HOME / name / "record.json" if name == "inversion" else HOME / name)]
        rehearsal = ["--context", "16", "--batch", "2"] if name == "inversion" and TINY else []
        wait({name: study(name, *ALONE[name], *rehearsal, *record, **last)}, until)
        keep(name)
        tell(name, 16)


def time_alone(names, clock_jobs, until):
    """What is timed: comparisons and the preset on the first card, beside them what else is asked for on the last."""
    import torch

    compared, rest = [name for name in names if name in COMPARISONS], [name for name in names if name in ALONE]
    beside = threading.Thread(target=others, args=(rest, until))
    if torch.cuda.device_count() > 1:
        beside.start()
    codes = wait(clocked(compared, clock_jobs, until) if compared else {}, until)
    for name in compared:
        keep(name)
        tell(name, 16)
    if beside.ident is None:
        beside.start()
    beside.join()
    return codes


def trained_before():
    """What the last call of `train` came to, by name of the comparison."""
    file = HOME / "codes.json"
    return json.loads(file.read_text()) if file.exists() else {}


def tell(name, count):
    """The last lines of a job's words."""
    words = (HOME / f"{name}.txt").read_text(errors="replace").splitlines()
    lines = [line for line in words if not line.startswith(("  ", "/")) and "Warning" not in line and line.strip()]
    print(f"== {name}", *(line[:170] for line in lines[-count:]), sep="\n", flush=True)


def keep(name):
    """Copies a job's record, and what a search chose."""
    for file in ("record.json", "divergence.json", "chosen.toml"):
        if (HOME / name / file).exists():
            kind = Path(file).suffix
            shutil.copy(HOME / name / file, OUT / f"{name}{'-chosen' if kind == '.toml' else ''}{kind}")


def bring_back():
    """All results of runs, whole or not."""
    with tarfile.open(OUT / "runs.tgz", "w:gz") as tar:
        for pattern in KEPT:
            for file in HOME.rglob(pattern):
                if file.stat().st_size < 2_000_000:
                    tar.add(file, file.relative_to(HOME))


def alone_s(names):
    """Seconds that what is timed takes."""
    import torch

    first, last = CLOCK_S + RECORD_S, INVERSION_S * ("inversion" in names)
    return max(first, last) if torch.cuda.device_count() > 1 else first + last


def main():
    limit, text, phase, *names = float(sys.argv[1]), *sys.argv[2:]
    OUT.mkdir(parents=True, exist_ok=True)
    HOME.mkdir(parents=True, exist_ok=True)
    if "RUNS" in os.environ:
        with tarfile.open(os.environ["RUNS"]) as tar:
            tar.extractall(HOME, filter="data")
    GO.unlink(missing_ok=True)
    codes, end_s = {}, BEGUN + limit - 4
    try:
        prepare(text, names)
        compared = [name for name in names if name in COMPARISONS]
        begun = fresh_runs(end_s) if "fresh" in names else None
        clock_jobs = clocks(compared) if phase != "train" else {}
        training = unfinished(names) + [name for name in names if name == "divergence" and phase != "time"]
        if training:
            codes = train(training, end_s - (alone_s(names) if phase != "train" else 0))
            (HOME / "codes.json").write_text(json.dumps({**trained_before(), **codes}))
            for name in training:
                keep(name)
                tell(name, 12)
        if begun is not None:
            wait({"fresh": begun}, end_s)
            write_starts(fresh_rows("full"))
        if phase != "train":
            say("alone from now on")
            codes |= time_alone(names, clock_jobs, end_s)
        if "cold" in names:
            cold_start(end_s)
    finally:
        for process in STARTED:
            end(process)
        bring_back()
        (OUT / f"{phase}.json").write_text(json.dumps(codes))
        say("end", codes)


if __name__ == "__main__":
    if sys.argv[1] == "--clock":
        clock(*sys.argv[2:])
    elif sys.argv[1] == "--fresh":
        fresh(*sys.argv[2:])
    else:
        main()
