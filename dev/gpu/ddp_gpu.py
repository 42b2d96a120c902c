"""Two GPUs: equality with one, a killed process, resuming 2 ↔ 1; one JSON. Times: allreduce_gpu.py, bench --gpus 1,2.

PYTHONPATH=src OUT=$OUT python dev/gpu/ddp_gpu.py [equality same ways]      (needs two cards)

`ways` alone takes about 45 s. Nothing is timed: other work may go on beside it.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
SINGLE = [sys.executable, __file__]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
STEPS, KILLED_AT = 3000, 1000


def equality():
    """Inside torchrun: replicas, captured and called, under and after the backward pass, one process and two."""
    import torch
    import torch.distributed as dist

    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.engine import Replicas, TrainStep
    from ridgeline.engine.distributed import together
    from ridgeline.models import build
    from ridgeline.optim import OptimizerConfig

    class Alone(Replicas):
        """A single process in spite of the group: the same step without an all-reduce."""

        def __init__(self):
            super().__init__()
            self.rank, self.world = 0, 1

    with together("cuda") as replicas:
        rank, device = replicas.rank, torch.device("cuda", torch.cuda.current_device())
        case = workload("hal-5m", batch=16, context=64)
        optimizer = OptimizerConfig(lr=3e-4, weight_decay=0.1, clip=1.0)

        def step_of(who, **rest):
            torch.manual_seed(0)
            model = build(case.model, impl="fused", seed=0).to(device).train()
            return TrainStep(model, optimizer=optimizer, precision="bf16", replicas=who, seed=3, **rest)

        batches = [random_batch(case, device, seed) for seed in range(5)]
        halves = [{k: v[rank * 8 : rank * 8 + 8] for k, v in batch.items()} for batch in batches]
        steps = {
            "alone": step_of(Alone()),
            "captured": step_of(Replicas(bucket=200_000, overlap=True)),
            "calls": step_of(Replicas(bucket=200_000, overlap=True), capture=False),
            "after": step_of(Replicas()),
        }
        for i in range(60):
            for name, step in steps.items():
                step((batches if name == "alone" else halves)[i % 5])
        one, two = steps["alone"].flat.masters, steps["captured"].flat.masters
        other = [torch.empty_like(two) for _ in range(2)]
        dist.all_gather(other, two)

        def bits(name):
            pairs = zip(steps["captured"].update.state(), steps[name].update.state(), strict=True)
            return all(torch.equal(a, b) for a, b in pairs)

        report = {
            "replicas_equal": torch.equal(*other),
            "captured_equals_calls": bits("calls"),
            "under_equals_after": bits("after"),
            "loss": {n: [round(m.loss, 5) for m in s.metrics()[::20]] for n, s in steps.items() if n[1] != "f"},
            "weights_relative": float((two - one).norm() / one.norm()),
        }
        report["unequal"] = unequal(steps["captured"], halves[0], rank)
        if rank == 0:
            print("equality", json.dumps(report), flush=True)
        replicas.exchange(False, 0.0)
        os._exit(0)


def unequal(step, batch, rank):
    """Batches of two sizes, one a process: captured before, and of a new shape; what is said, whether weights stay."""
    import torch

    from ridgeline.errors import RidgelineError

    def told(attempt):
        try:
            attempt()
        except RidgelineError as error:
            return str(error)[:120]

    short = {name: tensor[:6] for name, tensor in batch.items()}
    for each in (batch, short):
        step.prepare(each)
    before = step.flat.masters.clone()
    step(short if rank else batch)
    said = [told(step.check), told(lambda: step({name: tensor[: 3 + rank] for name, tensor in batch.items()}))]
    kept = torch.equal(step.flat.masters, before)
    step(batch)
    return {"said": said, "weights_kept": kept, "goes_on": not torch.equal(step.flat.masters, before)}


def text():
    """A file of random words, with structure enough to be learned."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(300)]
    file = OUT / "words.txt"
    if not file.exists():
        file.write_text(" ".join(draw.choices(words, k=200_000)))
    return str(file)


