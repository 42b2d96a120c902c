"""Records of studies: what is trained shares a card with anything; what is timed has it for itself.

PYTHONPATH=src:SITE OUT=$OUT python dev/gpu/studies_gpu.py SECONDS TINYSHAKESPEARE train|time|all JOB[:PROCESSES]…

`train` trains comparisons beside each other over all visible cards: models (gpt2-c256, fast-c256 and each change
between), recipe (shakespeare-fast and each part taken back or added), boxing (the same of boxing-fast), article
(gpt2-c256 and fast-c256 by the article's recipe); with divergence (divergence_gpu.py) as a further job. A
contender's runs are one process, so what it needs is compiled once; recipe:6 trains six contenders at a time.
`time` first finishes what was cut off; of what is still not whole, the seeds that all contenders have make the record.
Then it times a step of every contender on the first card, which nothing else may use by then, and writes the records.
Further jobs of `time`, on the last card: inversion, search, and confirm (what the search found soonest against the
preset, three seeds). `all` is both: it says "alone from now on" in between.

Runs are kept in $STUDIES between two calls, and come back in $OUT/runs.tgz whatever happens; a later call takes them
from there where RUNS names such a file. SECONDS ends it. A rehearsal on a CPU: REHEARSAL="--steps 4 --eval-interval 2
--batch 2 --context 16 --seeds 2" TINY="+layers=1+width=32+heads=2" DIVERGENCE="20 2".
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

BEGUN = time.monotonic()
HOME = Path(os.environ.get("STUDIES", "/tmp/studies"))
OUT = Path(os.environ.get("OUT", "out"))
GO = HOME / "go"
REHEARSAL, TINY = os.environ.get("REHEARSAL", "").split(), os.environ.get("TINY", "")
STARTED: list = []
CLOCK_S, RECORD_S = 12, 9  # kept for what is timed, and for its records
ALONE_S = {"inversion": 60, "search": 66, "confirm": 34}
FAST, BOXER, TARGET, SEEDS, TRIAL_S = "shakespeare-fast", "boxing-fast", 1.4697, 3, 1.8
KEPT = ("result.json", "record.json", "pace.json", "plan.json", "config.toml", "metrics.jsonl", "*.txt", "search.db")
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
BOXING = (
    "optimizer.algorithm=adamw+steps=3200",
    "optimizer.stable=0.5",
    "stages=[[0.4,64,8]]",
    "stages=[[0.4,16,16]]",
    "batch=128+optimizer.lr=4e-3",
)
COMPARISONS = {  # by name: contenders, and what is asked
    "recipe": ((FAST, *(f"{FAST}+{change}" for change in RECIPES)), f"--recipes --target {TARGET}"),
    "models": (("gpt2-c256", "fast-c256"), "--each-change --steps 1000 --eval-interval 100 --rates 1e-3 2e-3 4e-3"),
    # the recipe of the article on fast-c256, and its 200 steps; the target is what counting pairs of letters achieves
    "article": (
        (f"gpt2-c256+{ARTICLE}", f"fast-c256+{ARTICLE}"),
        "--recipes --target 2.4844 --steps 200 --eval-interval 25",
    ),
    "boxing": ((BOXER, *(f"{BOXER}+{change}" for change in BOXING)), "--recipes --target 0.6 --eval-interval 80"),
}
ALONE = {
    "inversion": ["inversion", "fast-c256", "gpt2-c256"],
    # the preset's recipe and target; is there a size that is there sooner?
    "search": (
        f"search --base {FAST} --target loss={TARGET} --eval-windows 0 --budget 55s --trial {TRIAL_S}s --space "
        "layers=2,3,4,6 width=256 context=256 kv_heads=all,1 mlp_ratio=2,4 norm=layernorm batch=16,32,64 lr=2e-3:8e-3"
    ).split(),
}


def words_of(name, seeds=SEEDS):
    """What follows `ridgeline study compare` for a comparison, without where and how many at a time."""
    contenders, asked = COMPARISONS[name]
    asked = f"{asked} --seeds {seeds} --out {HOME / name}"
    return [*(f"{contender}{TINY}" for contender in contenders), *asked.split(), *REHEARSAL]


def say(*words):
    """Prints with the seconds since the beginning."""
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def start(name, command, **more):
    """A process in a session of its own, its words in a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "170", "OUT": str(HOME / name), **more}
    log = (HOME / f"{name}.txt").open("a")
    STARTED.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    return STARTED[-1]


