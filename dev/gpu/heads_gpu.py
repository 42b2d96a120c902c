"""Policy ends on a GPU: numerics, then times.  PYTHONPATH=src python3 dev/gpu/heads_gpu.py  (about 45 s; $OUT/heads.json)

Numerics run in parallel processes (this compiles everything), then times one process after the other."""

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
CONFIGS = {
    f"r{r}w{w}s{s}": (r, w, s)
    for r, w, s in (
        (64, 4, 2),
        (64, 4, 1),
        (64, 4, 3),
        (64, 8, 1),
        (64, 8, 2),
        (32, 4, 1),
        (32, 4, 2),
        (128, 8, 1),
        (128, 8, 2),
        (32, 2, 1),
        (32, 2, 2),
        (16, 1, 1),
        (16, 2, 1),
        (16, 4, 1),
    )
}
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
    """The op at real widths against fp64; both head ops beside torch in bf16; run to run equality."""
    torch = start()
    from ridgeline.ops import heads as seq
    from ridgeline.ops.policy_heads import policy_heads

    rows = 200 if DRY else 8192 + 37
    x, h, y = problem(rows, torch.float64)
    low = lambda d: (x.to(d), [type(k)(*(w.to(d) for w in k)) for k in h])
    exact = grads(lambda a, b: policy_heads(a, b, y), x, h)
    got = grads(lambda a, b: policy_heads(a, b, y, impl="triton"), *low(torch.bfloat16))
    again = grads(lambda a, b: policy_heads(a, b, y, impl="triton"), *low(torch.bfloat16))
    torch_ = grads(lambda a, b: policy_heads(a, b, y), *low(torch.bfloat16))
    other = grads(
        lambda a, b: seq.heads_losses(a, [seq.HeadWeights(*k) for k in b], y, impl="triton"), *low(torch.bfloat16)
    )
    table = {k: [rel(got[k], exact[k]), rel(torch_[k], exact[k]), rel(other[k], exact[k])] for k in exact}
    same = all(torch.equal(got[k], again[k]) for k in got)
    ratios = {k: a / max(b, 1e-12) for k, (a, b, _) in table.items()}
    worst = sorted(ratios, key=lambda k: -ratios[k])[:5]
    print(
        "heads vs fp64 (folded / torch bf16 / sequential), worst:",
        *(f"{k} {table[k][0]:.1e}/{table[k][1]:.1e}/{table[k][2]:.1e}" for k in worst),
        "| same bits twice:",
        same,
    )
    return {"table": table, "same": same}


def check_config(name):
    """One launch config at a ragged N against the reference in fp64: sums and row results."""
    torch = start()
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.policy_heads import launch as L
    from ridgeline.ops.policy_heads import policy_heads

    r, w, s = CONFIGS[name]
    rows = 200 if DRY else 4096 + 37
    x, h, y = problem(rows, torch.bfloat16)
    exact = grads(lambda a, b: policy_heads(a, b, y), x.double(), [type(k)(*(v.double() for v in k)) for k in h])
    plan = L.layout_of(h)
    packed = L.pack(plan, h)
    passed = L.forward(
        plan, packed, h, x, y, eps=1e-5, gradient=True, config=Launch(rows=r, warps=w, columns=128, stages=s)
    )
    dx, factors = L.state_gradient(plan, packed, passed, x, torch.ones(3, device=DEV))
    err = {"losses": rel(L.losses(plan, passed), exact["losses"]), "x": rel(dx, exact["x"])}
    dw = {"ddown": [], "dup": []}
    prod = L.products(passed, x)
    for p, k in zip(plan.heads, h):
        t = type(k)(*(torch.empty_like(v, dtype=torch.float32) for v in k))
        L.weight_gradients(plan, p, k, prod, passed.sums, factors, t, add=False)
        dw["dup"].append(rel(t.up_HS, exact[f"{p.index}.up_HS"]))
        dw["ddown"].append(rel(t.down_VH, exact[f"{p.index}.down_VH"]))
    err |= {k: max(v) for k, v in dw.items()}
    ok = err["losses"] < 2e-3 and all(err[k] < 2.5e-2 for k in ("x", "dup", "ddown"))
    print(f"config {name}: {'ok ' if ok else 'BAD'}", " ".join(f"{k} {v:.1e}" for k, v in err.items()))
    return {"ok": ok, "err": err}


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


def time_heads(which):
    torch = start()
    from ridgeline.ops import heads as seq
    from ridgeline.ops.policy_heads import policy_heads

    x, h, y = problem(N, torch.bfloat16)
    x.requires_grad_()
    flat = [w.requires_grad_() for k in h for w in k]
    sinks_on(flat)
    from ridgeline.ops.sink import ATTRIBUTE

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        losses = (
            policy_heads(x, h, y, impl="triton")
            if which == "folded"
            else seq.heads_losses(x, [seq.HeadWeights(*k) for k in h], y, impl="triton")
        )
        torch.autograd.grad(losses.sum(), [x, *flat], allow_unused=True)

    r = graph_time(step)
    show(f"heads {which} fwd+bwd", r)
    return r


