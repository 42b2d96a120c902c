"""Numerics and times of the Triton kernels on a GPU. PYTHONPATH=src python3 dev/gpu/triton_gpu.py [groups…]"""

import json
import os
import subprocess
import sys
import time
import traceback

GROUPS = ("ends", "normf", "normb", "sums", "act", "xent")
OUT = "/tmp/triton_out"
os.makedirs(OUT, exist_ok=True)
FINAL = os.environ.get("OUT", "/tmp")
BANDWIDTH = 4.25e12
DRY = bool(os.environ.get("DRY"))
DEV = "cpu" if DRY else "cuda"


def parent(groups):
    t0 = time.time()
    env = dict(os.environ)
    env.pop("TRITON_INTERPRET", None)
    procs = {}
    for g in groups:  # numerics of every config, in parallel: this also compiles everything
        procs[g] = subprocess.Popen(
            [sys.executable, __file__, "--check", g],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    results = {}
    for g, p in procs.items():
        try:
            out, _ = p.communicate(timeout=max(5, 75 - (time.time() - t0)))
        except subprocess.TimeoutExpired:
            p.kill()
            out = p.communicate()[0] + "\nTIMEOUT"
        open(f"{OUT}/triton_check_{g}.log", "w").write(out)
        results[g] = read(f"{OUT}/triton_check_{g}.json")
        if p.returncode:
            print(f"check {g}: rc {p.returncode}: {out.strip()[-600:]}")
    print(f"checks took {time.time() - t0:.0f} s")
    for g in groups:
        t1 = time.time()
        try:
            r = subprocess.run(
                [sys.executable, __file__, "--time", g],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=40,
            )
            out, rc = r.stdout, r.returncode
        except subprocess.TimeoutExpired as e:
            out, rc = (e.stdout or b"").decode() + "\nTIMEOUT", 124
        open(f"{OUT}/triton_time_{g}.log", "w").write(out)
        if rc:
            print(f"time {g}: rc {rc}: {out.strip()[-600:]}")
        results[g] = merge(results[g], read(f"{OUT}/triton_time_{g}.json"))
        show(g, results[g], time.time() - t1)
    json.dump(results, open(f"{FINAL}/triton.json", "w"), indent=0)
    print(f"total {time.time() - t0:.0f} s")


def read(path):
    try:
        return json.load(open(path))
    except OSError:
        return {}


def merge(a, b):
    for case, rows in b.items():
        for name, row in rows.items():
            a.setdefault(case, {}).setdefault(name, {}).update(row)
    return a


def show(g, cases, seconds):
    print(f"== {g} ({seconds:.0f} s)")
    for case, rows in cases.items():
        bad = [f"{n}: {r.get('error') or r.get('err')}" for n, r in rows.items() if r.get("error") or r.get("bad")]
        timed = sorted((r["us"], n) for n, r in rows.items() if "us" in r and not n.startswith("torch"))
        torch_ = [f"{n} {r['us']:.1f}" for n, r in rows.items() if n.startswith("torch") and "us" in r]
        floor = next((r["bytes"] / BANDWIDTH * 1e6 for r in rows.values() if r.get("bytes")), 0)
        errs = [r["err"] for r in rows.values() if r.get("err") is not None]
        worst = {k: max(e[k] for e in errs if k in e) for k in (errs[0] if errs else {})}
        print(
            f"{case}: floor {floor:.1f} | "
            + " ".join(f"{n}:{u:.1f}" for u, n in timed[:5])
            + (f" .. worst {timed[-1][0]:.0f}" if len(timed) > 5 else "")
            + f" | {' '.join(torch_)} | err "
            + " ".join(f"{k} {v:.1e}" for k, v in worst.items())
        )
        for b in bad[:4]:
            print("   BAD", b[:300])


# ---------------------------------------------------------------- child
def child(mode, group):
    import torch

    if DRY:
        from ridgeline.ops._triton import interpreter

        torch.set_num_threads(1)
        interpreter.enable()
        torch.cuda.synchronize = lambda: None
    torch.manual_seed(0)
    results = {}
    for case, builder in cases(group):
        try:
            trials = builder()
        except Exception as e:
            results.setdefault(case, {})["build"] = {"error": repr(e)[:400]}
            traceback.print_exc()
            continue
        rows = results.setdefault(case, {})
        for t in trials:
            row = rows.setdefault(t["name"], {})
            try:
                if mode == "--check" and t.get("check"):
                    for out in t.get("outs", ()):
                        out.fill_(float("nan"))
                    t["run"]()
                    torch.cuda.synchronize()
                    err = t["check"]()
                    again = t["state"]()
                    t["run"]()
                    torch.cuda.synchronize()
                    same = all(torch.equal(a, b) for a, b in zip(again, t["state"]()))
                    row["err"] = err
                    row["same"] = same
                    limit = t.get("limit", 5e-3)
                    row["bad"] = (not same) or any(not (v < limit) for v in err.values())
                elif mode == "--time":
                    row["us"] = timed(t["run"])
                    row["bytes"] = t.get("bytes", 0)
            except Exception as e:
                row["error"] = repr(e)[:400]
                traceback.print_exc()
            json.dump(results, open(f"{OUT}/triton_{mode[2:]}_{group}.json", "w"))
        del trials
        torch.cuda.empty_cache()


def timed(run, launches=10, repeats=9):
    import torch

    if DRY:
        run()
        return 1.0

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(launches):
                run()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream)
            graph.replay()
            b.record(stream)
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / launches)
    return sorted(times)[len(times) // 2]


def rel(a, b):
    return float((a.double().flatten() - b.double().flatten()).norm() / b.double().norm())


def cases(group):
    for name, build in all_cases(group):
        if DRY:
            build = shrink(build)
        yield name, build


def shrink(build):
    from functools import partial

    args = [
        {131072: 128, 8192: 64, 512: 64, 2048: 128, 1024: 64, 32768: 256, 4096: 8, 65536: 512}.get(a, a)
        if not isinstance(a, bool)
        else a
        for a in build.args
    ]
    if build.func.__name__ == "optim":
        args = [2048 * 3]
    if build.func.__name__ in ("drop", "gather", "dpos"):
        args[0] = 2
    return partial(build.func, *args)


def all_cases(group):
    from functools import partial

    if group == "normf":
        for N, C in ((131072, 512), (8192, 256)):
            for kind in ("alone", "joined", "joined+drop"):
                yield f"norm fwd {kind} {N}x{C}", partial(norm_forward, N, C, kind)
    if group == "normf":
        yield "norm fwd padded 131072x521 of 576", partial(norm_padded, 131072, 521, 528, 576, False)
    if group == "normb":
        yield "norm bwd padded 131072x521 of 576", partial(norm_padded, 131072, 521, 528, 576, True)
        for N, C in ((131072, 512), (8192, 256)):
            for kind in ("alone", "joined", "joined+drop"):
                yield f"norm bwd {kind} {N}x{C}", partial(norm_backward, N, C, kind)
        yield "norm bwd joined+drop 32768x1024", partial(norm_backward, 32768, 1024, "joined+drop")
    if group == "sums":
        for P, W in (
            (132, 768),
            (528, 768),
            (1056, 768),
            (1056, 1536),
            (2112, 1536),
            (528, 9984),
            (1056, 19968),
            (512, 131072),
            (32, 65536),
        ):
            yield f"column sums {P}x{W}", partial(sums, P, W)
    if group == "ends":
        yield "heads 131072x512 9/37/6", partial(heads, 131072, 512)
        yield "input layer 131072 162->512", partial(inputs, 131072, 512)
    if group == "act":
        for N, F in ((131072, 2048), (8192, 1024)):
            yield f"gelu fwd {N}x{F}", partial(act, N, F, False)
            yield f"gelu bwd {N}x{F}", partial(act, N, F, True)
    if group == "drop":
        yield "dropout 131072x512", partial(drop, 512, 256, 512)
        yield "dropout 8192x256", partial(drop, 32, 256, 256)
    if group == "xent":
        for N, V, W in (
            (131072, 37, 37),
            (131072, 37, 64),
            (131072, 9, 16),
            (8192, 65, 65),
            (8192, 65, 72),
            (8192, 65, 128),
            (4096, 50257, 50304),
        ):
            yield f"xent {N}x{V} rows of {W}", partial(xent, N, V, W)
    if group == "embed":
        yield "gather+pos+drop 8192x256 V65", partial(gather, 32, 256, 65, 256)
        yield "gather+pos 131072x512 V1000", partial(gather, 512, 256, 1000, 512)
        yield "dtable one-hot 8192x256 V65", partial(dtable, 8192, 1, 65, 256, True)
        yield "dtable one-hot 131072x2x32 V400", partial(dtable, 131072, 2, 400, 32, True)
        yield "dtable sorted 32768x512 V50257", partial(dtable, 32768, 1, 50257, 512, False)
        yield "dpositions 512x256x512", partial(dpos, 512, 256, 512)
        yield "dpositions 32x256x256", partial(dpos, 32, 256, 256)
    if group == "optim":
        yield "adamw 20M", partial(optim, 20_000_000 // 2048 * 2048)
        yield "adamw 5M", partial(optim, 5_000_000 // 2048 * 2048)


def state():
    import torch

    from ridgeline.ops.dropout import DropoutState

    return DropoutState(torch.tensor([12345678901, 17], device=DEV), 3)


def rand(*shape):
    import torch

    return torch.randn(*shape, device=DEV, dtype=torch.bfloat16)


def norm_forward(N, C, kind):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.norm.reference import norm_reference, residual_norm_reference
    from ridgeline.ops.norm.triton import norm_forward_raw

    T, joined, dropped = 256, kind != "alone", kind.endswith("drop")
    x, res, w, b, bb = rand(N, C), rand(N, C), rand(C), rand(C), rand(C)
    r, h = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(N, device=DEV), torch.empty(N, device=DEV)
    st = state()
    extra = dict(r_NC=r, residual_NC=res, branch_bias_C=bb) if joined else {}
    if dropped:
        extra |= dict(T=T, p=0.2, dropout=st, site=5)
    B = N // T
    if joined:
        r0, h0 = residual_norm_reference(
            x.view(B, T, C).float(),
            res.view(B, T, C).float(),
            w.float(),
            b.float(),
            eps=1e-5,
            kind="layernorm",
            branch_bias_C=bb.float(),
            p=0.2 if dropped else 0.0,
            dropout=st if dropped else None,
            site=5,
        )
    else:
        h0 = norm_reference(x.float(), w.float(), b.float(), eps=1e-5, kind="layernorm")

    def check():
        e = {"h": rel(h, h0)}
        if joined:
            e["r"] = rel(r, r0)
            e["h"] = rel(h, norm_reference(r.float(), w.float(), b.float(), eps=1e-5, kind="layernorm"))
        return e

    def make(cfg):
        def run():
            norm_forward_raw(x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", config=cfg, **extra)

        return run

    configs = [(4, 4), (4, 2), (4, 1)]
    trials = []
    for rows, warps in configs:

        def poisoned(run=make(Launch(rows=rows, warps=warps))):
            run()

        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=poisoned,
                check=lambda: check(),
                state=lambda: [h.clone(), r.clone(), rstd.clone()],
                outs=[h, rstd, mean] + ([r] if joined else []),
                bytes=N * C * (8 if joined else 4),
            )
        )
    r.fill_(0)
    F = torch.nn.functional
    if not joined:
        trials.append(dict(name="torch", run=lambda: F.layer_norm(x, (C,), w, b)))
    return trials


def norm_backward(N, C, kind):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.dropout import hidden_keep, quantise
    from ridgeline.ops.norm.reference import norm_reference
    from ridgeline.ops.norm.triton import norm_backward_raw, norm_forward_raw, partial_rows

    T, joined, dropped = 256, kind != "alone", kind.endswith("drop")
    r, dh, dres, w, b = rand(N, C), rand(N, C), rand(N, C), rand(C), rand(C)
    mean, rstd, h = torch.empty(N, device=DEV), torch.empty(N, device=DEV), torch.empty_like(r)
    norm_forward_raw(r, w, b, h, mean, rstd, eps=1e-5, kind="layernorm")
    dr, dy = torch.empty_like(r), torch.empty_like(r)
    st = state()
    X, W, Bb = (t.float().requires_grad_() for t in (r, w, b))
    gx, gw, gb = torch.autograd.grad(norm_reference(X, W, Bb, eps=1e-5, kind="layernorm"), [X, W, Bb], dh.float())
    if joined:
        gx = gx + dres.float()
    gy = gx
    if dropped:
        gy = gx * hidden_keep(st, 5, (N // T, T, C), 0.2, r.device).view(N, C) * quantise(0.2)[1]
    gbb = gy.sum(0)
    parts_out = torch.zeros((3 if joined else 2) * C, device=DEV)
    extra = dict(dresidual_NC=dres, branch_bias=True) if joined else {}
    if dropped:
        extra |= dict(T=T, p=0.2, dropout=st, site=5, dbranch_NC=dy)

    configs = [
        (1, 1, 8, 2),
        (1, 1, 12, 2),
        (1, 1, 16, 2),
        (1, 1, 12, 3),
        (1, 1, 8, 4),
        (2, 1, 8, 2),
        (2, 1, 6, 2),
        (2, 1, 8, 3),
        (2, 1, 6, 3),
        (2, 1, 4, 4),
        (2, 2, 8, 2),
        (2, 2, 4, 3),
    ]
    if C == 1024:
        configs = [(1, 1, 8, 2), (1, 2, 4, 2), (1, 2, 6, 2), (1, 2, 4, 3), (1, 2, 6, 1), (2, 4, 2, 2)]
    if N == 8192:
        configs = [
            (1, 1, 4, 1),
            (1, 1, 8, 1),
            (1, 1, 16, 1),
            (1, 1, 4, 3),
            (1, 1, 4, 4),
            (1, 1, 8, 3),
            (2, 1, 2, 2),
            (2, 1, 4, 1),
            (2, 1, 4, 2),
            (2, 1, 4, 3),
            (2, 1, 8, 2),
            (2, 1, 16, 1),
        ]
    trials = []
    for rows, warps, per, stages in configs:
        cfg = Launch(rows=rows, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, C, r, cfg), parts_out.numel(), device=DEV)

        def run(cfg=cfg, parts=parts):
            norm_backward_raw(dh, r, w, mean, rstd, parts, kind="layernorm", bias=True, dr_NC=dr, config=cfg, **extra)

        def check(parts=parts):
            column_sums_raw(parts, parts_out, accumulate=False)
            e = {"dr": rel(dr, gx), "dw": rel(parts_out[:C], gw), "db": rel(parts_out[C : 2 * C], gb)}
            if joined:
                e["dbb"] = rel(parts_out[2 * C :], gbb)
            if dropped:
                e["dy"] = rel(dy, gy)
            return e

        trials.append(
            dict(
                name=f"r{rows}w{warps}p{per}s{stages}",
                run=run,
                check=check,
                state=lambda parts=parts: [dr.clone(), parts.clone()] + ([dy.clone()] if dropped else []),
                outs=[dr, dy, parts],
                bytes=N * C * (10 if dropped else 8 if joined else 6),
            )
        )
    if not joined:
        x2, w2, b2 = (t.clone().requires_grad_() for t in (r, w, b))
        out, m, s = torch.native_layer_norm(x2.detach(), (C,), w, b, 1e-5)
        trials.append(
            dict(
                name="torch",
                run=lambda: torch.ops.aten.native_layer_norm_backward(dh, r, (C,), m, s, w, b, [True, True, True]),
            )
        )
    return trials


def norm_padded(N, C, W, S, backward):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.norm.reference import norm_reference
    from ridgeline.ops.norm.triton import norm_backward_raw, norm_forward_raw, partial_rows

    joint, w, b = rand(N, S), rand(C), rand(C)
    x, h = joint[:, :W], rand(N, W)
    mean, rstd = torch.empty(N, device=DEV), torch.empty(N, device=DEV)
    X = x[:, :C].float().requires_grad_()
    h0 = norm_reference(X, w.float(), b.float(), eps=1e-5, kind="layernorm")
    trials = []
    if not backward:
        for rows, warps in ((4, 4), (4, 8), (2, 4), (1, 1), (2, 1), (1, 2)):
            cfg = Launch(rows=rows, warps=warps)
            trials.append(
                dict(
                    name=f"r{rows}w{warps}",
                    run=lambda cfg=cfg: norm_forward_raw(
                        x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", columns=C, config=cfg
                    ),
                    check=lambda: {"h": rel(h[:, :C], h0.detach()), "pad": float(h[:, C:].float().abs().sum())},
                    state=lambda: [h.clone()],
                    outs=[h],
                    bytes=N * W * 4,
                )
            )
        return trials
    norm_forward_raw(x, w, b, h, mean, rstd, eps=1e-5, kind="layernorm", columns=C)
    dh, out = rand(N, W), min(C, 512)
    dres, dr = rand(N, out), rand(N, out)
    (gx,) = torch.autograd.grad(h0, X, dh[:, :C].float())
    gx = gx[:, :out] + dres.float()
    for rows, warps, per, stages in ((1, 1, 8, 2), (1, 2, 4, 2), (1, 2, 6, 2), (1, 2, 6, 1), (2, 4, 3, 2)):
        cfg = Launch(rows=rows, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, W, x, cfg), 2 * C, device=DEV)
        trials.append(
            dict(
                name=f"r{rows}w{warps}p{per}s{stages}",
                run=lambda cfg=cfg, parts=parts: norm_backward_raw(
                    dh,
                    x,
                    w,
                    mean,
                    rstd,
                    parts,
                    kind="layernorm",
                    bias=True,
                    columns=C,
                    dresidual_NC=dres,
                    dr_NC=dr,
                    config=cfg,
                ),
                check=lambda: {"dr": rel(dr, gx)},
                state=lambda: [dr.clone()],
                outs=[dr, parts],
                bytes=N * (W * 4 + out * 4),
            )
        )
    return trials


def heads(N, C):
    import torch

    from ridgeline.ops.heads import HeadWeights, heads_losses

    classes, width, flat, t = (9, 37, 6), C, [], []
    x = rand(N, C).requires_grad_()
    for V in classes:
        F = width // 2
        flat += [
            rand(width) * 0.1 + 1,
            rand(width) * 0.1,
            rand(F, width) * width**-0.5,
            rand(F) * 0.1,
            rand(V, F) * F**-0.5,
            rand(V) * 0.1,
        ]
        t.append(torch.randint(0, V, (N,), device=DEV))
        width += V
    flat = [w.requires_grad_() for w in flat]
    t = torch.stack(t, 1).to(torch.int8)
    got = {}

    def run(impl="triton"):
        l = heads_losses(x, [HeadWeights(*flat[6 * k : 6 * k + 6]) for k in range(3)], t, impl=impl)
        got[impl] = [l.detach(), *torch.autograd.grad(l.sum(), [x, *flat])]

    def check():
        run("reference")
        wide = [w.detach().float().requires_grad_() for w in [x, *flat]]
        l = heads_losses(wide[0], [HeadWeights(*wide[1 + 6 * k : 7 + 6 * k]) for k in range(3)], t, impl="reference")
        truth = [l.detach(), *torch.autograd.grad(l.sum(), wide)]
        e, r = ([rel(a.float(), b) for a, b in zip(got[i], truth)] for i in ("triton", "reference"))
        return {"ratio": max(a / (b + 1e-6) for a, b in zip(e, r)), "worst": max(e)}

    return [
        dict(
            name="ours f+b",
            run=run,
            check=check,
            state=lambda: [g.clone() for g in got["triton"]],
            bytes=N * C * 24,
            limit=3.0,
        ),
        dict(name="torch f+b", run=lambda: run("reference")),
    ]


def inputs(N, C):
    import torch

    from ridgeline.ops.inputs import InputColumns, input_layer

    rows = ((32, 4), (33, 12), (400, 32))
    cols = InputColumns((0, 1, 1, 2, 2), 18, ((0, 9), (1, 37), (2, 6)))
    W = 4 + 24 + 64 + 18 + 52
    cats = torch.stack([torch.randint(0, rows[k][0], (N,), device=DEV) for k in cols.tables], 1).to(torch.int16)
    nums = torch.randn(N, 18, device=DEV)
    prev = torch.stack([torch.randint(0, k, (N,), device=DEV) for k in (9, 37, 6)], 1).to(torch.uint8)
    flat = [w.requires_grad_() for w in (rand(C, W) * W**-0.5, rand(C), *(rand(*r) for r in rows))]
    dout, got = rand(N, C), {}

    def run(impl="triton"):
        out = input_layer(cats, nums, prev, cols, flat[2:], flat[0], flat[1], impl=impl)
        got[impl] = [out.detach(), *torch.autograd.grad(out, flat, dout)]

    def check():
        run("reference")
        return {f"{i}": rel(a.float(), b.float()) for i, (a, b) in enumerate(zip(got["triton"], got["reference"]))}

    return [
        dict(
            name="ours f+b",
            run=run,
            check=check,
            state=lambda: [g.clone() for g in got["triton"]],
            bytes=N * (C * 4 + W * 6),
            limit=2e-2,
        ),
        dict(name="torch f+b", run=lambda: run("reference")),
    ]


def sums(P, W):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch

    dtype = torch.bfloat16 if W > 40000 else torch.float32
    parts, out = torch.randn(P, W, device=DEV).to(dtype), torch.zeros(W, device=DEV)
    trials = []
    small = [
        (64, 16, 4, 1),
        (128, 16, 4, 1),
        (128, 16, 8, 1),
        (256, 16, 8, 1),
        (128, 32, 8, 1),
        (256, 8, 4, 1),
        (256, 8, 8, 1),
        (64, 16, 4, 3),
        (128, 8, 4, 2),
        (512, 8, 8, 1),
        (32, 32, 4, 4),
        (64, 32, 4, 1),
        (64, 32, 4, 3),
        (128, 32, 4, 2),
    ]
    big = [
        (32, 128, 4, 1),
        (16, 128, 4, 1),
        (8, 256, 4, 1),
        (32, 128, 4, 3),
        (16, 128, 2, 4),
        (8, 128, 1, 1),
        (16, 256, 4, 3),
        (32, 64, 4, 3),
        (8, 256, 4, 4),
        (64, 128, 8, 1),
    ]
    for rows, cols, warps, stages in small if W < 30000 else big:
        cfg = Launch(rows=rows, columns=cols, warps=warps, stages=stages)
        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}s{stages}",
                run=lambda cfg=cfg: column_sums_raw(parts, out, accumulate=False, launch=cfg),
                check=lambda: {"s": rel(out, parts.double().sum(0))},
                state=lambda o=out: [o.clone()],
                outs=[out],
                bytes=P * W * parts.element_size(),
            )
        )
    trials.append(dict(name="torch", run=lambda: parts.sum(0)))
    return trials


