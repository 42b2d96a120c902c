"""The race within a deadline: contenders are set up beside each other and train in turn; games are played by others.

PYTHONPATH=src:SITE python dev/gpu/race_gpu.py SECONDS DEVICE CONTENDER@TIME[,TIME…]=GAMES[+PLAY_DEVICE] …

`ridgeline study race` does the same with nothing beside a training. Here each contender imports, compiles and captures
while others do or train (their host's and the card's time that this takes is theirs), so that a minute is enough. Games
of a policy that plays on the CPU are played on spare cores while others train, the others' after all training.
Writes $OUT/race.json; leaves no checkpoints.
"""

import json
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

BEGUN = time.monotonic()
WORKERS = int(os.environ.get("WORKERS", "10"))
GAMES_SECONDS = 14  # that games on the card need after all training


def say(*words):
    print(f"[{time.monotonic() - BEGUN:5.1f}]", *words, flush=True)


def play(tasks, results):
    """A worker's life: (key, folder, device, seeds, level) in, (key, results or error) out."""
    import torch

    torch.set_num_threads(1)
    from ridgeline.play.player import load_player
    from ridgeline.play.rollout import play_games

    while (task := tasks.get()) is not None:
        key, folder, device, seeds, level = task
        try:
            ended = [game for some in play_games(load_player(folder, device), seeds, level=level) for game in some]
            results.put((key, [vars(game) for game in ended], None))
        except Exception as error:
            results.put((key, [], repr(error)[:300]))


def parse(word):
    name, _, rest = word.partition("@")
    times, _, games = rest.partition("=")
    games, _, where = games.partition("+")
    return name, [float(t) for t in times.split(",")], int(games), where or "cpu"


def train(pipe, name, times, device, data, folder):
    """A contender's life: says ("ready", …), waits for its turn, says ("point", …) at each time, then "done"."""
    try:
        from ridgeline.study import clocked
        from ridgeline.study.racers import find_racers
        from ridgeline.data.api import load_dataset

        settings = {"data": data, "minutes": times[-1] / 60, "device": device}
        (contender,) = find_racers([name], load_dataset(data), settings)
        run = clocked._Clocked(contender.config, folder)
        run.leave(0.0)
        run.prepare(folder / clocked.checkpoint_name(0.0))
        pipe.send(("ready", run.setup_s, run.resident is not None))
        pipe.recv()
        for at in times:
            while run.progress.seconds < at:
                run.advance(at, times[-1])
            pipe.send(("point", at, vars(run.leave(at))))
        pipe.send(("done",))
    except Exception as error:
        pipe.send(("failed", repr(error)[:600]))


def main():
    limit, device, words = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    context = mp.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    os.environ["OMP_NUM_THREADS"] = "1"
    from ridgeline.data.api import load_dataset

    data = load_dataset("boxing")
    say("data", len(data.numbers), "states")
    root, out = Path(tempfile.mkdtemp()), Path(os.environ.get("OUT", "out"))
    racers = []
    for number, word in enumerate(words):
        name, times, games, where = parse(word)
        pipe, theirs = context.Pipe()
        folder = root / str(number)
        folder.mkdir()
        process = context.Process(
            target=train, args=(theirs, name, times, device, str(data.path), folder), daemon=True
        )
        process.start()
        racers.append((name, times, games, where, folder, pipe))
    pool = [context.Process(target=play, args=(tasks, results), daemon=True) for _ in range(WORKERS)]
    for process in pool:
        process.start()
    from ridgeline.play.evaluate import Evaluation, groups
    from ridgeline.play.rollout import GameResult
    from ridgeline.study.clocked import checkpoint_name

    found, later, asked, heard = {}, [], 0, 0
    level = int(os.environ.get("LEVEL", "0"))

    def ask(task):
        nonlocal asked
        tasks.put(task)
        asked += 1

    def report(key):
        values = found[key]
        strength = Evaluation(level=level, results=tuple(GameResult(**game) for game in values["games"])).summary()
        values["strength"] = strength
        low, high = strength["intervals"]["margin"]
        say(f"PLAYED {key}: won {strength['wins']}, KO {strength['ko']} of {strength['games']}, margin "
            f"{strength['margin']:.1f} ({low:.1f} to {high:.1f}), decision {strength['decision_ms']:.2f} ms")

    def listen(wait):
        nonlocal heard
        while heard < asked:
            try:
                key, games, error = results.get(timeout=max(0.0, wait()))
            except Exception:
                return
            heard += 1
            found[key]["games"] += games
            if error:
                say("FAILED", key, error)
            elif len(found[key]["games"]) == found[key]["wanted"]:
                report(key)

    for name, times, games, where, folder, pipe in racers:
        while True:
            left = limit - (time.monotonic() - BEGUN) - (0 if where == "cpu" else GAMES_SECONDS)
            if not pipe.poll(max(0.0, left)):
                say("no time left for", name)
                break
            kind, *said = pipe.recv()
            if kind == "ready":
                say(name, f"set up in {said[0]:.1f} s, drawn on the card: {said[1]}")
                if left < times[-1]:
                    say("no time left for", name)
                    break
                pipe.send("go")
            elif kind == "point":
                at, point = said
                key = f"{name} {at:g}s"
                found[key] = {"point": point, "games": [], "wanted": games}
                say(f"TRAINED {key}: {point['steps']} steps, loss {point['train_loss']:.4f}, val {point['val_loss']:.4f}, "
                    f"{point['tokens'] / point['seconds'] / 1e6:.2f} M tokens/s")
                for seeds in groups(games, 10_000):
                    task = (key, str(folder / checkpoint_name(at)), where, seeds, level)
                    ask(task) if where == "cpu" else later.append(task)
            else:
                if kind == "failed":
                    say("FAILED", name, said[0])
                break
        listen(lambda: 0.0)
    for task in later:
        ask(task)
    listen(lambda: limit - (time.monotonic() - BEGUN))
    if heard < asked:
        say(asked - heard, "groups of games did not end in time")
    out.mkdir(parents=True, exist_ok=True)
    (out / "race.json").write_text(json.dumps(found))
    for process in mp.active_children():
        process.kill()
    shutil.rmtree(root, ignore_errors=True)
    say("end")


if __name__ == "__main__":
    main()