def time_input():
    torch = start()
    from ridgeline.models.fused.policy import input_columns
    from ridgeline.ops.inputs import input_layer
    from ridgeline.ops.sink import ATTRIBUTE

    m, _ = policy(1, torch.bfloat16, "fused", 1)
    g = torch.Generator(device=DEV).manual_seed(0)
    c = m.config
    ints = lambda highs: torch.stack([torch.randint(v, (N,), generator=g, device=DEV) for v in highs], 1).to(
        torch.int16
    )
    cat, num, prev = (
        ints([k.rows for k in c.categories for _ in range(k.columns)]),
        torch.randn(N, c.numbers, device=DEV),
        ints([k.classes for k in c.heads]),
    )
    dy = torch.randn(N, WIDTH, device=DEV, dtype=torch.bfloat16)
    flat = [m.input.weight, m.input.bias, *m.tables.parameters()]
    sinks_on(flat)

    def step():
        for w in flat:
            getattr(w, ATTRIBUTE).begin(add=False)
        out = input_layer(cat, num, prev, input_columns(c), flat[2:], *flat[:2], impl="triton")
        torch.autograd.grad(out, flat, dy, allow_unused=True)

    r = graph_time(step)
    show("input fwd+bwd", r)
    return r


def time_configs():
    torch = start()
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.policy_heads import launch as L

    x, h, y = problem(N, torch.bfloat16)
    plan = L.layout_of(h)
    packed = L.pack(plan, h)
    rows = {}
    for name, (r, w, s) in list(CONFIGS.items())[: 1 if DRY else None]:
        try:
            t = graph_time(
                lambda: L.forward(
                    plan,
                    packed,
                    h,
                    x,
                    y,
                    eps=1e-5,
                    gradient=True,
                    config=Launch(rows=r, warps=w, columns=128, stages=s),
                )
            )
            heads = [k for k in t["kernels"] if k[0].startswith("head_kernel")]
            rows[name] = {"ms": t["ms"], "head_kernels_us": sum(k[1] for k in heads)}
        except Exception as e:
            rows[name] = {"error": repr(e)[:300]}
        json.dump(rows, open(f"{TMP}/time_configs.json", "w"))
    print(
        "forward (P product, three head kernels, sums) µs / head kernels:",
        *(
            f"{k} {v.get('ms', 0) * 1e3:.0f}/{v.get('head_kernels_us', 0):.0f}"
            if "ms" in v
            else f"{k} {v['error'][:60]}"
            for k, v in rows.items()
        ),
    )
    return rows


JOBS = {
    "check_heads": check_heads,
    "check_policy": check_policy,
    "time_configs": time_configs,
    "time_folded": lambda: time_heads("folded"),
    "time_sequential": lambda: time_heads("sequential"),
    "time_input": time_input,
    **{f"config_{k}": (lambda k=k: check_config(k)) for k in CONFIGS},
}
if __name__ == "__main__":
    os.makedirs(TMP, exist_ok=True)
    if len(sys.argv) > 1:
        try:
            json.dump(JOBS[sys.argv[1]](), open(f"{TMP}/{sys.argv[1]}.json", "w"))
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    else:
        t0, found = time.time(), {}
        for f in os.listdir(TMP):
            os.remove(f"{TMP}/{f}")
        run = lambda j: subprocess.Popen(
            [sys.executable, __file__, j], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

        def finish(job, p, limit):
            try:
                out = p.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                p.kill()
                out = p.communicate()[0] + "\nTIMEOUT"
            print(
                out.strip()[-2400:] if p.returncode == 0 else f"FAILED {job} rc {p.returncode}: {out.strip()[-700:]}",
                flush=True,
            )
            found[job] = (
                json.load(open(f"{TMP}/{job}.json")) if os.path.exists(f"{TMP}/{job}.json") else {"error": out[-1500:]}
            )

        checks = [j for j in JOBS if not j.startswith("time")]
        if DRY:
            [finish(j, run(j), 300) for j in checks if j in ("check_heads", "check_policy", "config_r64w4s2")]
        else:
            procs = {j: run(j) for j in checks}
            end = time.time() + 40
            for j, p in procs.items():
                finish(j, p, max(2, end - time.time()))
        print(f"checks took {time.time() - t0:.0f} s", flush=True)
        for j in ("time_folded", "time_input", "time_configs", "time_sequential"):
            finish(j, run(j), 300 if DRY else 25)
        found["seconds"] = time.time() - t0
        json.dump(found, open(f"{OUT}/heads.json", "w"))
        print(f"total {found['seconds']:.0f} s")