def act(N, F, backward):
    import torch

    from ridgeline.ops._triton.columns import column_sums_raw
    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.activation.reference import bias_gelu_reference
    from ridgeline.ops.activation.triton import bias_gelu_backward_raw, bias_gelu_forward_raw, partial_rows

    x, d, b = rand(N, F), rand(N, F), rand(F)
    out = torch.full_like(x, float("nan"))
    n = min(N, 8192)
    X, Bb = x[:n].double().requires_grad_(), b.double().requires_grad_()
    ref = bias_gelu_reference(X, Bb, kind="exact")
    (gx,) = torch.autograd.grad(ref, X, d[:n].double())
    trials = []
    if not backward:
        for rows, cols, warps in ((2, 1024, 4), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (1, 2048, 8), (2, 2048, 8)):
            cfg = Launch(rows=rows, columns=cols, warps=warps)
            trials.append(
                dict(
                    name=f"r{rows}c{cols}w{warps}",
                    run=lambda cfg=cfg: bias_gelu_forward_raw(x, b, out, kind="exact", config=cfg),
                    check=lambda: {"out": rel(out[:n], ref)},
                    state=lambda: [out.clone()],
                    outs=[out],
                    bytes=N * F * 4,
                )
            )
        trials.append(
            dict(name="tanh r4c512w4", run=lambda: bias_gelu_forward_raw(x, b, out, kind="tanh"), bytes=N * F * 4)
        )
        trials.append(dict(name="torch (no bias)", run=lambda: torch.nn.functional.gelu(x)))
        return trials
    for rows, cols, warps, per, stages in (
        (2, 1024, 4, 4, 1),
        (2, 1024, 4, 4, 2),
        (2, 1024, 4, 3, 3),
        (1, 1024, 4, 8, 1),
        (1, 1024, 2, 8, 1),
        (1, 1024, 4, 4, 3),
        (1, 512, 1, 8, 1),
        (1, 512, 1, 8, 2),
        (2, 512, 2, 8, 1),
        (2, 512, 2, 4, 2),
        (1, 256, 1, 8, 2),
    ):
        cfg = Launch(rows=rows, columns=cols, warps=warps, per_processor=per, stages=stages)
        parts = torch.empty(partial_rows(N, F, x, cfg), F, device=DEV)
        db = torch.zeros(F, device=DEV)

        def check(parts=parts, db=db):
            column_sums_raw(parts, db, accumulate=False)
            return {"dx": rel(out[:n], gx), "db": rel(db, out.double().sum(0))}

        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}p{per}s{stages}",
                run=lambda cfg=cfg, parts=parts: bias_gelu_backward_raw(d, x, b, out, parts, kind="exact", config=cfg),
                check=check,
                state=lambda: [out.clone()],
                outs=[out],
                bytes=N * F * 6,
                limit=2e-2,
            )
        )
    trials.append(dict(name="torch (no bias)", run=lambda: torch.ops.aten.gelu_backward(d, x)))
    return trials


