"""The ladder on one GPU: numerics of every rung, tiles of its products, whole steps, single changes.

    PYTHONPATH=src OUT=results python3 dev/gpu/rungs_gpu.py [SECONDS] [WAVE …]

Every trial is a process. A wave's processes start together (they compile side by side), say when they are ready, and
are then told to measure one after another. Waves: check, tiles, ladder, singles. SECONDS ends it after the trial at
hand.
"""

import collections
import json
import os
import statistics
import subprocess
import sys
import time

OUT = os.environ.get("OUT", "/tmp")
LADDER = ("m0", "m1", "m2", "m3", "r16", "best")
SINGLES = (
    "m0+tiles", "m0+split", "m1+pointwise", "m1+attention",
    "m2+zero_fill", "m2+reuse", "m2+capture", "m3+tiles", "m3+pointwise", "m3+attention", "m3+lanes", "r16-lanes",
)  # fmt: skip
PLANS = {
    "check": [[["check", rung, case] for case in ("hal-20m", "gpt2-c256") for rung in LADDER]],
    "tiles": [[["tiles", family] for family in ("16x64", "128x128", "pipelined")]],
    "ladder": [
        [["step", rung, "hal-20m"] for rung in LADDER[:3]] + [["step", rung, "gpt2-c256"] for rung in LADDER],
        [["step", rung, "hal-20m"] for rung in LADDER[3:]] + [["step", rung, "hal-5m"] for rung in LADDER],
    ],
    "singles": [
        [["step", name, "hal-20m"] for name in SINGLES[4:8]],
        [["step", name, "hal-20m"] for name in SINGLES[8:]],
        [["step", name, "gpt2-c256"] for name in SINGLES],
        [["step", name, "hal-20m"] for name in SINGLES[:4]],
    ],
}


def check(rung, case):
    """Relative errors of losses and gradients against fp64, over PyTorch's in bf16, at B 4 and two layers."""
    import dataclasses

    import torch

    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.models import build
    from ridgeline.ops.dropout import DropoutState

    w = workload(case, batch=4)
    w = dataclasses.replace(
        w, model=dataclasses.replace(w.model, decoder=dataclasses.replace(w.model.decoder, layers=2))
    )
    batch = random_batch(w, torch.device("cuda"))
    state = DropoutState(torch.tensor([3, 4], device="cuda"), 5)

    def run(impl, dtype):
        model = build(w.model, impl=impl, seed=0)
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            if p.dim() == 1:
                p.data += 0.3 * torch.randn(p.shape, generator=generator)
            p.data = p.data.bfloat16().float()
        model = model.cuda().to(dtype).train()
        given = {k: v.bfloat16().to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        losses = model.losses(given, state)
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(torch.stack(list(losses.values())).sum(), list(named.values()))
        return {**{k: v.detach().double() for k, v in losses.items()}, **{n: g.double() for n, g in zip(named, grads)}}

    exact, torch16 = run("reference", torch.float64), run("reference", torch.bfloat16)
    got = run("fused" if rung == "best" else rung, torch.bfloat16)
    again = run("fused" if rung == "best" else rung, torch.bfloat16)
    rel = lambda a, b: float((a - b).norm() / b.norm())
    ratios = {k: (rel(got[k], exact[k]), rel(torch16[k], exact[k])) for k in exact}
    worst = sorted(((a / max(b, 1e-4), k) for k, (a, b) in ratios.items()), reverse=True)[:4]
    return {
        "worst": [(round(r, 2), k) for r, k in worst],
        "ok": all(r <= 1.5 for r, _ in worst),
        "repeatable": all(torch.equal(got[k], again[k]) for k in got),
    }


def tiles(family):
    """Forward, input gradient and weight gradient of the MLP's up product at hal-20m's size."""
    import torch

    from ridgeline.models.rungs.products import TILES
    from ridgeline.ops.linear.tiled import Tile, product_raw, segments_of

    variants = {
        "16x64": [TILES["16x64"], Tile(16, 64, 32, 4, 1), Tile(16, 64, 32, 2, 1), Tile(16, 64, 64, 4, 1)],
        "128x128": [TILES["128x128"], Tile(128, 128, 32, 8, 1), Tile(128, 128, 64, 4, 1), Tile(128, 128, 32, 4, 1)],
        "pipelined": [
            TILES["pipelined"], Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 4, 4),
            Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3),
        ],
    }[family]  # fmt: skip
    N, K, M = 131072, 512, 2048
    x, dy, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((N, K), (N, M), (M, K)))
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dw = torch.empty(M, K, device="cuda")
    runs = {}
    for tile in variants:
        runs[tile, "forward"] = lambda tile=tile: product_raw(x, w.t(), y, tile)
        runs[tile, "dx"] = lambda tile=tile: product_raw(dy, w, dx, tile)
        runs[tile, "dw"] = lambda tile=tile: product_raw(dy.t(), x, dw, tile)
        pieces, segment = segments_of(M, K, N, tile, x)
        parts = torch.empty(1, pieces, M, K, device="cuda")
        runs[tile, f"dw/{pieces}"] = lambda tile=tile, s=segment, p=parts: product_raw(
            dy.t()[None], x[None], p, tile, segment=s
        )
    truth = {"forward": x.float() @ w.float().t(), "dx": dy.float() @ w.float()}
    wrong = []
    for (tile, kind), run in runs.items():  # compiles
        try:
            run()
            torch.cuda.synchronize()
            if kind in truth:
                got = (y if kind == "forward" else dx).float()
                error = float((got - truth[kind]).norm() / truth[kind].norm())
                if not error < 4e-3:
                    wrong.append((tuple(tile), kind, error))
        except Exception as error:
            runs[tile, kind] = None
            wrong.append((tuple(tile), kind, str(error)[:200]))
    yield "ready"
    rows = []
    for (tile, kind), run in runs.items():
        if run is None:
            continue
        times = []
        for _ in range(4):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            run()
            b.record()
            torch.cuda.synchronize()
            times.append(1e3 * a.elapsed_time(b))
        rows.append((list(tile), kind, round(min(times[1:]), 1)))
    yield {"us": rows, "wrong": wrong}


