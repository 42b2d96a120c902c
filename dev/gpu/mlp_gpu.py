"""GPU bring-up of ops/mlp: PYTHONPATH=src python3 dev/gpu/mlp_gpu.py   (<= 70 s; MLP_LIMIT seconds)

Predictions: forward 8192: 18 us, backward 24 us; 131072: 200 and 300 us (separate ~437 and ~500).
Checks run in parallel children (a hang kills that child only), then timings one child at a time.
"""

import json
import os
import subprocess
import sys
import time

T0 = time.time()
LIMIT = float(os.environ.get("MLP_LIMIT", "48"))
OUT = os.environ.get("OUT", "/tmp")
os.environ["RIDGELINE_CACHE"] = os.path.abspath("dev/gpu/mlp_cache")
CONFIGS = [(1,), (2,)]
# name: C, F, norm, gelu, bias, p, K of project forward, K of project backward
MODELS = {
    "gpt2": (256, 1024, "layernorm", "tanh", True, 0.0, 256, 768),
    "fast": (256, 512, "rmsnorm", "tanh", False, 0.0, 256, 320),
    "hal5m": (256, 1024, "layernorm", "exact", True, 0.2, 256, 768),
    "odd": (128, 448, "layernorm", "exact", True, 0.2, 200, 328),
}


def setup():
    sys.path.insert(0, "src")
    import torch

    torch.manual_seed(0)
    return torch