def study(name, *words, **more):
    """`ridgeline study` as a process of its own."""
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


def train(names, processes, until):
    """Trains comparisons until all their runs are there: a step of each is timed later, alone, by `clock`."""
    import torch

    cards = torch.cuda.device_count() or 1
    jobs = {}
    for name in names:
        if name == "divergence":
            (HOME / name).mkdir(exist_ok=True)
            given = [str(until - time.monotonic() - 2), *os.environ.get("DIVERGENCE", "").split()]
            jobs[name] = start(name, [sys.executable, str(Path(__file__).with_name("divergence_gpu.py")), *given])
        else:
            spread = ["--processes", str(processes.get(name, 6 if torch.cuda.is_available() else 2))]
            spread += ["--gpus", str(cards)] if cards > 1 else []
            jobs[name] = study(name, "compare", *words_of(name), *spread)
    return wait(jobs, until, lambda name: name in COMPARISONS and seeds_of(name) == plan_of(name).seeds)


@functools.cache
def plan_of(name):
    """What a comparison compares, as its command line says it."""
    from ridgeline.cli import study_compare
    from ridgeline.cli.output import parse

    return study_compare.plan_of(parse(study_compare.Options, words_of(name), "study compare"))


def clock(*names):
    """In a process of its own: makes a step of each contender ready once that has been trained, and times all after GO.

    By then what a step needs has been compiled by those who train. What has no run when GO comes is not timed.
    """
    from ridgeline.study.compare import pace_file
    from ridgeline.study.pace import Stopwatch, keep_pace

    watches = {}
    for name, contender in [(study, contender) for study in names for contender in plan_of(study).configs]:
        home = pace_file(HOME / name, contender).parent
        while not any(home.glob("*/result.json")) and not GO.exists():
            time.sleep(0.1)
        if any(home.glob("*/result.json")):
            watches[name, contender] = Stopwatch(plan_of(name).configs[contender])
            print(f"{name} {contender}: ready at {time.monotonic() - BEGUN:.1f} s", flush=True)
    while not GO.exists():
        time.sleep(0.05)
    for (name, contender), watch in watches.items():
        step_s = watch.time()
        keep_pace(step_s, pace_file(HOME / name, contender))
        print(name, contender, *(f"{1e3 * seconds:.3f} ms" for seconds in step_s), flush=True)


def clocked(names, watch, until):
    """Times the steps of all comparisons on the first card; returns the jobs that make their records."""
    for name in names:
        for file in (HOME / name).glob("runs/*/pace.json"):
            file.unlink()
    GO.touch()
    wait({"clock": watch}, until - RECORD_S)
    tell("clock", 40)
    # these find all runs and all paces; of a study that was cut off, the seeds that all contenders have
    found = {name: seeds_of(name) for name in names}
    return {name: study(name, "compare", *words_of(name, seeds)) for name, seeds in found.items() if seeds}


def seeds_of(name):
    """How many seeds every contender of a comparison has been trained with to the end."""
    from ridgeline.study.compare import pace_file

    plan = plan_of(name)
    homes = [pace_file(HOME / name, contender).parent for contender in plan.configs]
    return min(sum(any(home.glob(f"lr-*-seed-{seed}/result.json")) for seed in range(plan.seeds)) for home in homes)