def step(name, case):
    """Milliseconds, phases, peak memory and the kernel table of a whole step."""
    import torch

    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.models import build
    from ridgeline.optim import OptimizerConfig
    from ridgeline.train.config import engine_called
    from ridgeline.train.engines import engine_step

    w, engine = workload(case), engine_called(name)
    batch = random_batch(w, torch.device("cuda"))
    model = build(w.model, impl=engine.impl, seed=0).cuda().train()
    optimizer = OptimizerConfig(lr=3e-4, weight_decay=0.1, clip=1.0)
    begin = time.time()
    train = engine_step(engine, model, optimizer, steps=None, precision="bf16")
    train(batch)
    torch.cuda.synchronize()
    first = time.time() - begin
    yield "ready"

    def timed():
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        train(batch)
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b)

    one = statistics.median(timed() for _ in range(3))
    times = [timed() for _ in range(max(4, min(30, int(1500 / one))))]
    out = {
        "ms": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3),
        "first_s": round(first, 1), "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": train.metrics()[-1].loss,
    }  # fmt: skip
    out["phases"] = {k: round(v, 3) for k, v in train.phases(batch, 3).items()}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        train(batch)
        torch.cuda.synchronize()
    spent, count = collections.Counter(), collections.Counter()
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            spent[e.name[:90]] += e.device_time
            count[e.name[:90]] += 1
    out["kernels"] = [(k, round(v), count[k]) for k, v in spent.most_common(22)]
    out["launches"], out["kernel_ms"] = sum(count.values()), round(sum(spent.values()) / 1e3, 3)
    yield out


def worker(kind, *arguments):
    """Prepares, says so, waits for a line, measures."""
    if kind == "check":
        result = check(*arguments)
        print("READY", flush=True)
        sys.stdin.readline()
    else:
        trial = {"tiles": tiles, "step": step}[kind](*arguments)
        next(trial)
        print("READY", flush=True)
        sys.stdin.readline()
        result = next(trial)
    print("RESULT " + json.dumps(result), flush=True)


def wave(jobs, deadline, results):
    """Starts all jobs of a wave, then measures them one after another."""
    import threading

    started = []
    for job in jobs:
        p = subprocess.Popen(
            [sys.executable, __file__, "worker", *job], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(f"{OUT}/rungs_{'_'.join(job)}.err", "w"), text=True,
        )  # fmt: skip
        lines = []
        reader = threading.Thread(target=lambda p=p, lines=lines: lines.extend(iter(p.stdout.readline, "")), daemon=True)
        reader.start()
        started.append((job, p, lines))
    ready = lambda p, lines: p.poll() is not None or any(line.startswith("READY") for line in lines)
    while time.time() < deadline and not all(ready(p, lines) for _, p, lines in started):
        time.sleep(0.1)
    for job, p, lines in started:
        name, until = " ".join(job), min(deadline, time.time() + 25)
        try:
            if p.poll() is None and any(line.startswith("READY") for line in lines):
                p.stdin.write("go\n")
                p.stdin.flush()
            while time.time() < until and p.poll() is None:
                time.sleep(0.05)
        except BrokenPipeError:
            pass
        time.sleep(0.1)
        found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
        results[name] = found[0] if found else {"error": open(f"{OUT}/rungs_{'_'.join(job)}.err").read()[-1500:]}
        if p.poll() is None:
            p.kill()
            if not found:
                results[name]["error"] = "no time left " + results[name]["error"]
        short = {k: v for k, v in results[name].items() if k != "kernels"}
        print(name, json.dumps(short)[:1400], flush=True)
        json.dump(results, open(f"{OUT}/rungs.json", "w"))


def main(arguments):
    seconds = float(arguments[0]) if arguments and arguments[0].replace(".", "").isdigit() else 120.0
    names = [a for a in arguments if a in PLANS] or list(PLANS)
    begin, results = time.time(), {}
    waves = [(name, jobs) for name in names for jobs in PLANS[name]]
    if len(names) == len(PLANS):  # numerics and tiles compile beside the first steps
        waves = [("check", PLANS["check"][0]), ("ladder", PLANS["ladder"][0] + PLANS["tiles"][0])]
        waves += [("ladder", PLANS["ladder"][1])] + [("singles", jobs) for jobs in PLANS["singles"]]
    for name, jobs in waves:
        if time.time() - begin > seconds - 12:
            print("no time for", name, [" ".join(job) for job in jobs])
            continue
        wave(jobs, begin + seconds, results)
        print(f"--- {name}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    worker(*sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main(sys.argv[1:])