class Case:
    """Operands of one model at N rows, T a sample; kernels into NaN-poisoned buffers; references."""

    def __init__(self, torch, model, N, T, config, seed=0, dtype=None):
        from ridgeline.ops.dropout import DropoutState
        from ridgeline.ops.linear.reference import Masks
        from ridgeline.ops.mlp import kernels as K

        self.torch, self.K, self.N, self.T = torch, K, N, T
        self.C, self.F, self.norm, self.gelu, self.bias, self.p, self.Kf, self.Kb = MODELS[model]
        self.config = config
        dev = torch.device("cuda")
        g = torch.Generator(dev).manual_seed(seed)
        self.dt = dt = dtype or torch.bfloat16
        rnd = lambda *s, scale=1.0, shift=0.0: (torch.randn(*s, device=dev, generator=g) * scale + shift).to(dt)
        C, F = self.C, self.F
        nan = lambda *s, t=dt: torch.full(s, float("nan"), device=dev, dtype=t)
        f32 = torch.float32
        self.up, self.down = rnd(F, C, scale=C**-0.5), rnd(C, F, scale=F**-0.5)
        self.out, self.qkv = rnd(C, self.Kf, scale=self.Kf**-0.5), rnd(self.Kb, C, scale=C**-0.5)
        self.up_b, self.down_b = (rnd(F, scale=0.5), rnd(C, scale=0.5)) if self.bias else (None, None)
        ln = self.norm == "layernorm"
        self.w, self.b = rnd(C, scale=0.2, shift=1.0), rnd(C, scale=0.2) if ln and self.bias else None
        self.h, self.res, self.x, self.dy = rnd(N, C), rnd(N, C), rnd(N, self.Kf), rnd(N, self.Kb)
        self.dz, self.dres = rnd(N, C), rnd(N, C)
        self.state = DropoutState(torch.tensor([1234567890123, 42], device=dev), 7)
        self.drop = Masks(self.p, self.state, 3, T) if self.p else None
        self.r, self.h2, self.mean, self.rstd = nan(N, C), nan(N, C), nan(N, t=f32) if ln else None, nan(N, t=f32)
        self.kept = nan(*K.kept_shape(N, F))
        self.a, self.du = nan(N, F), nan(N, F)
        self.dr, self.dbranch = nan(N, C), nan(N, C) if self.p else None
        self.sums = 1 + (self.b is not None) + (self.down_b is not None)
        cfg = K.Config(config[0])
        self.cfg = cfg
        self.partials = nan(K.partial_rows(N, cfg), self.sums * C, t=f32)
        self.du_sums = nan(K.inner_partial_rows(N, cfg), F, t=f32) if self.bias else None
        # the statistics of the residual as the join before would have left them
        x = self.res.float()
        self.mean0 = x.mean(1) if ln else None
        xc = x - self.mean0[:, None] if ln else x
        self.rstd0 = (xc.square().mean(1) + 1e-5).rsqrt()
        self.join = K.Join(
            self.norm, 1e-5, self.w, self.b, self.down_b, self.res, self.r, self.h2, self.mean, self.rstd, self.drop
        )
        self.grad = K.JoinGradient(
            self.norm,
            self.w,
            self.res,
            self.mean0,
            self.rstd0,
            self.dres,
            self.dr,
            self.dbranch,
            self.partials,
            self.b is not None,
            self.down_b is not None,
            self.drop,
        )

    def forward(self):
        self.K.mlp_forward_raw(
            self.h,
            self.up,
            self.up_b,
            self.down,
            self.kept,
            self.join,
            gelu=self.gelu,
            config=self.cfg,
        )

    def backward(self):
        self.K.mlp_backward_raw(
            self.dz,
            self.up,
            self.down,
            self.kept,
            self.a,
            self.du,
            self.du_sums,
            self.grad,
            gelu=self.gelu,
            config=self.cfg,
        )

    def pforward(self):
        self.K.project_forward_raw(self.x, self.out, self.join, config=self.cfg)

    def pbackward(self):
        self.K.project_backward_raw(self.dy, self.qkv, self.grad, config=self.cfg)

    def poison(self):
        for t in (
            self.r,
            self.h2,
            self.mean,
            self.rstd,
            self.a,
            self.du,
            self.dr,
            self.dbranch,
            self.partials,
            self.du_sums,
        ):
            if t is not None:
                t.fill_(float("nan"))

    # ---- references, dtype d
    def keep(self):
        from ridgeline.ops.dropout import hidden_keep, quantise

        B = -(-self.N // self.T)
        k = hidden_keep(self.state, 3, (B, self.T, self.C), self.p, self.h.device).view(-1, self.C)[: self.N]
        return k, quantise(self.p)[1]

    def dropped(self, y):
        if not self.p:
            return y
        k, s = self.keep()
        return self.torch.where(k, y * s, self.torch.zeros_like(y))

    def normed(self, r, w, b):
        Fn = self.torch.nn.functional
        if self.norm == "layernorm":
            return Fn.layer_norm(r, (self.C,), w, b, 1e-5)
        return Fn.rms_norm(r, (self.C,), w, 1e-5)

    def act(self, u):
        return self.torch.nn.functional.gelu(u, approximate="tanh" if self.gelu == "tanh" else "none")

    def ref_join(self, y, d):
        t = lambda x: None if x is None else x.to(d)
        if self.down_b is not None:
            y = y + t(self.down_b)
        r = t(self.res) + self.dropped(y)
        return {"r": r, "h": self.normed(r, t(self.w), t(self.b))}

    def ref_forward(self, d):
        t = lambda x: None if x is None else x.to(d)
        u = self.torch.nn.functional.linear(t(self.h), t(self.up), t(self.up_b))
        return self.ref_join(self.act(u) @ t(self.down).t(), d)

    def ref_pforward(self, d):
        return self.ref_join(self.x.to(d) @ self.out.to(d).t(), d)

    def ref_grad(self, dh, d):
        torch = self.torch
        r = self.res.to(d).requires_grad_()
        w = self.w.to(d).requires_grad_()
        b = None if self.b is None else self.b.to(d).requires_grad_()
        h = self.normed(r, w, b)
        gs = torch.autograd.grad(h, [r, w] + ([b] if b is not None else []), dh)
        dr = gs[0] + self.dres.to(d)
        out = {"dr": dr, "dweight": gs[1]}
        if b is not None:
            out["dbias"] = gs[2]
        db = self.dropped(dr)
        if self.p:
            out["dbranch"] = db
        if self.down_b is not None:
            out["dbranch_bias"] = db.sum(0)
        return out

    def ref_backward(self, d):
        torch = self.torch
        t = lambda x: None if x is None else x.to(d)
        u = torch.nn.functional.linear(t(self.h), t(self.up), t(self.up_b)).detach().requires_grad_()
        a = self.act(u)
        da = t(self.dz) @ t(self.down)
        (du,) = torch.autograd.grad(a, u, da)
        out = {"a": a.detach(), "du": du, **self.ref_grad(du @ t(self.up), d)}
        if self.bias:
            out["dup_bias"] = du.sum(0)
        out["dWdown"] = t(self.dz).t() @ out["a"]
        out["dWup"] = du.t() @ t(self.h)
        return out

    def ref_pbackward(self, d):
        return self.ref_grad(self.dy.to(d) @ self.qkv.to(d), d)

    def got_join(self):
        return {"r": self.r, "h": self.h2, "mean": self.mean, "rstd": self.rstd}

    def got_grad(self):
        s = list(self.partials.double().sum(0).split(self.C))
        out = {"dr": self.dr, "dweight": s.pop(0)}
        if self.b is not None:
            out["dbias"] = s.pop(0)
        if self.p:
            out["dbranch"] = self.dbranch
        if self.down_b is not None:
            out["dbranch_bias"] = s.pop(0)
        return out

    def got_backward(self):
        out = {"a": self.a, "du": self.du, **self.got_grad()}
        if self.bias:
            out["dup_bias"] = self.du_sums.double().sum(0)
        out["dWdown"] = self.dz.t() @ self.a
        out["dWup"] = self.du.t() @ self.h
        return out


def say(**k):
    print("@" + json.dumps(k), flush=True)


def diagnose(torch, got, ref):
    bad = ((got.double() - ref).abs() > 0.05 * (1 + ref.abs())) | ~torch.isfinite(got)
    if not bad.any():
        return "no element far off"
    i = bad.nonzero()
    s = f"bad {len(i)}/{bad.numel()} nan {int((~torch.isfinite(got)).sum())} first {i[0].tolist()} got {got[tuple(i[0])].item():.4g} want {ref[tuple(i[0])].item():.4g}"
    if got.dim() == 2:
        rows, cols = sorted(set(i[:, 0].tolist())), sorted(set(i[:, 1].tolist()))
        s += f" rows {len(rows)} mod128 {sorted(set(r % 128 for r in rows))[:12]} cols {len(cols)} {cols[:12]} mod64 {sorted(set(c % 64 for c in cols))[:12]}"
    return s


def check(config):
    torch = setup()
    rel = lambda a, r: ((a.double() - r).norm() / (r.norm() + 1e-30)).item()
    for model, N, T in (
        ("gpt2", 64, 64),
        ("gpt2", 200, 100),
        ("odd", 200, 100),
        ("hal5m", 8192, 128),
        ("fast", 200, 50),
        ("gpt2", 33000, 256),
    ):
        if MODELS[model][1] <= 128 and config[0] == 2:
            continue
        c = Case(torch, model, N, T, config, seed=N)
        for name in ("pforward", "pbackward", "forward", "backward"):
            if N > 30000 and name[0] == "p":
                continue
            run = getattr(c, name)
            try:
                c.poison()
                run()
                torch.cuda.synchronize()
                get = c.got_join if "forward" in name else c.got_backward if name == "backward" else c.got_grad
                got = {k: v.clone() for k, v in get().items() if v is not None}
                if name == "backward":
                    got["kept"] = c.kept
                ref = getattr(c, "ref_" + name)(torch.float64)
                plain = getattr(c, "ref_" + name)(c.dt)
                worst, note, ok = 0.0, "", True
                for k, r in ref.items():
                    fin = bool(torch.isfinite(got[k]).all())
                    e, ep = rel(got[k], r), rel(plain[k], r)
                    ratio = e / max(ep, 1e-9)
                    if not fin or not (ratio <= 1.5 or e < 1e-5):
                        ok = False
                        if not note:
                            note = f"{k}: err {e:.2e} torch {ep:.2e} {diagnose(torch, got[k], r)}"
                        else:
                            note += f" | {k} {e:.1e}/{ep:.1e}"
                    worst = max(worst, ratio)
                if "mean" in got:
                    r = got["r"].float()
                    ok &= rel(got["mean"], r.double().mean(1)) < 1e-3
                first = {k: v.clone() for k, v in got.items()}
                c.poison()
                run()
                torch.cuda.synchronize()
                again = get()
                same = all(bool((again[k] == first[k]).all()) for k in again if again[k] is not None)
                say(
                    check=name,
                    model=model,
                    N=N,
                    config=config,
                    ok=ok and same,
                    ratio=round(worst, 3),
                    same=same,
                    note=note,
                )
            except Exception as x:
                say(check=name, model=model, N=N, config=config, ok=False, note=repr(x)[:300])
                if "CUDA" in repr(x) or "launch" in repr(x) or "cu" in repr(x)[:20]:
                    raise


def timer(torch, fns, reps=20):
    """us a call inside one graph; fns rotate over buffers."""
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for f in fns:
            f()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for i in range(reps):
                fns[i % len(fns)]()
        for _ in range(3):
            g.replay()
        times = []
        for _ in range(9):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(s)
            g.replay()
            b.record(s)
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / reps)
    times.sort()
    return times[len(times) // 2]


class Separate:
    """The same with the vendor's GEMMs and the Triton passes."""

    def __init__(self, c):
        self.c, torch = c, c.torch
        self.u, self.y = torch.empty_like(c.a), torch.empty_like(c.h)
        self.u.normal_()
        from ridgeline.ops.activation import triton as act
        from ridgeline.ops.norm import triton as norm

        self.nm, self.ac = norm, act
        rows = norm.partial_rows(c.N, c.C, c.h)
        self.part = torch.empty(rows, c.sums * c.C, device="cuda")
        self.dpart = torch.empty(act.partial_rows(c.N, c.F, c.h), c.F, device="cuda") if c.bias else None
        self.kw = dict(T=c.T, p=c.p, dropout=c.state if c.p else None, site=3)

    def join(self):
        c = self.c
        self.nm.norm_forward_raw(
            self.y,
            c.w,
            c.b,
            c.h2,
            c.mean,
            c.rstd,
            eps=1e-5,
            kind=c.norm,
            r_NC=c.r,
            residual_NC=c.res,
            branch_bias_C=c.down_b,
            **self.kw,
        )

    def forward(self):
        c, mm = self.c, self.c.torch.mm
        mm(c.h, c.up.t(), out=self.u)
        self.ac.bias_gelu_forward_raw(self.u, c.up_b, c.a, kind=c.gelu)
        mm(c.a, c.down.t(), out=self.y)
        self.join()

    def unjoin(self):
        c = self.c
        self.nm.norm_backward_raw(
            self.y,
            c.res,
            c.w,
            c.mean0,
            c.rstd0,
            self.part,
            kind=c.norm,
            bias=c.b is not None,
            branch_bias=c.down_b is not None,
            dresidual_NC=c.dres,
            dr_NC=c.dr,
            dbranch_NC=c.dbranch,
            **self.kw,
        )

    def backward(self):
        c, mm = self.c, self.c.torch.mm
        mm(c.dz, c.down, out=c.du)
        self.ac.bias_gelu_backward_raw(c.du, self.u, c.up_b, c.du, self.dpart, kind=c.gelu)
        mm(c.du, c.up, out=self.y)
        self.unjoin()

    def pforward(self):
        self.c.torch.mm(self.c.x, self.c.out.t(), out=self.y)
        self.join()

    def pbackward(self):
        self.c.torch.mm(self.c.dy, self.c.qkv, out=self.y)
        self.unjoin()


def times(specs):
    torch = setup()
    for spec in specs:
        times_of(torch, *spec)


def times_of(torch, model, N, kinds):
    sets = 4 if N <= 8192 else 1
    reps = 24 if N <= 8192 else 6
    for name in kinds:
        row = {}
        try:
            cs = [Case(torch, model, N, 256, (1,), seed=i) for i in range(sets)]
            for c in cs:
                c.forward()
            ss = [Separate(c) for c in cs]
            row["separate"] = round(timer(torch, [getattr(s, name) for s in ss], reps), 1)
            if name == "backward":
                row["wgrads"] = round(timer(torch, [lambda c=c: (c.dz.t() @ c.a, c.du.t() @ c.h) for c in cs], reps), 1)
            del ss, cs
        except Exception as x:
            row["separate_error"] = repr(x)[:200]
        say(time=name, model=model, N=N, **row)
        for config in [(1,), *([(2,)] if N < 65536 else [])]:
            try:
                cs = [Case(torch, model, N, 256, config, seed=i) for i in range(sets)]
                for c in cs:
                    c.kept.normal_()
                us = timer(torch, [getattr(c, name) for c in cs], reps)
                say(time=name, model=model, N=N, config=config, us=round(us, 1))
            except Exception as x:
                say(time=name, model=model, N=N, config=config, note=repr(x)[:200])
                if "CUDA" in repr(x):
                    raise
            cs = None


def prewarm():
    """Compile everything the children will ask for, in parallel."""
    torch = setup()
    from concurrent.futures import ThreadPoolExecutor

    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.mlp import kernels as K

    jobs = []
    for model, (C, F, norm, gelu, bias, p, _, _) in MODELS.items():
        for (split,) in CONFIGS:
            cfg = K.Config(split)
            nb = int(norm == "layernorm" and bias)
            base = dict(RMS=int(norm == "rmsnorm"), DROPOUT=int(p > 0), RESIDUAL=1, NORM_BIAS=nb, BRANCH_BIAS=int(bias))
            sums = 1 + nb + int(bias)
            f = lambda part, **k: K.tile_macros(C, torch.bfloat16, K.fitted(part, C, cfg, F, **k))
            g = dict(GELU_TANH=int(gelu == "tanh"), UP_BIAS=int(bias))
            jobs.append(("forward.cu", {**f("mlp_forward"), **base, **g}))
            jobs.append(("backward.cu", {**f("mlp_backward", sums=sums, up_bias=bias), **base, **g}))
            jobs.append(("project.cu", {**f("project_forward"), **base, "BACKWARD": 0}))
            jobs.append(("project.cu", {**f("project_backward", sums=sums), **base, "BACKWARD": 1}))
    jobs.sort(key=lambda j: j[0])
    t = time.time()
    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(lambda j: cuda.build(K.FOLDER / j[0], j[1], "sm_90a"), jobs))
    worst = max(r.spill_stores for c in cubins for r in c.resources().values())
    serial = sum("serialized" in c.log for c in cubins)
    print(f"prewarm {len(jobs)} in {time.time() - t:.1f}s, worst spill {worst} B, serialized {serial}", flush=True)