def confirmed():
    """`ridgeline study compare` of the preset and what the search found soonest, as long in steps as a trial was."""
    trials = next(
        curve["rows"]
        for curve in json.loads((HOME / "search" / "record.json").read_text())["curves"]
        if curve.get("rows") and "params" in curve["rows"][0]
    )
    found = min((trial for trial in trials if trial["seconds"]), key=lambda trial: trial["crossing"])
    chosen = found["params"]
    steps = round(found["tokens_per_s"] * TRIAL_S / (chosen["batch"] * chosen["context"]))
    kv_heads = "none" if chosen["kv_heads"] == "all" else chosen["kv_heads"]
    sizes = f"layers={chosen['layers']}+kv_heads={kv_heads}+mlp_width={chosen['mlp_ratio'] * chosen['width']}"
    # as many validations as the preset has: a loss counts as held from one of them on
    recipe = f"batch={chosen['batch']}+optimizer.lr={chosen['lr']:.2g}+steps={steps}+eval_interval={steps // 15}"
    say("to be confirmed: trial", found["number"], sizes, recipe)
    return [
        *("compare", f"{FAST}{TINY}", f"{FAST}+{sizes}+{recipe}{TINY}", "--recipes", "--target", str(TARGET)),
        *("--seeds", str(SEEDS), "--processes", "2", *REHEARSAL),
    ]


def others(names, until):
    """Inversion, search and what the search found on the last card, one after another."""
    import torch

    last = {"CUDA_VISIBLE_DEVICES": str(torch.cuda.device_count() - 1)} if torch.cuda.device_count() > 1 else {}
    for name in names:
        record = ["--out", str(HOME / name / "record.json" if name == "inversion" else HOME / name)]
        rehearsal = ["--context", "16", "--batch", "2"] if name == "inversion" and TINY else []
        words = ALONE[name] if name in ALONE else confirmed()
        wait({name: study(name, *words, *rehearsal, *record, **last)}, until)
        keep(name)
        tell(name, 16)


def time_alone(names, watch, until):
    """What is timed: comparisons on the first card, beside them what else is asked for on the last."""
    import torch

    compared, rest = [name for name in names if name in COMPARISONS], [name for name in names if name in ALONE_S]
    beside = threading.Thread(target=others, args=(rest, until))
    if torch.cuda.device_count() > 1:
        beside.start()
    codes = wait(clocked(compared, watch, until) if watch else {}, until)
    for name in compared:
        keep(name)
        tell(name, 16)
    if beside.ident is None:
        beside.start()
    beside.join()
    return codes


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

    first = (CLOCK_S + RECORD_S) * any(name in COMPARISONS for name in names)
    last = sum(seconds for name, seconds in ALONE_S.items() if name in names)
    return max(first, last) if torch.cuda.device_count() > 1 else first + last


def main():
    """All that is asked for, and what is there in $OUT whatever happens."""
    limit, text, phase, *jobs = float(sys.argv[1]), *sys.argv[2:]
    processes = {name: int(count) for name, _, count in (job.partition(":") for job in jobs) if count}
    names = [job.partition(":")[0] for job in jobs]
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
        watch = mine("--clock", *compared) if compared and phase != "train" else None
        training = [name for name in compared if seeds_of(name) < plan_of(name).seeds]
        training += [name for name in names if name == "divergence" and phase != "time"]
        if training:
            codes = train(training, processes, end_s - (alone_s(names) if phase != "train" else 0))
            for name in training:
                keep(name)
                tell(name, 12)
        if phase != "train":
            say("alone from now on")
            codes |= time_alone(names, watch, end_s)
    finally:
        for process in STARTED:
            end(process)
        bring_back()
        (OUT / f"{phase}.json").write_text(json.dumps(codes))
        say("end", codes)


if __name__ == "__main__":
    if sys.argv[1] == "--clock":
        clock(*sys.argv[2:])
    else:
        main()
