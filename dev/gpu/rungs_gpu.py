"""The ladder on one GPU: numerics of every rung, tiles of its products, whole steps, single changes.

    PYTHONPATH=src OUT=results python3 dev/gpu/rungs_gpu.py [SECONDS] [WAVE …]

Every trial is a process. A wave's processes start together (they compile side by side), say when they are ready, and
are then told to measure one after another. Waves: check, tiles, relative, ladder, singles; and beside, whose trials do
not wait for each other. SECONDS ends it after the trial at hand.
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
    "m2+zero_fill", "m2+reuse", "m2+capture", "r16-lanes", "m3+tiles", "m3+pointwise", "m3+attention", "m3+lanes",
    "m0+tiles", "m0+split", "m1+pointwise", "m1+attention",
)  # fmt: skip
TILES = [["tiles", family] for family in ("16x64", "128x128", "pipelined")]
RELATIVE = [["relative", *v.split()] for v in ("64/32/4/2 32/32/4/2 64/32/4/2", "64/64/8/2 64/32/8/2 32/32/4/2",
                                               "128/32/8/2 32/64/4/2 64/32/8/2")]  # others spill  # fmt: skip
CHECKS = [["check", rung, "hal-20m"] for rung in ("m2", "m3", "r16")] + [["check", "m2", "gpt2-c256"]]


def steps(case, *names):
    return [["step", name, case] for name in names]


PLANS = {
    "check": [CHECKS],
    "tiles": [TILES],
    "relative": [RELATIVE],
    "beside": [RELATIVE + CHECKS[:3]],  # a minute while others compile
    "ladder": [
        steps("hal-20m", "m0", "m1", "m3") + steps("gpt2-c256", *LADDER),
        steps("hal-20m", "m2", "r16", "best") + steps("hal-5m", *LADDER, "r16+recompute"),
    ],
    "singles": [steps("hal-20m", *SINGLES[at : at + 4]) for at in (0, 4, 8)] + [steps("gpt2-c256", *SINGLES)],
}
# without a wave's name: the ladder at both widths, numerics included, then what the article did not separate
ALL = [
    ("ladder", steps("hal-20m", *LADDER[:5]) + steps("gpt2-c256", *LADDER[:5])),
    ("singles", steps("hal-20m", *SINGLES[:4])),
    ("tiles", TILES),
]


def check(rung, case):
    """Relative errors of losses and gradients against fp64, over PyTorch's in bf16, at B 2 and two layers."""
    import dataclasses

    import torch

    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.models import build
    from ridgeline.ops.dropout import DropoutState

    w = workload(case, batch=2)
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
    impl = "fused" if rung == "best" else rung
    got, again = run(impl, torch.bfloat16), run(impl, torch.bfloat16)
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


def relative(forward, queries, keys):
    """Kernel times of attention with the relative term and dropout in tiles, at hal-20m's size."""
    import math

    import torch
    from torch.profiler import ProfilerActivity, profile

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.attention import long
    from ridgeline.ops.attention.reference import attention_reference
    from ridgeline.ops.attention.short import dropping
    from ridgeline.ops.dropout import DropoutState

    B, T, H, D, R = 512, 256, 8, 64, 1024

    def tile(text):
        rows, columns, warps, stages = map(int, text.split("/"))
        return Launch(rows=rows, columns=columns, warps=warps, stages=stages)

    launches = long.Launches(tile(forward), tile(queries), tile(keys))
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    qkv, table, d_out = draw(B, T, 3 * H, D), draw(R, D), draw(B, T, H, D)
    q, k, v = qkv.split(H, dim=2)
    state = DropoutState(torch.tensor([3, 4], device="cuda"))
    drop, scale = dropping(0.2, state, 1), 1 / math.sqrt(D)
    out, lse = torch.empty_like(d_out), torch.empty(B, H, T, device="cuda")
    d_qkv, d_table = torch.empty_like(qkv), torch.empty(R, D, device="cuda")

    def run():
        for sweeps in (2, 1):
            long.forward(q, k, v, table, out, lse, scale=scale, drop=drop, sweeps=sweeps, launches=launches)
        grads = d_qkv.split(H, dim=2)
        long.backward(
            d_out, q, k, v, table, out, lse, *grads, d_table, scale=scale, drop=drop, launches=launches
        )  # fmt: skip

    run()
    small = [x[:2].double().requires_grad_() for x in (q, k, v)]
    exact = attention_reference(*small, table.double(), scale=scale, p=0.2, dropout=state, site=1)
    dq, dk, dv = torch.autograd.grad(exact, small, d_out[:2].double())
    rel = lambda a, b: round(float((a.double() - b).norm() / b.norm()), 5)
    errors = [rel(out[:2], exact)] + [rel(g[:2], e) for g, e in zip(d_qkv.split(H, dim=2), (dq, dk, dv))]
    torch.cuda.synchronize()
    yield "ready"
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    times = collections.Counter()
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            times[e.name[:40]] += e.device_time / 3
    yield {"errors": errors, "us": {k: round(v, 1) for k, v in times.most_common()}, "all": round(sum(times.values()))}