def child(args, seconds):
    return subprocess.Popen(
        [sys.executable, __file__, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ), time.time() + seconds


def finish(proc, until, rows, label):
    try:
        out, _ = proc.communicate(timeout=max(1, until - time.time()))
    except subprocess.TimeoutExpired:
        proc.kill()
        out, _ = proc.communicate()
        out += f"\nTIMEOUT {label}"
    got = [json.loads(l[1:]) for l in out.splitlines() if l.startswith("@")]
    rows += got
    rest = [l for l in out.splitlines() if not l.startswith("@") and l.strip()]
    if proc.returncode or "TIMEOUT" in out:
        print(f"[{label}] rc {proc.returncode}", *[l[:300] for l in rest[-6:]], sep="\n  ", flush=True)
    return got


def main():
    rows = []
    left = lambda: LIMIT - (time.time() - T0)
    p, until = child(["prewarm"], 40)
    out = p.communicate(timeout=60)[0]
    print(out.strip()[-600:], flush=True)
    only = os.environ.get("MLP_ONLY", "check,time").split(",")
    if "check" in only:
        procs = [(child(["check", *map(str, c)], 30), f"check {c}") for c in CONFIGS]
        for (proc, until), label in procs:
            for r in finish(proc, min(until, time.time() + left()), rows, label):
                if not r.get("ok"):
                    print("  FAIL", json.dumps(r)[:420], flush=True)
        checks = [r for r in rows if "check" in r]
        print(
            f"checks ok {sum(bool(r['ok']) for r in checks)}/{len(checks)}; worst ratio by kernel",
            {
                k: max((r.get("ratio", 0) for r in checks if r["check"] == k and r["ok"]), default=None)
                for k in ("pforward", "pbackward", "forward", "backward")
            },
            f"t={time.time() - T0:.0f}s",
            flush=True,
        )
    ALL = ["forward", "backward", "pforward", "pbackward"]
    if "time" in only:
        for specs in ([("gpt2", 8192, ALL), ("fast", 8192, ALL)], [("gpt2", 131072, ALL), ("hal5m", 65536, ALL)]):
            if left() < 5:
                print("out of time before", specs)
                continue
            proc, until = child(["time", json.dumps(specs)], min(25, left()))
            got = finish(proc, until, rows, f"time {specs[0][:2]}")
            for spec in specs:
                for name in spec[2]:
                    mine = [r for r in got if r["time"] == name and (r["model"], r["N"]) == spec[:2]]
                    print(
                        f"{spec[0]:6}{spec[1]:7} {name:10}",
                        " ".join(
                            f"{k} {r[k]}"
                            for r in mine
                            for k in ("separate", "wgrads", "separate_error", "note")
                            if k in r
                        ),
                        "|",
                        "  ".join(f"{''.join(map(str, r['config']))}:{r['us']}" for r in mine if "us" in r),
                        flush=True,
                    )
    json.dump(rows, open(os.path.join(OUT, "mlp.json"), "w"))
    print(f"{time.time() - T0:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "prewarm":
        prewarm()
    elif sys.argv[1] == "check":
        check((int(sys.argv[2]),))
    else:
        times(json.loads(sys.argv[2]))
