"""Two GPUs: equality with one, scaling, what the backward pass hides, resuming 2 ↔ 1, a killed process; one JSON.

PYTHONPATH=src OUT=$OUT python dev/gpu/ddp_gpu.py [measure ctas train]      (needs two cards; about 150 s)
"""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
ROWS = (("hal-20m", 512), ("gpt2-c256", 512), ("hal-20m", 256), ("gpt2-c256", 32))  # windows a GPU


def measure():
    """Inside torchrun: equality, then scaling."""
    import torch
    import torch.distributed as dist

    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.engine import Replicas, TrainStep
    from ridgeline.engine.distributed import together
    from ridgeline.models import build
    from ridgeline.optim import OptimizerConfig

    optimizer = OptimizerConfig(lr=3e-4, weight_decay=0.1, clip=1.0)

    class Alone(Replicas):
        """A single process in spite of the group: the same step without an all-reduce."""

        def __init__(self):
            super().__init__()
            self.rank, self.world = 0, 1

    report = {}
    with together("cuda") as replicas:
        rank, device = replicas.rank, torch.device("cuda", torch.cuda.current_device())

        def note(key, value):
            report[key] = value
            if rank == 0:
                print(key, json.dumps(value), flush=True)
                (OUT / f"ddp_measure{os.environ.get('NCCL_MAX_CTAS', '')}.json").write_text(json.dumps(report, indent=1))

        def step_of(case, replicas, **rest):
            torch.manual_seed(0)
            model = build(case.model, impl="fused", seed=0).to(device).train()
            return TrainStep(model, optimizer=optimizer, precision="bf16", replicas=replicas, seed=3, **rest)

        def timed(call, seconds=0.5):
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            replicas.exchange(False, 0.0)
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(5):
                call()
            b.record()
            b.synchronize()
            _, first = replicas.exchange(False, a.elapsed_time(b) / 5)
            n = max(8, int(seconds * 1e3 / first))
            replicas.exchange(False, 0.0)
            a.record()
            for _ in range(n):
                call()
            b.record()
            b.synchronize()
            return a.elapsed_time(b) / n

        def guarded(key, function):
            try:
                note(key, function())
            except Exception as error:
                note(key, f"{type(error).__name__}: {error}"[:500])
            gc.collect()
            torch.cuda.empty_cache()

        def equality():
            case = workload("hal-5m", batch=16, context=64)
            batches = [random_batch(case, device, seed) for seed in range(5)]
            halves = [{k: v[rank * 8 : rank * 8 + 8] for k, v in batch.items()} for batch in batches]
            steps = {
                "alone": step_of(case, Alone()),
                "captured": step_of(case, Replicas(bucket=200_000, overlap=True)),
                "calls": step_of(case, Replicas(bucket=200_000, overlap=True), capture=False),
                "after": step_of(case, Replicas()),
            }
            for i in range(60):
                for name, step in steps.items():
                    step((batches if name == "alone" else halves)[i % 5])
            one, two = steps["alone"].flat.masters, steps["captured"].flat.masters
            other = [torch.empty_like(two) for _ in range(2)]
            dist.all_gather(other, two)
            bits = lambda name: all(  # noqa: E731
                torch.equal(a, b)
                for a, b in zip(steps["captured"].update.state(), steps[name].update.state(), strict=True)
            )
            return {
                "replicas_equal": torch.equal(*other),
                "captured_equals_calls": bits("calls"),
                "under_equals_after": bits("after"),
                "early_share": steps["captured"]._last.reduction.early / len(two),
                "loss": {n: [round(m.loss, 5) for m in s.metrics()[::20]] for n, s in steps.items() if n[1] != "f"},
                "weights_relative": float((two - one).norm() / one.norm()),
            }

        def overlapped(step, batch):
            """From a profile of replays: graph launches, NCCL kernels, share of their time under other kernels."""
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                for _ in range(4):
                    step(batch)
                torch.cuda.synchronize()
            launches = sum(event.name == "cudaGraphLaunch" for event in seen.events())
            kernels = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
            nccl = [(e.time_range.start, e.time_range.end) for e in kernels if "nccl" in e.name.lower()]
            rest = sorted((e.time_range.start, e.time_range.end) for e in kernels if "nccl" not in e.name.lower())
            spent, hidden = sum(b - a for a, b in nccl), 0.0
            for a, b in nccl:
                reach = a
                for c, d in rest:
                    low, high = max(reach, c), min(b, d)
                    if high > low:
                        hidden, reach = hidden + high - low, high
            return {
                "graph_launches_a_step": launches / 4,
                "nccl_kernels_a_step": len(nccl) / 4,
                "nccl_us_a_step": round(spent / 4, 1),
                "under_other_kernels": round(hidden / spent, 3) if spent else None,
            }

        def scaling(name, batch_size):
            case = workload(name, batch=batch_size)
            batch = random_batch(case, device, seed=rank)
            began = time.time()
            steps = {"none": step_of(case, Alone()), "under": step_of(case, Replicas(overlap=True))}
            steps["after"] = step_of(case, Replicas())
            if name == "hal-20m" and batch_size == 512:
                steps["under, 4 MiB buckets"] = step_of(case, Replicas(bucket=2**20, overlap=True))
            for step in steps.values():
                step(batch)
            torch.cuda.synchronize()
            ready, found = time.time() - began, {}
            for turn in range(4):
                for label, step in list(steps.items())[:: 1 if turn % 2 else -1]:
                    found.setdefault(label, []).append(timed(lambda step=step: step(batch)))
            ms = {label: sum(sorted(v)[1:3]) / 2 for label, v in found.items()}
            flat = torch.zeros(len(steps["under"].flat.lanes[0].carried), device=device)
            alone_ms = timed(lambda: replicas.sum(flat), 0.1)
            both = torch.zeros(2, dtype=torch.float64)  # the slower card sets the pace of two
            both[rank] = ms["none"]
            ms["none"] = float(replicas.sum(both).max())
            cost = ms["after"] - ms["none"]
            return {
                "ms": {k: round(v, 4) for k, v in ms.items()},
                "all": {k: [round(x, 4) for x in v] for k, v in found.items()},
                "tok_s": {"1 GPU": round(case.tokens / ms["none"] * 1e3), "2": round(2e3 * case.tokens / ms["under"])},
                "scaling": round(2 * ms["none"] / ms["under"], 4),
                "all_reduce_alone_ms": round(alone_ms, 4),
                "hidden": round(1 - (ms["under"] - ms["none"]) / cost, 3) if cost > 0 else None,
                "early_share": steps["under"]._last.reduction.early / len(flat),
                "profile": overlapped(steps["under"], batch),
                "phases": {k: round(v, 4) for k, v in steps["under"].phases(batch, 5).items()},
                "ready_s": round(ready, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            }

        few = os.environ.get("NCCL_MAX_CTAS")  # thread blocks that NCCL takes from the other kernels
        if not few:
            guarded("equality", equality)
        for name, batch_size in ROWS[:2] if few else ROWS:
            guarded(f"{name} B {batch_size}", lambda name=name, size=batch_size: scaling(name, size))
        sys.stdout.flush()
        if rank == 0:
            print("measured", flush=True)
        replicas.exchange(False, 0.0)
        began = time.time()
    if rank == 0:
        print("left the group in", round(time.time() - began, 2), flush=True)


def text():
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
        result = act(action, out, steps, preset, resume, train, override)
    except RidgelineError as error:  # as the command line does
        print(f"ridgeline: {error}", file=sys.stderr)
        sys.exit(2)
    if result.rank == 0:
        print("RESULT " + json.dumps(result.summary()), flush=True)


def act(action, out, steps, preset, resume, train, override):
    if action == "resume":
        return resume(out)
    changes = {"data": text(), "steps": int(steps), "eval_interval": 1000, "checkpoint_interval": 250, "out": out}
    changes |= {"batch": 64, "device": "cuda", "model": {"decoder": {"dropout": 0.2}}, "eval_windows": 512}
    return train(override(preset("gpt2-c256"), changes))


def runs():
    """Losses of two GPUs and one, both ways of resuming, and a killed process."""
    os.environ["RIDGELINE_CACHE"] = str(OUT / "cache")
    text()
    report, env = {}, {**os.environ, "OMP_NUM_THREADS": "4"}
    single = [sys.executable, __file__]

    def go(command, key, limit=60):
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=env)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        said = [x for x in done.stderr.splitlines() if x.startswith(("ridgeline", "gpt2-c256", "first step"))][:8]
        report[key] = {
            "rc": done.returncode,
            "s": round(time.time() - began, 1),
            "summary": json.loads(line[7:]) if line else done.stderr[-1500:],
            "said": said,
        }

    def curve(folder):
        lines = [json.loads(x) for x in (OUT / folder / "metrics.jsonl").read_text().splitlines()]
        return [x["loss"] for x in lines if "loss" in x], [x["val_loss"] for x in lines if "val_loss" in x]

    def killed():
        folder = OUT / "killed"
        child = subprocess.Popen(
            [*TORCHRUN, "run", "train", str(folder), "6000"], stderr=subprocess.PIPE, text=True, env=env
        )
        end = time.time() + 60
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < 1500:
            if time.time() > end or child.poll() is not None:
                child.kill()
                return {"error": "never got there", "stderr": child.communicate()[1][-1500:]}
            time.sleep(0.1)
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        began = time.time()
        try:
            _, said = child.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            child.kill()
            said = child.communicate()[1]
        from ridgeline import checkpoint

        return {
            "rc": child.returncode,
            "ended_after_s": round(time.time() - began, 2),
            "said": [line for line in said.splitlines() if "ridgeline" in line][:6],
            "tail": said[-600:],
            "checkpoint_step": checkpoint.load(folder / "last").meta["step"],
        }

    def both_ways():
        """Half a run on one side, the rest on the other: the checkpoint of a run that was killed half way."""
        go([*single, "run", "resume", str(OUT / "killed"), "0"], "killed on 2, resumed on 1")
        child = subprocess.Popen([*single, "run", "train", str(OUT / "half"), "6000"], env=env, stderr=-3)
        end = time.time() + 60
        file = OUT / "half" / "metrics.jsonl"
        while time.time() < end and (not file.exists() or file.read_text().count("\n") < 1500):
            time.sleep(0.1)
        child.kill()
        child.wait()
        go([*TORCHRUN, "run", "resume", str(OUT / "half"), "0"], "killed on 1, resumed on 2")
        vals = {name: curve(name)[1] for name in ("killed", "half")}
        return {"val_losses": {k: [round(x, 4) for x in v] for k, v in vals.items()}}

    def same():
        go([*single, "run", "train", str(OUT / "one"), "400"], "1 GPU")
        go([*TORCHRUN, "run", "train", str(OUT / "two"), "400"], "2 GPUs")
        (a, x), (b, y) = curve("one"), curve("two")
        return {"largest difference of 400": max(abs(p - q) for p, q in zip(a, b, strict=True)), "val": [x, y]}

    for key, function in (("same losses", same), ("killed", killed), ("both ways", both_ways)):
        try:
            report[key] = function()
        except Exception as error:
            report[key] = f"{type(error).__name__}: {error}"[:600]
        (OUT / "ddp_runs.json").write_text(json.dumps(report, indent=1))
        print(key, json.dumps(report[key]), flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        measure()
        os._exit(0)
    if sys.argv[1:2] == ["run"]:
        one_run(*sys.argv[2:])
        sys.exit()
    for part, more in (("measure", {}), ("ctas", {"NCCL_MAX_CTAS": "4"})):
        if part not in sys.argv and len(sys.argv) > 1:
            continue
        with (OUT / "ddp_measure.log").open("w") as log:
            child = subprocess.Popen([*TORCHRUN, "inside"], stderr=log, env={**os.environ, **more})
            try:
                child.wait(90)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait(40)
        print((OUT / "ddp_measure.log").read_text()[-1500:], flush=True)
    if "train" in sys.argv or len(sys.argv) == 1:
        runs()
