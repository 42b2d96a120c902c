"""Plain attention (ops/attention/plain.py) on the GPU: builds, checks against float64, times beside what served before.

attn_plain_gpu.py [SHAPE ...], names as in SHAPES. Writes $OUT/attn_plain.json; ends itself after PLAIN_LIMIT seconds (60).
attn_plain_gpu.py checks [SHAPE ...], and later on that machine attn_plain_gpu.py times SECONDS [SHAPE ...]: in two parts.
"""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path
from typing import Any
sys.path.insert(0, str(Path(__file__).parent))
import attn_long_gpu as L

OUT = Path(os.environ.get("OUT", "/tmp")); ROOT = Path(__file__).resolve().parents[2]
LIMIT = float(os.environ.get("PLAIN_LIMIT", "60"))
# B, T, H, G, D, fp32
SHAPES = {
    "gpt2 T2048": (4, 2048, 8, 8, 32, 0), "fast T2048": (4, 2048, 8, 1, 32, 0), "gpt2 B32": (32, 256, 8, 8, 32, 0), "fast B32": (32, 256, 8, 1, 32, 0),
    "gpt2 B512": (512, 256, 8, 8, 32, 0), "fast B512": (512, 256, 8, 1, 32, 0), "124m": (64, 1024, 12, 12, 64, 0), "T512 D64": (32, 512, 8, 8, 64, 0),
    "T200": (3, 200, 4, 2, 32, 0), "T1111": (2, 1111, 4, 2, 64, 0), "T4096": (2, 4096, 4, 1, 32, 0),
}
TIMED = [n for n in SHAPES if n not in ("T200", "T1111", "T4096")]
# name: forward, queries, keys as (warpgroups, ring, blocks a multiprocessor, columns of a step); None for the package's
# "apart": at width 32 the backward pass in two kernels
TRIALS: dict = {
    32: {"main": None, "apart": ((4, 8, 1), (4, 8, 1, 32), (4, 8, 1, 32))},
    64: {"main": None, "three": ((3, 8, 1), (3, 5, 1), (3, 7, 1))},
}

def launches(D, name):
    from ridgeline.ops.attention import plain
    t = TRIALS[D][name]
    return plain.LAUNCHES[D] if t is None else plain.Launches(*(plain.Launch(*x) for x in t))

def build(job):
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.attention import hopper
    file, D, l, sums = job
    try:
        c = cuda.build(hopper.SOURCES / file, dict(HEAD_WIDTH=D, WARPGROUPS=l[0], RING_STAGES=l[1], BLOCKS_PER_PROCESSOR=l[2], RL_FP16=0, RL_COLUMN_SUMS=sums, STEP_COLUMNS=l[3]), "sm_90a")
        return file, D, tuple(l), *[tuple(v)[0:3:2] for v in c.resources().values()]
    except Exception as e: return file, D, tuple(l), str(e)[-200:]

class Plain:
    p: Any
    def __init__(s, shape, tensors, trial):
        import torch
        from ridgeline.ops.attention import plain
        s.p, s.l, s.main = plain, launches(shape[4], trial), trial == "main"; s.q, s.k, s.v, s.do = tensors; B, T, H, G, D, _ = shape; s.scale = D ** -0.5
        nan = lambda *a, dt=torch.bfloat16: torch.full(a, float("nan"), device="cuda", dtype=dt)
        s.o, s.lse, s.d = nan(B, T, H, D), nan(B, H, T, dt=torch.float32), nan(B, T, (H + 2 * G) * D)
        s.g = [x.unflatten(-1, (-1, D)) for x in s.d.split((H * D, G * D, G * D), -1)]
    def fwd(s): s.p.forward(s.q, s.k, s.v, s.o, s.lse, scale=s.scale, launches=s.l)
    def sums(s):
        """Relative error of the column sums, with the package's launches."""
        import torch
        sums = torch.full((s.p.column_sum_rows(s.q, s.k), s.d.shape[-1]), float("nan"), device="cuda")
        s.p.backward(s.do, s.q, s.k, s.v, s.o, s.lse, *s.g, scale=s.scale, column_sums=sums)
        return L.error(sums.sum(0), s.d.double().sum((0, 1)))
    def bwd(s, without=()):
        class Nothing:
            def launch(s, *a): pass
        real = s.p._kernel; s.p._kernel = lambda n, *a: Nothing() if n in without else real(n, *a)
        try: s.p.backward(s.do, s.q, s.k, s.v, s.o, s.lse, *s.g, scale=s.scale, launches=None if s.main else s.l)
        finally: s.p._kernel = real

