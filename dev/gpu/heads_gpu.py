"""Policy ends on a GPU: numerics, then times.

PYTHONPATH=src python3 dev/gpu/heads_gpu.py [seconds]      ($OUT/heads.json; each job in a process of its own)
"""

import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback

OUT, TMP = os.environ.get("OUT", "/tmp"), "/tmp/heads_out"
DRY = bool(os.environ.get("DRY"))
DEV = "cpu" if DRY else "cuda"
IMPLS = ("triton",) if DRY else ("cuda", "triton")
SHAPES, WIDTH, N = ((256, 9), (260, 37), (279, 6)), 512, 200 if DRY else 131072


def start():
    import torch

    if DRY:
        from ridgeline.ops._triton import interpreter

        torch.set_num_threads(1)
        interpreter.enable()
    torch.manual_seed(0)
    return torch


def problem(rows, dtype, seed=0):
    import torch

    from ridgeline.ops.policy_heads import HeadWeights

    g = torch.Generator(device=DEV).manual_seed(seed)
    draw = lambda *s: torch.randn(*s, generator=g, device=DEV)
    heads, seen = [], WIDTH
    for h, v in SHAPES:
        heads.append(
            HeadWeights(
                *(
                    w.bfloat16().to(dtype)
                    for w in (
                        1 + draw(seen) / 4,
                        draw(seen) / 4,
                        draw(h, seen) * seen**-0.5,
                        draw(h) / 4,
                        draw(v, h) * h**-0.5,
                        draw(v) / 4,
                    )
                )
            )
        )
        seen += v
    y = torch.stack([torch.randint(v, (rows,), generator=g, device=DEV) for _, v in SHAPES], 1)
    y[torch.rand(y.shape, generator=g, device=DEV) < 0.1] = -100
    return draw(rows, WIDTH).bfloat16().to(dtype), heads, y


def rel(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def grads(fn, x, heads):
    import torch

    x = x.detach().requires_grad_()
    heads = [type(h)(*(w.detach().requires_grad_() for w in h)) for h in heads]
    out = fn(x, heads)
    flat = [w for h in heads for w in h]
    g = torch.autograd.grad(out.sum(), [x, *flat])
    return dict(
        zip(["losses", "x", *(f"{i}.{n}" for i in range(len(heads)) for n in heads[0]._fields)], [out.detach(), *g])
    )


def check_heads():
    """The op at real widths against fp64, beside torch in bf16; run to run equality."""
    torch = start()
    from ridgeline.ops.policy_heads import policy_heads

    rows = 200 if DRY else 65536 + 37
    x, h, y = problem(rows, torch.float64)
    low = (x.bfloat16(), [type(k)(*(w.bfloat16() for w in k)) for k in h])
    exact = grads(lambda a, b: policy_heads(a, b, y), x, h)
    plain = grads(lambda a, b: policy_heads(a, b, y), *low)
    found = {}
    for impl in IMPLS:
        got, again = (grads(lambda a, b: policy_heads(a, b, y, impl=impl), *low) for _ in range(2))
        table = {k: [rel(got[k], exact[k]), rel(plain[k], exact[k])] for k in exact}
        same = all(torch.equal(got[k], again[k]) for k in got)
        worst = sorted(table, key=lambda k: -table[k][0] / max(table[k][1], 1e-12))[:6]
        lines = (f"{k} {table[k][0]:.1e}/{table[k][1]:.1e}" for k in worst)
        print(f"heads {impl} vs fp64 (/ torch bf16), worst:", *lines, "| same bits twice:", same, flush=True)
        found[impl] = {"table": table, "same": same}
    return found


def policy(layers, dtype, impl, B):
    import torch

    from ridgeline.models import ControllerPolicy
    from ridgeline.presets import hal_20m

    c = hal_20m().model
    c = dataclasses.replace(c, decoder=dataclasses.replace(c.decoder, layers=layers))
    m = ControllerPolicy(c, impl=impl, seed=0)
    g = torch.Generator().manual_seed(1)
    for p in m.parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=g)
        p.data = p.data.bfloat16().float()
    T = 16 if DRY else 256
    draw = lambda highs: torch.stack([torch.randint(v, (B, T), generator=g) for v in highs], -1)
    hv = [k.classes for k in c.heads]
    batch = {
        "categories": draw([k.rows for k in c.categories for _ in range(k.columns)]),
        "numbers": torch.randn(B, T, c.numbers, generator=g).bfloat16().float(),
        "previous": draw(hv),
        "targets": draw(hv),
    }
    return m.to(DEV, dtype).train(), {k: v.to(DEV) for k, v in batch.items()}


