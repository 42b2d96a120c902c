"""Records of studies: comparisons run beside each other on all cards, then their steps are timed alone.

PYTHONPATH=src:SITE OUT=$OUT python dev/gpu/studies_gpu.py SECONDS TINYSHAKESPEARE JOB…

Jobs: models (gpt2-c256, fast-c256 and each change between), recipe (shakespeare-fast and each part taken back or
added), boxing (recipes on Boxing's demonstrations), divergence, search, inversion, fresh (one run as a user calls it).
What is trained does not mind sharing a card; what a comparison timed while others ran is thrown away and timed again at
the end, when nothing else runs.
SECONDS ends it: what was not finished by then leaves its runs in $OUT/runs.tgz.

`untimed` as a job leaves the timing to a later call with `retime`, which finds the runs in $STUDIES and trains nothing.
"""

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
FRESH_S = 16
TIMING_S = 24  # a job a card, kept for the steps that are timed alone
FAST, GAMES = "shakespeare-fast", {"boxing", "divergence"}
RECIPES = (
    "optimizer.algorithm=adamw+optimizer.lr=2e-3+steps=2400",
    "positions=learned",
    "dropout=0.0",
    "optimizer.stable=0.5",
    "stages=[[0.4,128,64]]",
    "stages=[[0.4,16,256]]",
)
MUON = "optimizer.algorithm=muon"
BOXING = (
    "boxing+steps=3200",
    f"boxing+steps=3200+{MUON}",
    "boxing+steps=1600+batch=128+optimizer.lr=4e-3",
    f"boxing+steps=1600+batch=128+optimizer.lr=4e-3+{MUON}",
    f"boxing+steps=800+batch=512+optimizer.lr=6e-3+{MUON}",
)


def compare(cards, *words):
    spread = ["--processes", str(4 * cards), *(["--gpus", str(cards)] if cards > 1 else [])]
    rehearsal = os.environ.get("REHEARSAL", "").split()  # such as --steps 4 --eval-interval 2 --batch 2 --seeds 1
    return [sys.executable, "-m", "ridgeline", "study", "compare", *words, *spread, *rehearsal]


def commands(cards):
    """By job: the command, and whether its record holds times that must be taken alone."""
    models = ["gpt2-c256", "fast-c256", "--each-change", "--seeds", "3", "--rates", "1e-3", "2e-3", "4e-3"]
    models += ["--steps", "1500", "--eval-interval", "150"]
    recipes = [FAST, *(f"{FAST}+{change}" for change in RECIPES)]
    here = [sys.executable, "-m", "ridgeline", "study"]
    return {
        "models": (compare(cards, *models), True),
        "recipe": (compare(cards, *recipes, "--recipes", "--target", "1.4697", "--seeds", "3"), True),
        "boxing": (compare(cards, *BOXING, "--recipes", "--target", "0.55", "--seeds", "3", "--eval-interval", "80"), True),
        "search": ([*here, "search", "--base", "gpt2-c256", "--target", "loss=1.6", "--budget", "60s", "--trial", "3s"], False),
        "inversion": ([*here, "inversion", "fast-c256", "gpt2-c256"], False),
        "divergence": ([sys.executable, str(Path(__file__).with_name("divergence_gpu.py"))], False),
    }


def say(*words):
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def prepare(*words):
    """A data set in the cache, before several jobs ask for it."""
    done = subprocess.run([sys.executable, "-m", "ridgeline", "data", *words], capture_output=True, text=True)
    say("data", words[0], "ready" if done.returncode == 0 else done.stderr.strip()[-200:])


def start(name, command, seconds):
    """A job's process, its words in a file."""
    command = list(command)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "170"}
    if name == "divergence":
        command.append(str(seconds))
        environment["OUT"] = str(HOME / name)
    elif name == "inversion":
        command += ["--out", str(HOME / name / "record.json")]
    elif seconds is not None:
        command += ["--out", str(HOME / name)]
    log = (HOME / f"{name}.txt").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def timed_alone(name, command, card, until, codes):
    """The comparison again, which finds all its runs and times a step of each contender on one card."""
    at = command.index("--gpus") if "--gpus" in command else len(command)
    command = [*command[:at], *command[at + 2 :]]
    if card is not None:
        command += ["--device", f"cuda:{card}"]
    codes[f"{name} timed"] = wait({name: start(name, command, 0)}, until).get(name)