class Before:
    """What serves such shapes without these kernels."""
    def __init__(s, shape, tensors):
        import torch
        from ridgeline.ops.attention import short
        B, T, H, G, D, _ = shape; s.short = T <= 256; s.drop = short.dropping(0.0, None, 0); s.scale = D ** -0.5
        s.q, s.k, s.v, s.do = tensors; s.o, s.lse = torch.empty(B, T, H, D, device="cuda", dtype=torch.bfloat16), torch.empty(B, H, T, device="cuda")
        s.g = [x.unflatten(-1, (-1, D)) for x in torch.empty(B, T, (H + 2 * G) * D, device="cuda", dtype=torch.bfloat16).split((H * D, G * D, G * D), -1)]
        if s.short: s.m, s.w = short, torch.empty(short.workspace_size(s.q, s.k, None), device="cuda")
        else:
            from ridgeline.ops.attention import long
            s.m = long
    def fwd(s): s.m.forward(s.q, s.k, s.v, None, s.o, s.lse, scale=s.scale, drop=s.drop)
    def bwd(s): s.m.backward(s.do, s.q, s.k, s.v, None, s.o, s.lse, *s.g, None, *([s.w] if s.short else []), scale=s.scale, drop=s.drop)

def sdpa(shape, tensors):
    """PyTorch's flash attention in the same storage, as the yardstick of errors."""
    import torch, torch.nn.functional as F
    q, k, v, do = tensors; n = q.shape[2] // k.shape[2]
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(*(t.repeat_interleave(n, 2).transpose(1, 2) if i and n > 1 else t.transpose(1, 2) for i, t in enumerate(x)), is_causal=True).transpose(1, 2)
        return o.detach(), *torch.autograd.grad(o, x, do)

def check(names):
    import torch
    for n in names:
        shape = SHAPES[n]; B, T, H, G, D, _ = shape
        shape = (min(B, 8), *shape[1:]) if T > 256 or B > 64 else shape
        if n in ("fast B512", "gpt2 B512"): shape = (300 if G == 1 else 90, *shape[1:])  # several rounds and passes, one part
        tensors = L.make(shape); ref, share = L.reference(*tensors); yard = L.errors(ref, share, *sdpa(shape, tensors))
        for trial in TRIALS[D]:
            try:
                us = Plain(shape, tensors, trial); us.fwd(); us.bwd(); torch.cuda.synchronize(); first = us.o.clone(), us.d.clone(), us.lse.clone()
                e = L.errors(ref, share, us.o, *us.g); bad = [k for k in e if not e[k] <= 1.5 * yard[k]]
                finite = all(bool(torch.isfinite(x.float()).all()) for x in first)
                for _ in range(3): us.fwd(); us.bwd()
                torch.cuda.synchronize(); same = torch.equal(first[0], us.o) and torch.equal(first[1], us.d) and torch.equal(first[2], us.lse)
                print("RESULT " + json.dumps(["check", n, trial, "ok" if not bad and finite and same else "BAD", round(max(e[k] / yard[k] for k in e), 2), f"sums {us.sums()}" if trial == "main" else "", e if bad else "", "" if same else "not repeatable", "" if finite else "not finite"]), flush=True)
            except Exception as x: print("RESULT " + json.dumps(["check", n, trial, "FAILED", repr(x)[:200]]), flush=True)
        del tensors, ref

BAD = Path("/tmp/attn_plain_bad.json")  # (shape, trial) without a check passed