def check_policy():
    """hal-20m with two layers, dropout on: fused bf16 and plain bf16 against fp64, same masks."""
    torch = start()
    from ridgeline.ops.dropout import DropoutState

    st = DropoutState(torch.tensor([3, 4], device=DEV), 5)

    def run(impl, dtype):
        m, b = policy(1 if DRY else 2, dtype, impl, 2 if DRY else 8)
        losses = m.losses(b, st)
        ps = dict(m.named_parameters())
        g = torch.autograd.grad(torch.stack(list(losses.values())).sum(), list(ps.values()))
        return {
            **{f"loss {k}": v.detach().double() for k, v in losses.items()},
            **{k: v.double() for k, v in zip(ps, g)},
        }

    exact, got, pt = run("reference", torch.float64), run("fused", torch.bfloat16), run("reference", torch.bfloat16)
    table = {k: [rel(got[k], exact[k]), rel(pt[k], exact[k])] for k in exact}
    worst = sorted(table, key=lambda k: -table[k][0] / max(table[k][1], 1e-12))[:7]
    print(
        "policy vs fp64 (fused / torch bf16), worst ratios:",
        *(f"{k} {table[k][0]:.1e}/{table[k][1]:.1e}" for k in worst),
    )
    return {"table": table}


def graph_time(step, table=True):
    import torch

    if DRY:
        step()
        return {"ms": 0.0, "kernels": []}
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        step()
        step()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            step()
        ts = []
        for _ in range(14):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(s)
            g.replay()
            b.record(s)
            torch.cuda.synchronize()
            ts.append(a.elapsed_time(b))
        out = {"ms": sorted(ts[2:])[6], "all": ts, "kernels": []}
        if table:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(3):
                    g.replay()
                torch.cuda.synchronize()
            c, n = collections.Counter(), collections.Counter()
            for e in prof.events():
                if e.device_type == torch.autograd.DeviceType.CUDA:
                    c[e.name] += e.device_time / 3
                    n[e.name] += 1 / 3
            out["kernels"] = [(k[:90], round(v, 1), round(n[k], 1)) for k, v in c.most_common(16)]
    return out


def sinks_on(weights):
    import torch

    from ridgeline.ops.sink import ATTRIBUTE, GradientSink

    for w in weights:
        sink = GradientSink(torch.zeros(w.shape, device=DEV))
        setattr(w, ATTRIBUTE, sink)
        sink.begin(add=False)


def show(name, r, kernels=14):
    print(f"{name}: {r['ms'] * 1e3:.0f} µs")
    for k in r["kernels"][:kernels]:
        print("    ", *k[1:], k[0])


def time_heads(impl):
    torch = start()
    from ridgeline.ops.policy_heads import policy_heads
    from ridgeline.ops.sink import ATTRIBUTE

    x, h, y = problem(N, torch.bfloat16)
    x.requires_grad_()
    flat = [w.requires_grad_() for k in h for w in k]
    sinks_on(flat)

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        torch.autograd.grad(policy_heads(x, h, y, impl=impl).sum(), [x, *flat], allow_unused=True)

    r = graph_time(step)
    show(f"heads {impl} fwd+bwd", r)
    return r