def step(name, case):
    """Milliseconds, phases, peak memory and the kernel table of a whole step; its numerics are the wave check's."""
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
        "loss": round(train.metrics()[-1].loss, 4),
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
        trial = {"tiles": tiles, "step": step, "relative": relative}[kind](*arguments)
        next(trial)
        print("READY", flush=True)
        sys.stdin.readline()
        result = next(trial)
    print("RESULT " + json.dumps(result), flush=True)


def brief(result):
    """One short line."""
    result = {k: v for k, v in result.items() if k not in ("kernels", "min", "max", "launches")}
    if "worst" in result:
        result["worst"] = result["worst"][0]
    return json.dumps(result).replace('"', "")[-420 if "error" in result else 0 :][:620]


def errors(job):
    """The file of what a job says on standard error."""
    return f"{OUT}/rungs_{'_'.join(job).replace('/', '.')}.err"


def wave(jobs, deadline, results, together=True):
    """Starts all jobs of a wave, then measures them one after another, once all are ready or as each is."""
    import threading

    started = []
    for job in jobs:
        p = subprocess.Popen(
            [sys.executable, __file__, "worker", *job], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(errors(job), "w"), text=True,
        )  # fmt: skip
        lines = []
        reader = threading.Thread(
            target=lambda p=p, lines=lines: lines.extend(iter(p.stdout.readline, "")), daemon=True
        )
        reader.start()
        started.append((job, p, lines))
    ready = lambda p, lines: p.poll() is not None or any(line.startswith("READY") for line in lines)
    timed = any(job[0] != "check" for job in jobs)
    enough = time.time() + (0.62 if timed else 0.95) * (deadline - time.time())
    while together and time.time() < enough and not all(ready(p, lines) for _, p, lines in started):
        time.sleep(0.1)
    for _, p, lines in started:  # what is not ready would disturb the others
        if together and not ready(p, lines):
            p.kill()
    for job, p, lines in started:
        name, until = " ".join(job), min(deadline, time.time() + (25 if together else 99))
        try:
            while time.time() < until and not ready(p, lines):
                time.sleep(0.05)
            if p.poll() is None and any(line.startswith("READY") for line in lines):
                p.stdin.write("go\n")
                p.stdin.flush()
            while time.time() < until and p.poll() is None:
                time.sleep(0.05)
        except BrokenPipeError:
            pass
        time.sleep(0.1)
        found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
        results[name] = found[0] if found else {"error": open(errors(job)).read()[-1500:]}
        if p.poll() is None:
            p.kill()
            if not found:
                results[name]["error"] = results[name]["error"] + " no time left"
        print(name, brief(results[name]), flush=True)
        json.dump(results, open(f"{OUT}/rungs.json", "w"))


def main(arguments):
    seconds = float(arguments[0]) if arguments and arguments[0].replace(".", "").isdigit() else 60.0
    names = [a for a in arguments if a in PLANS]
    begin, results = time.time(), {}
    waves = [(name, jobs) for name in names for jobs in PLANS[name]] if names else ALL
    for name, jobs in waves:
        if time.time() - begin > seconds - 15:
            print("no time for", name, [" ".join(job) for job in jobs])
            continue
        wave(jobs, begin + seconds, results, together=name != "beside")
        print(f"--- {name}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    worker(*sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main(sys.argv[1:])
