"""`ridgeline study race` within a deadline: all contenders are set up at the same time, and train when all are ready.

PYTHONPATH=src:SITE python dev/gpu/race_gpu.py SECONDS [--also NAME ARGUMENT …] … -- ARGUMENT …

ARGUMENT … are those of `ridgeline study race` without --out: the race itself. Behind each --also stand those of another
race over some of the same trained contenders (another --level, another --cache), which only plays. The contenders of a
card train one after another, each alone on it; when all training has ended, all games of all races are played at the
same time, PROCESSES at a time (environment; one a core), and `study race` itself writes the records:

    $OUT/race.json, $OUT/NAME.json        the records
    $OUT/rolling.jsonl                    see rolling_gpu.py, for contenders of a race with --cache rolling
    $OUT/folders.tgz                      the races' folders without checkpoints, from before the games on

GO=FILE: contenders wait for that file before the first trains, so that they can be set up beside something else.
GAMES=SECONDS that all games are left after all training (80). The card bounds them: each call for eight games of hal-20m
keeps it busy for 3 ms, however many processes call, and the weaker a checkpoint the more calls. 210 games of one contender
from 1 s of training on are 33,000 calls: 90 s, and 10 for the processes to begin. Four processes keep a card busy; more
than cores only wait for each other. The last checkpoints play first: what is cut off is the start.
KEEP=FOLDER: where race and checkpoints lie and stay; the same command goes on there. Without it they are deleted.

PYTHONPATH=src python dev/gpu/race_gpu.py join RECORD.json FOLDERS.tgz …      # anywhere, also without a card

joins what runs of one race packed, each of which trained some of its contenders and let them play, to one record. Where
a run ended before its games did, the record says how many were played, and lacks the checkpoints before the first that
played any (the last ones play first); of a contender that is in several, the first that trained it to its end counts.
"""

import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

BEGUN = time.monotonic()
LATE = "this run's"  # how the failure of a contender begins whose training had no time left
GAMES_SECONDS = float(os.environ.get("GAMES", "80"))


def say(*words):
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def train(pipe, task):
    """A contender's life: says ("ready",), waits for its turn, says ("point", point) for each, then ("done",)."""
    from ridgeline.study.clocked import train_on_clock

    def ready():
        pipe.send(("ready", None))
        pipe.recv()

    try:
        for point in train_on_clock(task, ready):
            if point is not None:
                pipe.send(("point", point))
        pipe.send(("done", None))
    except Exception as error:
        pipe.send(("failed", repr(error)[:600]))