def drop(B, T, C):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.dropout import hidden_keep, quantise
    from ridgeline.ops.dropout.triton import dropout_raw

    st, x = state(), rand(B * T, C)
    out = torch.full_like(x, float("nan"))
    ref = (
        (x.view(B, T, C).float() * hidden_keep(st, 5, (B, T, C), 0.2, x.device) * quantise(0.2)[1])
        .bfloat16()
        .view(-1, C)
    )
    trials = []
    for rows, warps in ((1, 1), (2, 1), (2, 4), (4, 4), (8, 4), (8, 8)):
        cfg = Launch(rows=rows, warps=warps)
        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=lambda cfg=cfg: dropout_raw(x, out, T, 0.2, st, 5, config=cfg),
                check=lambda: {"differs": float((out != ref).sum())},
                state=lambda: [out.clone()],
                outs=[out],
                bytes=B * T * C * 4,
                limit=0.5,
            )
        )
    trials.append(dict(name="torch", run=lambda: torch.nn.functional.dropout(x, 0.2)))
    return trials


def xent(N, V, W):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.cross_entropy.reference import cross_entropy_reference
    from ridgeline.ops.cross_entropy.triton import count_valid_raw, cross_entropy_raw, loss_partials, mean_loss_raw

    x, t = rand(N, W), torch.randint(0, V, (N,), device=DEV)
    x[:, V:] = float("nan")
    t[torch.rand(N, device=DEV) < 0.1] = -100
    counts = torch.zeros(64, dtype=torch.int32, device=DEV)
    d, loss = torch.full((N, W), float("nan"), device=DEV, dtype=torch.bfloat16), torch.zeros(1, device=DEV)
    count_valid_raw(t, counts)
    X = x[:, :V].float().requires_grad_()
    l0 = cross_entropy_reference(X, t)
    (g,) = torch.autograd.grad(l0, X)
    l0 = float(l0.detach())
    trials = []
    configs = (
        [
            (r, 0, w, p)
            for r, w, p in (
                (4, 1, 32),
                (8, 1, 16),
                (8, 1, 32),
                (16, 1, 16),
                (16, 1, 31),
                (32, 1, 16),
                (32, 4, 8),
                (64, 4, 8),
            )
        ]
        if V <= 2048
        else [
            (r, c, w, p)
            for r, c, w, p in (
                (4, 2048, 8, 4),
                (4, 1024, 4, 4),
                (4, 1024, 4, 2),
                (8, 1024, 4, 4),
                (4, 2048, 8, 2),
                (2, 4096, 16, 2),
                (2, 2048, 8, 2),
                (4, 4096, 16, 1),
                (8, 2048, 8, 2),
            )
        ]
    )
    for rows, cols, warps, per in configs:
        cfg = Launch(rows=rows, columns=cols, warps=warps, per_processor=per)
        L = torch.full((loss_partials(N, V, x, cfg),), float("nan"), device=DEV)

        def check(L=L):
            mean_loss_raw(L, counts, loss)
            return {
                "loss": abs(float(loss) - l0) / l0,
                "d": rel(d[:, :V], g),
                "pad": float(d[:, V:].float().abs().sum()),
            }

        trials.append(
            dict(
                name=f"r{rows}c{cols}w{warps}p{per}",
                run=lambda cfg=cfg, L=L: cross_entropy_raw(x, t, d, L, counts, classes=V, launch=cfg),
                check=check,
                state=lambda: [d.clone()],
                outs=[d],
                bytes=N * V * 4,
            )
        )
    trials.append(dict(name="mean", run=lambda: mean_loss_raw(L, counts, loss)))
    return trials