def input_problem(rows):
    """The input layer of hal-20m on random rows: a function of its weights, which are given too, and dy."""
    import torch
    from ridgeline.models.fused.policy import input_columns
    from ridgeline.ops.inputs import input_layer

    m, _ = policy(1, torch.bfloat16, "fused", 1)
    g = torch.Generator(device=DEV).manual_seed(0)
    c = m.config
    ints = lambda highs: torch.stack([torch.randint(v, (rows,), generator=g, device=DEV) for v in highs], 1)
    cat, prev = ints([k.rows for k in c.categories for _ in range(k.columns)]), ints([k.classes for k in c.heads])
    num = torch.randn(rows, c.numbers, device=DEV).bfloat16().float()
    dy = torch.randn(rows, WIDTH, device=DEV, dtype=torch.bfloat16)
    flat = [w.detach().requires_grad_() for w in (m.input.weight, m.input.bias, *m.tables.parameters())]
    columns = input_columns(c)

    def layer(weights, impl):
        return input_layer(cat, num, prev, columns, weights[2:], *weights[:2], impl=impl)

    return layer, flat, dy


def check_input():
    """The input layer against fp64, beside torch in bf16; run to run equality."""
    torch = start()
    layer, flat, dy = input_problem(200 if DRY else 65536 + 37)

    def run(impl, dtype):
        weights = [w.detach().to(dtype).requires_grad_() for w in flat]
        out = layer(weights, impl)
        return [out.detach(), *torch.autograd.grad(out, weights, dy.to(dtype))]

    exact, plain = run("reference", torch.float64), run("reference", torch.bfloat16)
    got, again = (run("triton", torch.bfloat16) for _ in range(2))
    names = ("out", "weight", "bias", *(f"table {i}" for i in range(len(flat) - 2)))
    rows = {k: [rel(a, e), rel(p, e)] for k, a, p, e in zip(names, got, plain, exact)}
    same = all(torch.equal(a, b) for a, b in zip(got, again))
    print("input vs fp64 (/ torch bf16):", *(f"{k} {a:.1e}/{b:.1e}" for k, (a, b) in rows.items()), "| same:", same)
    return {"table": rows, "same": same}


def time_input():
    torch = start()
    from ridgeline.ops.sink import ATTRIBUTE

    layer, flat, dy = input_problem(N)
    sinks_on(flat)

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        torch.autograd.grad(layer(flat, "triton"), flat, dy, allow_unused=True)

    r = graph_time(step)
    show("input fwd+bwd", r)
    return r


def times():
    """All times in one process."""
    return {impl: time_heads(impl) for impl in IMPLS} | {"input": time_input()}


JOBS = {"check_heads": check_heads, "check_input": check_input, "check_policy": check_policy, "times": times}
if __name__ == "__main__":
    os.makedirs(TMP, exist_ok=True)
    if len(sys.argv) > 1 and sys.argv[1] in JOBS:
        try:
            json.dump(JOBS[sys.argv[1]](), open(f"{TMP}/{sys.argv[1]}.json", "w"))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        sys.exit()
    which, seconds = (*sys.argv[1:], *("all", "60")[len(sys.argv) - 1 :])
    end, found = time.time() + float(seconds), {}
    for job in JOBS:
        if which != "all" and not job.startswith(which):
            continue
        left = min(end - time.time(), 300 if DRY else 20)
        if left < 3:
            print(f"{job}: no time left", flush=True)
            continue
        try:
            done = subprocess.run([sys.executable, __file__, job], timeout=left, capture_output=True, text=True)
            out, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            out, code = f"{error.stdout} TIMEOUT", 1
        words = "\n".join(line for line in out.splitlines() if "warn" not in line.lower())
        print(words[-2200:] if code == 0 else f"FAILED {job}: {words[-900:]}", flush=True)
        if code == 0:
            found[job] = json.load(open(f"{TMP}/{job}.json"))
        json.dump(found, open(f"{OUT}/heads_{which}.json", "w"))