class Trainer:
    """A contender's process, as the others' see it."""

    def __init__(self, context, contender, race, folder, deadline):
        from ridgeline.study.clocked import Task
        from ridgeline.train.settings import to_dict

        self.name, self.device, self.deadline = contender.name, contender.config.device, deadline
        self.folder = folder / contender.folder
        self.pipe, theirs = context.Pipe()
        task = Task(to_dict(contender.config), str(self.folder), race.grid, 1)
        self.process = context.Process(target=train, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()
        self.state = "set up"

    def hear(self, wait):
        """Take what it says within `wait` seconds; whether it said something."""
        if not self.pipe.poll(max(0.0, wait)):
            return False
        try:
            kind, said = self.pipe.recv()
        except EOFError:
            kind, said = "failed", f"its process died (exit code {self.process.exitcode})"
        if kind == "point":
            loss = "" if said.train_loss is None else f"loss {said.train_loss:.4f}, "
            rate = f", {said.tokens / said.seconds / 1e6:.2f} M tokens/s" if said.seconds else ""
            say(
                f"TRAINED {self.name} {said.at:g} s: {said.steps} steps, {loss}val {said.val_loss:.4f}{rate}, set up {said.setup_s:g} s"
            )
        else:
            self.state = kind
            say(self.name, kind, said or "")
        return True

    def end(self):
        """Its time is over: what it has not reached is noted as not reached, so that games can be played."""
        from ridgeline.study.clocked import FAILURE

        if self.process.is_alive() and self.state != "done":
            self.process.kill()
        if self.state != "done" and self.folder.is_dir() and not (self.folder / FAILURE).exists():
            (self.folder / FAILURE).write_text(f"{LATE} {self.deadline:.0f} s ended before its training did\n")


def left(deadline):
    return deadline - (time.monotonic() - BEGUN)


def train_all(trainers, deadline, seconds):
    """Until all are ready, then in turn on each device, `seconds` each: not begun where that cannot end in time."""
    while any(trainer.state == "set up" for trainer in trainers) and left(deadline) > 0:
        for trainer in trainers:
            trainer.hear(0.05)
    while "GO" in os.environ and not Path(os.environ["GO"]).exists() and left(deadline) > 0:
        time.sleep(0.1)
    devices = [trainer.device for trainer in trainers]
    needed = max((devices.count(device) * (seconds + 5) for device in devices), default=0)
    if needed > left(deadline):
        raise SystemExit(
            f"training takes {needed:.0f} s and {left(deadline):.0f} s are left before the games: not begun"
        )
    say("training begins")
    while left(deadline) > 0:
        for device in {trainer.device for trainer in trainers}:
            own = [trainer for trainer in trainers if trainer.device == device]
            if not any(trainer.state == "trains" for trainer in own):
                following = next((trainer for trainer in own if trainer.state == "ready"), None)
                if following:
                    following.state = "trains"
                    following.pipe.send("go")
        if not any(trainer.state == "trains" for trainer in trainers):
            return
        for trainer in trainers:
            if trainer.state == "trains":
                trainer.hear(0.02)


def play(root, name, words, processes):
    """The rest of a race by the command itself: all games, and the record."""
    folder = root / name
    command = [
        sys.executable,
        "-m",
        "ridgeline",
        "study",
        "race",
        *words,
        "--out",
        str(folder),
        "--processes",
        str(processes),
    ]
    return start(command)


def start(command):
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def outcome(process, deadline):
    """What a process said until it ended, or until all of its own were ended at the deadline."""
    try:
        return process.communicate(timeout=max(1.0, left(deadline)))[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def read_race(folder, names):
    """A race as its folder describes it, of some of its contenders."""
    from ridgeline.study.clocked import read_machines
    from ridgeline.study.race import Games, Race
    from ridgeline.study.racers import Contender, folder_of
    from ridgeline.train.settings import from_dict

    values = json.loads((folder / "race.json").read_text())
    contenders = []
    for name in names:
        cards = {line["card"] for line in read_machines(folder / folder_of(name))}
        device = "cpu" if cards <= {"CPU"} else "cuda:0"
        config = from_dict({**values["contenders"][name], "data": values["data"], "device": device})
        contenders.append(Contender(name=name, folder=folder_of(name), config=config))
    rest = {name: values[name] for name in ("data", "fingerprint")}
    return Race(contenders=tuple(contenders), grid=tuple(values["grid"]), games=Games(**values["games"]), **rest)


def finished(folder):
    """Names of the contenders that a run brought to their end."""
    from ridgeline.study.clocked import read_failure, read_points
    from ridgeline.study.racers import folder_of

    values = json.loads((folder / "race.json").read_text())
    for name in values["contenders"]:
        place = folder / folder_of(name)
        reason = read_failure(place)
        if reason is None and len(read_points(place)) < len(values["grid"]) or (reason or "").startswith(LATE):
            say(name, "was not brought to its end:", reason or "killed")
        else:
            yield name


def join(file, archives):
    """One record of one race from what several runs packed."""
    from ridgeline.records import write_record
    from ridgeline.study.outcome import make_record
    from ridgeline.study.race import GAMES, open_race, read_outcome

    with tempfile.TemporaryDirectory() as temporary:
        joined, names = Path(temporary) / "race", []
        for number, archive in enumerate(archives):
            with tarfile.open(archive) as packed:
                packed.extractall(Path(temporary) / str(number), filter="data")
            part = Path(temporary) / str(number) / "race"
            new = [name for name in finished(part) if name not in names]
            race = read_race(part, new)
            open_race(race, joined)
            for contender in race.contenders:
                shutil.copytree(part / contender.folder, joined / contender.folder)
            with (joined / GAMES).open("ab") as stream:
                stream.write((part / GAMES).read_bytes())
            names += new
        race = read_race(joined, names)
        record = make_record(race, read_outcome(race, joined))
        write_record(record, file)
        tell("race", json.loads(Path(file).read_text()))


def pack(root, out):
    """Everything small: what is raced, points, games."""
    own = [f"race/*/{name}" for name in ("config.toml", "machines.jsonl", "points.jsonl", "failure.txt")]
    with tarfile.open(out / "folders.tgz", "w:gz") as archive:
        for pattern in ("*/race.json", "*/record.json", "*/games.jsonl", *own):
            for file in sorted(root.glob(pattern)):
                archive.add(file, file.relative_to(root))


def compare(plans, root):
    """Rolling caches against whole windows, beside the games: for the races that play with one."""
    from ridgeline.study.clocked import checkpoint_name

    running = []
    for race in plans.values():
        for contender in race.contenders if race.games.cache == "rolling" else ():
            saved = root / "race" / contender.folder / checkpoint_name(race.grid[-1])
            command = [sys.executable, str(Path(__file__).with_name("rolling_gpu.py")), str(saved)]
            command += [contender.config.device, "8", "5000", "0", "25"]
            if saved.is_dir():
                running.append(start(command))
    return running


def tell(name, record):
    for curve in record["curves"]:
        for point in curve.get("points", ()):
            low, high = point["intervals"]["margin"]
            say(
                f"PLAYED {name} {curve['name']} {point['at']:g} s: won {point['wins']}, KO {point['ko']} of {point['games']}, "
                f"margin {point['margin']:.1f} ({low:.1f} to {high:.1f}), decision {point['decision_ms']:.2f} ms"
            )
        for row in curve.get("rows", ()):
            say(f"{row['contender']}: {row['target']} from", row["seconds"])


def main():
    if sys.argv[1] == "join":
        return join(sys.argv[2], sys.argv[3:])
    limit, words = float(sys.argv[1]), sys.argv[2:]
    races = {}
    words, races["race"] = words[: words.index("--")], words[words.index("--") + 1 :]
    while words:
        end = words.index("--also", 1) if "--also" in words[1:] else len(words)
        races[words[1]], words = words[2:end], words[end:]
    from ridgeline.cli.output import parse
    from ridgeline.cli.study_race import Options, _plan
    from ridgeline.study.race import _unfinished, open_race

    out, root = Path(os.environ.get("OUT", "out")), Path(os.environ.get("KEEP") or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    plans = {name: _plan(parse(Options, given, "study race")) for name, given in races.items()}
    say("the data is there")
    for name, race in plans.items():
        open_race(race, root / name)
    for name, race in plans.items():
        for contender in race.contenders if name != "race" else ():
            theirs = root / "race" / contender.folder
            if not (root / name / contender.folder).is_symlink():
                (root / name / contender.folder).symlink_to(theirs.resolve(), target_is_directory=True)
    context = mp.get_context("spawn")
    waiting = [c for c in plans["race"].contenders if _unfinished(plans["race"], root / "race", c)]
    trainers = [Trainer(context, c, plans["race"], root / "race", limit) for c in waiting]
    train_all(trainers, limit - GAMES_SECONDS, plans["race"].grid[-1])
    for trainer in trainers:
        trainer.end()
    pack(root, out)
    say("games begin")
    cores = int(os.environ.get("PROCESSES") or len(os.sched_getaffinity(0)))
    weights = {name: len(race.contenders) for name, race in plans.items()}
    playing = {
        name: play(root, name, given, max(1, cores * weights[name] // sum(weights.values())))
        for name, given in races.items()
    }
    compared = compare(plans, root) if left(limit) > 0 else []
    for name, process in playing.items():
        said = outcome(process, limit)
        if process.returncode:
            say("FAILED", name, process.returncode, said[-600:])
        with contextlib.suppress(OSError):
            shutil.copy(root / name / "record.json", out / f"{name}.json")
            tell(name, json.loads((out / f"{name}.json").read_text()))
    for process in compared:
        said = outcome(process, limit)
        say("ROLLING", said.strip().splitlines()[-1] if said.strip() else "nothing")
        with (out / "rolling.jsonl").open("a") as stream:
            stream.write(said)
    pack(root, out)
    if "KEEP" not in os.environ:
        shutil.rmtree(root, ignore_errors=True)
    say("end")


if __name__ == "__main__":
    main()