def timings(names, skip, before=True, seconds=1e9):
    import torch
    t0 = time.time()
    def graph(f, calls):
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(calls): f()
        return g.replay
    def us(replay, calls, n=5):
        ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / calls)
        return sorted(ts)[n // 2]
    for n in names:
        if time.time() - t0 > seconds: break
        shape = SHAPES[n]; tensors = L.make(shape); calls = 20 if shape[0] * shape[1] < 20000 else 4; runs = {}; keep = []
        for trial in [t for t in TRIALS[shape[4]] if (n, t) not in skip] + ["before"] * before:
            try:
                o = Before(shape, tensors) if trial == "before" else Plain(shape, tensors, trial); o.fwd(); o.bwd(); keep.append(o)
                runs[trial] = [graph(o.fwd, calls), graph(o.bwd, calls)]
                if trial != "before": runs[trial] += [graph(lambda o=o: o.bwd(("plain_keys",)), calls), graph(lambda o=o: o.bwd(("plain_queries",)), calls)]
            except Exception as x: print("RESULT " + json.dumps(["time", n, trial, repr(x)[:200]]), flush=True)
        got = {t: [[] for _ in r] for t, r in runs.items()}
        for turn in range(5):
            for t in (list(runs) if turn % 2 == 0 else list(runs)[::-1]):
                for k, r in enumerate(runs[t]): got[t][k].append(us(r, calls))
        for t, v in got.items(): print("RESULT " + json.dumps(["time", n, t, [round(sorted(x)[2], 1) for x in v]]), flush=True)
        del runs, keep, tensors; torch.cuda.empty_cache()

def sub(args, timeout):
    try:
        p = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        lines, err = p.stdout, (p.stderr.strip().splitlines() or ["?"])[-1][:300] if p.returncode else ""
    except subprocess.TimeoutExpired as e: lines, err = (e.stdout or b"").decode(), "TIMEOUT"
    return [json.loads(l[7:]) for l in lines.splitlines() if l.startswith("RESULT ")], err

def main(names, times=True):
    t0 = time.time(); left = lambda: max(5.0, LIMIT - (time.time() - t0)); report = []
    Ds = {SHAPES[n][4] for n in names}
    jobs = {(f"plain_{k}.cu", D, tuple(getattr(launches(D, t), k)), s) for D in Ds for t in TRIALS[D] for k in ("forward", "queries", "keys") for s in ((0, 1) if t == "main" and k != "forward" else (0,))}
    with cf.ProcessPoolExecutor(10) as pool: built = list(pool.map(build, sorted(jobs)))
    print("built %d in %.0f s" % (len(built), time.time() - t0), *built, sep="\n  ", flush=True)
    lines, err = sub(["check", *names], min(left(), 45)); report += lines
    for l in lines: print(*l, flush=True)
    if err: print("check:", err, flush=True)
    bad = {(n, t) for n in names for t in TRIALS[SHAPES[n][4]]} - {(l[1], l[2]) for l in lines if l[3] == "ok"}
    BAD.write_text(json.dumps(sorted(bad)))
    if not times: return print("all %.0f s, without a check passed:" % (time.time() - t0), sorted(bad))
    lines, err = sub(["time", json.dumps(sorted(bad)), *[n for n in names if n in TIMED]], left()); report += lines
    print("us: forward | backward | queries alone | keys alone (and their sum)")
    for l in lines: print(*l, flush=True)
    if err: print("time:", err)
    (OUT / "attn_plain.json").write_text(json.dumps([built, report])); print("all %.0f s" % (time.time() - t0))

if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]: check(sys.argv[2:])
    elif sys.argv[1:2] == ["time"]: timings(sys.argv[3:], {tuple(x) for x in json.loads(sys.argv[2])})
    elif sys.argv[1:2] == ["checks"]: main(sys.argv[2:] or list(SHAPES), times=False)
    elif sys.argv[1:2] == ["times"]: timings(sys.argv[3:] or TIMED, {tuple(x) for x in json.loads(BAD.read_text())}, before=False, seconds=float(sys.argv[2]))
    else: main(sys.argv[1:] or list(SHAPES))