def one_run(action, out, steps):
    """A run of the loop, in one process or inside torchrun."""
    from ridgeline.errors import RidgelineError
    from ridgeline.presets import preset
    from ridgeline.train import resume, train
    from ridgeline.train.settings import override

    try:
        if action == "resume":
            result = resume(out)
        else:
            changes = {"data": text(), "steps": int(steps), "eval_interval": 1000, "checkpoint_interval": 250}
            changes |= {"batch": 64, "device": "cuda", "model": {"decoder": {"dropout": 0.2}}, "eval_windows": 512}
            result = train(override(preset("gpt2-c256"), {**changes, "lanes": 1, "out": out}))
    except RidgelineError as error:  # as the command line does
        print(f"ridgeline: {error}", file=sys.stderr)
        sys.exit(2)
    if result.rank == 0:
        print("RESULT " + json.dumps(result.summary()), flush=True)


def go(command, limit=60):
    """Ends well, or the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    return "ended well" if "RESULT " in done.stdout else done.stderr[-800:]


def curve(folder):
    """Losses by step, and validations."""
    lines = [json.loads(x) for x in (OUT / folder / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x], [round(x["val_loss"], 4) for x in lines if "val_loss" in x]


def kill(command, folder):
    """Starts a run and kills one process of it after KILLED_AT steps."""
    file = OUT / folder / "metrics.jsonl"
    child = subprocess.Popen([*command, "run", "train", str(OUT / folder), str(STEPS)], stderr=-1, text=True)
    end = time.time() + 60
    while not file.exists() or file.read_text().count("\n") < KILLED_AT:
        if time.time() > end or child.poll() is not None:
            child.kill()
            return {"error": "never got there", "stderr": child.communicate()[1][-800:]}
        time.sleep(0.05)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(workers[-1]) if len(command) > 2 else child.pid, signal.SIGKILL)
    began = time.time()
    try:
        _, said = child.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        child.kill()
        said = child.communicate()[1]
    from ridgeline import checkpoint

    return {
        "rc": child.returncode,
        "ended_after_s": round(time.time() - began, 2),
        "said": [line[:200] for line in said.splitlines() if "ridgeline" in line and "File" not in line][-3:],
        "checkpoint_step": checkpoint.load(OUT / folder / "last").meta["step"],
    }


def ways():
    """A run killed on two cards goes on on one, one killed on one card goes on on two, and one is never stopped."""
    report = {}

    def change(name, before, after):
        with contextlib.suppress(Exception):
            report[f"{name} killed"] = kill(before, name)
            report[f"{name} resumed"] = go([*after, "run", "resume", str(OUT / name), "0"])

    text()
    threads = [
        threading.Thread(target=change, args=("two_to_one", TORCHRUN, SINGLE)),
        threading.Thread(target=change, args=("one_to_two", SINGLE, TORCHRUN)),
        threading.Thread(target=lambda: go([*SINGLE, "run", "train", str(OUT / "whole"), str(STEPS)])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    whole, validations = curve("whole")
    report["validations"] = {"whole": validations}
    for name in ("two_to_one", "one_to_two"):
        losses, report["validations"][name] = curve(name)
        last = [abs(a - b) for a, b in zip(losses[-500:], whole[-500:], strict=True)]
        report[f"{name}: mean distance of the last 500 losses from the whole run"] = round(sum(last) / 500, 5)
    return report


def same():
    """The losses of 400 steps on one card and on two."""
    report = {n: go([*c, "run", "train", str(OUT / n), "400"]) for n, c in (("one", SINGLE), ("two", TORCHRUN))}
    (a, x), (b, y) = curve("one"), curve("two")
    return {**report, "largest difference of 400": max(abs(p - q) for p, q in zip(a, b, strict=True)), "val": [x, y]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        equality()
    if sys.argv[1:2] == ["run"]:
        one_run(*sys.argv[2:])
        sys.exit()
    asked, found = sys.argv[1:] or ["equality", "same", "ways"], {}
    if "equality" in asked:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*TORCHRUN, "inside"], timeout=60)
    for key, function in (("same", same), ("ways", ways)):
        if key in asked:
            try:
                found[key] = function()
            except Exception as error:
                found[key] = f"{type(error).__name__}: {error}"[:600]
            print(key, json.dumps(found[key]), flush=True)
            (OUT / "ddp.json").write_text(json.dumps(found, indent=1))
    for folder in ("whole", "two_to_one", "one_to_two", "one", "two"):
        subprocess.run(["rm", "-rf", str(OUT / folder)], check=True)