def gather(B, T, V, C):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.embedding.reference import embedding_reference
    from ridgeline.ops.embedding.triton import gather_raw

    st, dropped = state(), V == 65
    ids, w, pos = torch.randint(0, V, (B, T), device=DEV), rand(V, C), rand(T, C)
    out = torch.full((B * T, C), float("nan"), device=DEV, dtype=torch.bfloat16)
    extra = dict(p=0.2, dropout=st, site=3) if dropped else {}
    ref = embedding_reference(ids, w.float(), pos.float(), **extra)
    trials = []
    for rows, warps in ((1, 1), (2, 1), (4, 4), (8, 4), (16, 4)):
        cfg = Launch(rows=rows, warps=warps)
        trials.append(
            dict(
                name=f"r{rows}w{warps}",
                run=lambda cfg=cfg: gather_raw(ids.view(-1, 1), w, out, positions_RC=pos, T=T, config=cfg, **extra),
                check=lambda: {"out": rel(out, ref)},
                state=lambda: [out.clone()],
                outs=[out],
                bytes=B * T * (C * 2 + 8),
            )
        )
    trials.append(dict(name="torch (no dropout)", run=lambda: torch.nn.functional.embedding(ids, w) + pos))
    return trials


def dtable(N, K, V, C, small):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.embedding.triton import small_partials, table_gradient_small_raw, table_gradient_sorted_raw

    ids = (torch.rand(N, K, device=DEV) ** 3 * V).long()
    d = rand(N, K * C)
    ref = torch.zeros(V, C, device=DEV, dtype=torch.float64).index_add_(0, ids.flatten(), d.view(-1, C).double())
    dt = torch.zeros(V, C, device=DEV)
    trials = []
    if small:
        for rows, cols, warps, per in (
            (64, 64, 4, 1),
            (64, 64, 4, 2),
            (64, 32, 4, 2),
            (128, 64, 4, 1),
            (128, 128, 8, 1),
            (32, 64, 4, 2),
        ):
            cfg = Launch(rows=rows, columns=min(cols, max(16, C)), warps=warps, per_processor=per)
            parts = torch.empty(small_partials(N * K, V, C, d, cfg), V * C, device=DEV)
            trials.append(
                dict(
                    name=f"r{rows}c{cols}w{warps}p{per}",
                    run=lambda cfg=cfg, parts=parts: table_gradient_small_raw(
                        d, ids, dt, parts, accumulate=False, config=cfg
                    ),
                    check=lambda: {"dt": rel(dt, ref)},
                    state=lambda: [dt.clone()],
                    outs=[dt],
                    bytes=N * K * C * 2,
                    limit=1e-5,
                )
            )
    else:
        ends = torch.empty(-(-N * K // 64), 2, C, device=DEV)

        def run(warps):
            dt.zero_()
            table_gradient_sorted_raw(d, ids, dt, ends, warps=warps)

        for warps in (4, 8):
            trials.append(
                dict(
                    name=f"w{warps} (+zero)",
                    run=lambda w=warps: run(w),
                    check=lambda: {"dt": rel(dt, ref)},
                    state=lambda: [dt.clone()],
                    outs=[dt],
                    bytes=N * K * C * 2,
                    limit=1e-5,
                )
            )
        trials.append(dict(name="torch sort alone", run=lambda: torch.sort(ids.flatten(), stable=True)))
        trials.append(dict(name="torch zero alone", run=lambda: dt.zero_()))
    trials.append(
        dict(name="torch", run=lambda: torch.ops.aten.embedding_dense_backward(d.view(N, K, C), ids, V, -1, False))
    )
    return trials


def dpos(B, T, C):
    import torch

    from ridgeline.ops.embedding.triton import position_gradient_raw

    d, out = rand(B, T, C), torch.zeros(T, C, device=DEV)
    return [
        dict(
            name="sums",
            run=lambda: position_gradient_raw(d, out, accumulate=False),
            check=lambda: {"dp": rel(out, d.double().sum(0))},
            state=lambda: [out.clone()],
            outs=[out],
            bytes=B * T * C * 2,
            limit=1e-5,
        ),
        dict(name="torch", run=lambda: d.sum(0)),
    ]


def optim(M):
    import torch

    from ridgeline.ops._triton.support import Launch
    from ridgeline.ops.optimizer.reference import AdamWSettings, AdamWState, adamw_reference
    from ridgeline.ops.optimizer.triton import adamw_raw, workspace

    w0, g0 = torch.randn(M, device=DEV), torch.randn(M, device=DEV)

    def make():
        def zeros(*n, **k):
            return torch.zeros(*n, device=DEV, **k)

        return AdamWState(
            w0.clone(),
            g0.clone(),
            zeros(M),
            zeros(M),
            zeros(M, dtype=torch.bfloat16),
            M // 2 // 128 * 128,
            torch.full((1,), 1e-3, device=DEV),
            zeros(2, dtype=torch.int64),
            zeros(1),
            zeros(2, dtype=torch.int64),
            zeros(64, 4),
            zeros(1),
        )

    S = AdamWSettings()
    ref = make()
    adamw_reference(ref, S)
    trials = []
    for plan, update in (
        ((2048, 8, 2), (1024, 4)),
        ((2048, 8, 4), (1024, 4)),
        ((4096, 8, 2), (1024, 4)),
        ((4096, 4, 4), (1024, 4)),
        ((2048, 8, 2), (512, 4)),
        ((2048, 8, 2), (2048, 8)),
        ((2048, 8, 2), (1024, 8)),
        ((2048, 8, 2), (2048, 4)),
    ):
        cp, cu = (
            Launch(rows=1, columns=plan[0], warps=plan[1], per_processor=plan[2]),
            Launch(rows=1, columns=update[0], warps=update[1]),
        )
        st, work = make(), workspace(w0.device)

        def run(st=st, work=work, cp=cp, cu=cu):
            adamw_raw(st, S, work, plan=cp, update=cu)

        def check(st=st):
            return {
                "step": rel(st.weights - w0, ref.weights - w0),
                "norm": rel(st.ring[:1], ref.ring[:1]),
                "count": abs(int(st.seed_step[1]) - 1) + int(st.skipped[0]),
            }

        def snapshot(st=st):
            out = [st.weights.clone(), st.ring.clone()]
            for a, b in zip(st, make()):
                if isinstance(a, torch.Tensor):
                    a.copy_(b)
            return out

        trials.append(
            dict(
                name=f"n{plan} u{update}".replace(", ", "/"),
                run=run,
                check=check,
                state=snapshot,
                bytes=M * 34 + M * 4 - M * 4,
                limit=1e-4,
            )
        )
    p = torch.nn.Parameter(w0.clone())
    p.grad = g0.clone()
    opt = torch.optim.AdamW([p], lr=1e-3, fused=True, capturable=True)

    def torch_step():
        torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True)
        opt.step()
        p.detach().bfloat16()

    trials.append(dict(name="torch one flat parameter", run=torch_step))
    return trials


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("--"):
        sys.path.insert(0, "src")
        child(sys.argv[1], sys.argv[2])
    else:
        parent([a for a in sys.argv[1:]] or list(GROUPS))