def train_once(until):
    """The preset as a user calls it, with warm caches: what beside training it takes."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "ridgeline", "train", FAST, "--json", "--lanes", "1", "--out", str(HOME / "fresh")]
    process = start("fresh", command, None)
    wait({"fresh": process}, until)
    words = (HOME / "fresh.txt").read_text(errors="replace").splitlines()
    say(f"fresh: {time.monotonic() - begun:.1f} s in all;", *(line[:300] for line in words if "first step" in line or "{" in line))


def end(process):
    """Interrupts a job, then ends all that it started."""
    for sign, patience in ((signal.SIGINT, 3), (signal.SIGKILL, 3)):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                pass


def wait(jobs, until):
    """By name of the job that ended, its exit code; the others are ended."""
    codes = {}
    while len(codes) < len(jobs) and time.monotonic() < until:
        for name, process in jobs.items():
            if name not in codes and process.poll() is not None:
                codes[name] = process.returncode
                say(name, "ended with", process.returncode)
        time.sleep(0.1)
    for process in jobs.values():
        end(process)
    return codes


def keep(name):
    """Copies a job's record, and what search chose."""
    for file in (HOME / name / "record.json", HOME / name / "divergence.json", HOME / name / "chosen.toml"):
        if file.exists():
            shutil.copy(file, OUT / f"{name}{'-' + file.stem if file.suffix == '.toml' else ''}{file.suffix}")


def main():
    limit, text, asked = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    fresh, untimed, retime = (word in asked for word in ("fresh", "untimed", "retime"))
    asked = [name for name in asked if name not in ("fresh", "untimed", "retime")]
    OUT.mkdir(parents=True, exist_ok=True)
    HOME.mkdir(parents=True, exist_ok=True)
    if not retime:
        prepare("tinyshakespeare", "--file", text)
    import torch

    cards = torch.cuda.device_count() or 1
    known = commands(cards)
    timed = [name for name in asked if known[name][1] and not untimed]
    train_s = limit - 4 - TIMING_S * -(-len(timed) // cards) - (FRESH_S if fresh else 0)
    jobs = {}
    for name in () if retime else sorted(asked, key=lambda name: name in GAMES):
        if name in GAMES and not GAMES & jobs.keys():
            prepare("boxing")
        jobs[name] = start(name, known[name][0], train_s - (time.monotonic() - BEGUN))
    codes = wait(jobs, BEGUN + train_s)
    left = [name for name in timed if retime or codes.get(name) == 0]
    for name in left:
        for file in (HOME / name).rglob("pace.json"):
            file.unlink()
        keep(name)  # with times taken beside others, in case those alone are not reached
    lock = threading.Lock()

    def take_turns(card):
        while True:
            with lock:
                if not left:
                    return
                name = left.pop(0)
            timed_alone(name, known[name][0], card, BEGUN + limit - 4, codes)

    turns = [threading.Thread(target=take_turns, args=(card if cards > 1 else None,)) for card in range(cards)]
    for turn in turns:
        turn.start()
    for turn in turns:
        turn.join()
    if fresh:
        train_once(BEGUN + limit - 2)
    for name in asked:
        keep(name)
        words = (HOME / f"{name}.txt").read_text(errors="replace").splitlines()
        lines = [line for line in words if not line.startswith((" ", "/")) and "Warning" not in line and line.strip()]
        print(f"== {name}", *(line[:170] for line in lines[-16:]), sep="\n", flush=True)
    with tarfile.open(OUT / "runs.tgz", "w:gz") as tar:
        for pattern in ("result.json", "pace.json", "plan.json"):
            for file in HOME.rglob(pattern):
                tar.add(file, file.relative_to(HOME))
    (OUT / "studies.json").write_text(json.dumps(codes))
    if not untimed:
        shutil.rmtree(HOME, ignore_errors=True)
    say("end")


if __name__ == "__main__":
    main()
