"""Short-window attention on the GPU: builds in parallel, checks in subprocesses, times. Writes $OUT/attn.json."""
import concurrent.futures as cf, json, os, subprocess, sys, time, types
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp")); ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("OMP_NUM_THREADS", "2")
# name: B, T, H, G, D, relative, p, table rows, fp16
CASES = {
    "hal20": (2, 256, 8, 8, 64, 1, 0.2, 256, 0), "hal20p0": (2, 256, 8, 8, 64, 1, 0.0, 300, 0),
    "hal5": (3, 128, 4, 4, 64, 1, 0.2, 256, 0), "plain64": (2, 256, 4, 4, 64, 0, 0.0, 0, 0),
    "plain64d": (2, 256, 4, 4, 64, 0, 0.1, 0, 0), "c256": (2, 256, 8, 8, 32, 0, 0.0, 0, 0),
    "mqa": (2, 256, 8, 1, 32, 0, 0.0, 0, 0), "gqa64": (2, 200, 8, 2, 64, 1, 0.2, 512, 0),
    "t16": (3, 16, 2, 2, 64, 1, 0.2, 16, 0), "t100": (2, 100, 4, 4, 64, 1, 0.2, 128, 0),
    "t177": (2, 177, 4, 4, 64, 1, 0.2, 177, 0), "t37d32": (2, 37, 4, 4, 32, 1, 0.3, 64, 0),
    "t256d32r": (2, 256, 4, 4, 32, 1, 0.2, 256, 0), "fp16": (2, 256, 4, 4, 64, 1, 0.2, 256, 1), "steep": (2, 256, 4, 4, 64, 1, 0.2, 256, 0), "steep16": (2, 256, 4, 4, 64, 0, 0.0, 0, 1), "mqablock": (400, 256, 4, 1, 32, 0, 0.0, 0, 0),
}
LARGE = ("big", (64, 256, 8, 8, 64, 1, 0.2, 256, 0))
TIMES = {
    "HAL-20M p=.2": (512, 256, 8, 8, 64, 1, 0.2, 256, 0), "HAL-20M p=0": (512, 256, 8, 8, 64, 1, 0.0, 256, 0),
    "plain D64": (512, 256, 8, 8, 64, 0, 0.0, 0, 0), "HAL-5M": (512, 128, 4, 4, 64, 1, 0.2, 256, 0),
    "c256 B32": (32, 256, 8, 8, 32, 0, 0.0, 0, 0), "c256 mqa B32": (32, 256, 8, 1, 32, 0, 0.0, 0, 0),
    "c256 B512": (512, 256, 8, 8, 32, 0, 0.0, 0, 0), "c256 mqa B512": (512, 256, 8, 1, 32, 0, 0.0, 0, 0),
}

def configs():
    out = set()
    for B, T, H, G, D, rel, p, R, h in [*CASES.values(), LARGE[1], *TIMES.values()]:
        base = dict(HEAD_WIDTH=D, ROW_BLOCKS=-(-T // 64), RL_RELATIVE=rel, RL_DROPOUT=int(p > 0), RL_FP16=h)
        out.add(("forward.cu", tuple((base | dict(WARPGROUPS=3)).items()))); [out.add(("backward.cu", tuple((base | dict(RL_GROUPED=0 if G == H else 2 if (D == 32 or T <= 128) and B * G >= 396 else 1, RL_COLUMN_SUMS=c)).items()))) for c in (0, 1)]
        out.add(("reduce.cu", (("HEAD_WIDTH", D), ("RL_FP16", h))))
    return sorted(out)

def build(job):
    from ridgeline.ops import _cuda as cuda
    t = time.time()
    try:
        path = ROOT / "src/ridgeline/ops/attention/cuda" / job[0]
        c = cuda.build(path, dict(job[1]), "sm_90a")
        return job[0], dict(job[1]), round(time.time() - t, 1), {k: tuple(v) for k, v in c.resources().items()}
    except Exception as e:
        return job[0], dict(job[1]), -1, str(e)[:500]

def make(case, seed=0):
    import torch
    B, T, H, G, D, rel, p, R, h = case
    g = torch.Generator("cuda").manual_seed(seed); dt = torch.float16 if h else torch.bfloat16
    qkv = torch.randn(B, T, (H + 2 * G) * D, device="cuda", generator=g).to(dt)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in qkv.split((H * D, G * D, G * D), -1))
    table = (torch.randn(R, D, device="cuda", generator=g) * 0.5).to(dt) if rel else None
    do = torch.randn(B, T, H, D, device="cuda", generator=g).to(dt)
    return q, k, v, table, do

def state(p):
    import torch
    from ridgeline.ops.dropout import DropoutState
    return DropoutState(torch.tensor([1234567890123, 77], device="cuda"), 5) if p > 0 else None

def short_module(folder=None):
    """The package's ops/attention/short.py, or that of another folder with a cuda/ beside it."""
    if not folder:
        from ridgeline.ops.attention import short
        return short
    import importlib.util
    name = "short_of_" + Path(folder).name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(folder) / "short.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
        vars(module)["hopper"] = types.SimpleNamespace(**vars(module.hopper) | {"SOURCES": Path(folder) / "cuda"})
    return sys.modules[name]

class Ours:
    def __init__(self, case, tensors, folder=os.environ.get("ATTN_FOLDER")):
        import torch
        short = short_module(folder)
        self.s = short; self.q, self.k, self.v, self.table, self.do = tensors
        B, T, H, G, D, rel, p, R, h = case; self.scale = D ** -0.5
        self.drop = short.dropping(p, state(p), 3)
        e = lambda *a, dt=self.q.dtype: torch.full(a, float("nan"), device="cuda", dtype=dt)
        self.o, self.lse = e(B, T, H, D), e(B, H, T, dt=torch.float32)
        d = e(B, T, (H + 2 * G) * D); self.dq, self.dk, self.dv = (x.unflatten(-1, (-1, D)) for x in d.split((H * D, G * D, G * D), -1)); self.d = d
        self.dt = e(R, D, dt=torch.float32) if rel else None
        self.sums = e(short.column_sum_rows(self.q), (H + 2 * G) * D, dt=torch.float32)
        self.w = e(short.workspace_size(self.q, self.k, self.table), dt=torch.float32)
    def poison(self):
        for x in (self.o, self.lse, self.d, self.dt, self.w, self.sums):
            if x is not None: x.fill_(float("nan"))
    def fwd(self): self.s.forward(self.q, self.k, self.v, self.table, self.o, self.lse, scale=self.scale, drop=self.drop)
    def bwd(self, sums=False): self.s.backward(self.do, self.q, self.k, self.v, self.table, self.o, self.lse, self.dq, self.dk, self.dv, self.dt, self.w, scale=self.scale, drop=self.drop, **(dict(column_sums=self.sums) if sums else {}))
    def out(self): return dict(o=self.o, lse=self.lse)
    def grads(self): return dict(dq=self.dq, dk=self.dk, dv=self.dv, db=self.sums.sum(0)) | ({"dE": self.dt} if self.dt is not None else {})

def reference(case, tensors, dtype):
    import torch
    from ridgeline.ops.attention.reference import attention_reference, skew
    B, T, H, G, D, rel, p, R, h = case
    q, k, v, table, do = (None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors)
    o = attention_reference(q, k, v, table, scale=D ** -0.5, p=p, dropout=state(p), site=3)
    gr = torch.autograd.grad(o, [x for x in (q, k, v, table) if x is not None], do.detach())
    s = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(H // G, 1).transpose(-1, -2)
    if rel: s = s + skew(q.transpose(1, 2) @ table[-T:].t())
    s = (s * D ** -0.5).masked_fill(torch.ones(T, T, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
    r = dict(o=o.detach(), lse=s.logsumexp(-1).detach(), dq=gr[0], dk=gr[1], dv=gr[2], db=torch.cat([x.sum((0, 1)).flatten() for x in gr[:3]]))
    if rel: r["dE"] = gr[3]
    return r

def rel_l2(a, b): return float((a.double() - b.double()).norm() / b.double().norm())

def blocks(a, b, name):  # where the error sits: per 64 rows of T (or table), max over the rest
    d = (a.double() - b.double()).abs().nan_to_num(9e9); dim = {"lse": 2, "dE": 0, "db": 0}.get(name, 1)
    return [float(f"{x.max():.2g}") for x in d.split(64, dim)]

def check(name, which):
    import torch
    case = dict(CASES, big=LARGE[1])[name]; t = make(case); res = {}
    if name.startswith("steep"): t[0].mul_(20 if name == "steep" else 5)
    ref, yard = reference(case, t, torch.float64), reference(case, t, t[0].dtype)
    us = Ours(case, t)
    us.fwd(); torch.cuda.synchronize()
    got = us.out()
    if which == "b":
        if not all(bool(torch.isfinite(x).all()) for x in got.values()): us.o.copy_(ref["o"]); us.lse.copy_(ref["lse"])
        us.bwd(True); torch.cuda.synchronize(); got = us.grads()
    first = {k: x.clone() for k, x in got.items()}
    bad = False
    for k, x in first.items():
        e, y = rel_l2(x, ref[k]), rel_l2(yard[k], ref[k]); ok = e <= 1.5 * y + 1e-6; bad |= not ok
        res[k] = [float(f"{e:.2e}"), float(f"{y:.2e}"), "ok" if ok else "BAD " + str(blocks(x, ref[k], k))]
    same = True
    for _ in range(5):
        us.poison(); us.fwd()
        if which == "b": us.bwd(True)
        torch.cuda.synchronize()
        same &= all(torch.equal(a.view(torch.uint8), first[k].view(torch.uint8)) for k, a in (us.grads() if which == "b" else us.out()).items())
    res["repeat"] = same
    print("RESULT " + json.dumps(res))

def timings(names):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import torch.nn.functional as F
    def med(f, n=20):
        for _ in range(3): f()
        ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
        return sorted(ts)[n // 2]
    def graph(f):  # per call inside a graph of ten
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(10): f()
        return med(g.replay) / 10
    flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda"); res = {}
    for name in names:
        case = TIMES[name]; t = make(case); us = Ours(case, t); small = case[0] <= 32; m = graph if small else med
        r = {"fwd": m(us.fwd), "bwd": m(us.bwd), "bwds": m(lambda: us.bwd(True))}
        q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in t[:3]); do = t[4].transpose(1, 2).contiguous()
        if k.shape[1] != q.shape[1]: k, v = (x.detach().expand_as(q).contiguous().requires_grad_() for x in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            r["cudnn"] = [med(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)), med(lambda: torch.autograd.grad(y, (q, k, v), do, retain_graph=True))]
        res[name] = r; del us, t, q, k, v, do, y; torch.cuda.empty_cache()
        print("RESULT " + json.dumps({name: r}), flush=True)

LONG = {  # B, T, H, G, D, relative, p, rows, fp16
    "long32": (2, 1000, 4, 2, 32, 0, 0.0, 0, 0), "long128": (1, 300, 2, 2, 128, 0, 0.1, 0, 0), "longrel": (2, 300, 2, 2, 64, 1, 0.2, 512, 0),
}
def check_long(name):
    import torch
    from ridgeline.ops.attention import long, short
    case = LONG[name]; t = make(case); B, T, H, G, D, rel, p, R, h = case
    ref, yard = reference(case, t, torch.float64), reference(case, t, t[0].dtype)
    drop = short.dropping(p, state(p), 3); e = lambda *a, dt=t[0].dtype: torch.full(a, float("nan"), device="cuda", dtype=dt)
    res = {}
    for sweeps in (2, 1):
        o, lse = e(B, T, H, D), e(B, H, T, dt=torch.float32); long.forward(*t[:4], o, lse, scale=D ** -0.5, drop=drop, sweeps=sweeps)
        res[f"o{sweeps}"] = [rel_l2(o, ref["o"]), rel_l2(yard["o"], ref["o"])]
    g = [torch.full(x.shape, float("nan"), device="cuda", dtype=x.dtype) for x in t[:3]]; dE = e(R, D, dt=torch.float32) if rel else None
    long.backward(t[4], *t[:4], o, lse, *g, dE, scale=D ** -0.5, drop=drop)
    for n, x in zip(("dq", "dk", "dv", "dE"), (*g, dE)):
        if x is not None: res[n] = [rel_l2(x, ref[n]), rel_l2(yard[n], ref[n])]
    print("RESULT " + json.dumps(res))

def time_long():
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import torch.nn.functional as F
    from ridgeline.ops.attention import long, short
    from triton.testing import do_bench
    med = lambda f: do_bench(f, warmup=5, rep=30, return_mode="median") * 1e3
    for name, case in {"B4 T2048 H8 D32": (4, 2048, 8, 8, 32, 0, 0.0, 0, 0), "same, mqa": (4, 2048, 8, 1, 32, 0, 0.0, 0, 0), "B32 T1024 H8 D32": (32, 1024, 8, 8, 32, 0, 0.0, 0, 0), "HAL B64 rel p=.2": (64, 256, 8, 8, 64, 1, 0.2, 256, 0)}.items():
        t = make(case); B, T, H, G, D, rel, p, R, h = case; drop = short.dropping(p, state(p), 3)
        o, lse = torch.empty(B, T, H, D, device="cuda", dtype=t[0].dtype), torch.empty(B, H, T, device="cuda")
        g = [torch.empty(x.shape, device="cuda", dtype=x.dtype) for x in t[:3]]; dE = torch.empty(R, D, device="cuda") if rel else None
        f = med(lambda: long.forward(*t[:4], o, lse, scale=D ** -0.5, drop=drop)); f2 = med(lambda: long.forward(*t[:4], o, lse, scale=D ** -0.5, drop=drop, sweeps=2))
        b = med(lambda: long.backward(t[4], *t[:4], o, lse, *g, dE, scale=D ** -0.5, drop=drop))
        q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in t[:3]); do = t[4].transpose(1, 2).contiguous()
        if k.shape[1] != H: k, v = (x.detach().expand_as(q).contiguous().requires_grad_() for x in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            c = [med(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)), med(lambda: torch.autograd.grad(y, (q, k, v), do, retain_graph=True))]
        print("RESULT " + json.dumps({name: {"fwd": f, "two-sweep": f2, "bwd": b, "cudnn": c}}), flush=True)

def sub(args, timeout):
    t = time.time()
    try:
        p = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        lines = [json.loads(l[7:]) for l in p.stdout.splitlines() if l.startswith("RESULT ")]
        return lines or ["FAILED rc %d: %s" % (p.returncode, (p.stderr.strip().splitlines() or ["?"])[-1][:300])], time.time() - t
    except subprocess.TimeoutExpired as e:
        lines = [json.loads(l[7:]) for l in (e.stdout or b"").decode().splitlines() if l.startswith("RESULT ")]
        return lines + ["TIMEOUT"], time.time() - t

def main():
    t0 = time.time(); report: dict = {}
    with cf.ProcessPoolExecutor(14) as pool: built = list(pool.map(build, configs()))
    report["build"] = built
    print("built %d in %.0f s (slowest %.1f s)" % (len(built), time.time() - t0, max(b[2] for b in built)))
    for b in built:
        if b[2] < 0 or any(r[2] for r in (b[3].values() if isinstance(b[3], dict) else ())): print("  ", b[0], list(b[1].values()), b[3])
    report["check"] = {}
    jobs = [(n, w) for w in "fb" for n in [*CASES, "big"]]
    with cf.ThreadPoolExecutor(10) as pool:
        futures = {j: pool.submit(sub, ["check", *j], 40) for j in jobs}
        longs = {n: pool.submit(sub, ["long", n], 40) for n in LONG}
        for j in jobs:
            (r, *_), s = futures[j].result(); report["check"]["/".join(j)] = r
            if isinstance(r, dict): print(f"{j[0]:9s} {j[1]}", "repeat" if r.pop("repeat") else "DIFFERS", " ".join(f"{k} {v[0]:.1e}/{v[1]:.1e}{'' if v[2] == 'ok' else ' ' + v[2]}" for k, v in r.items()))
            else: print(f"{j[0]:9s} {j[1]}", r)
    report["long"] = {n: f.result()[0] for n, f in longs.items()}
    for n, (r, *_) in report["long"].items(): print("triton", n, " ".join(f"{k} {v[0]:.1e}/{v[1]:.1e}{'' if v[0] <= 1.5 * v[1] else ' BAD'}" for k, v in r.items()) if isinstance(r, dict) else r)
    report["time"] = {}
    names = list(TIMES)
    for n in (names[:4], names[4:]):
        r, s = sub(["time", *n], 40); report["time"]["+".join(n)] = r
        for x in r:
            if isinstance(x, dict):
                for k, v in x.items(): print(f"{k:14s} fwd {v['fwd']:7.1f}  bwd {v['bwd']:7.1f} ({v['bwds']:7.1f} with sums)  sum {v['fwd'] + v['bwd']:7.1f} us | cuDNN {v['cudnn'][0]:.0f} + {v['cudnn'][1]:.0f}")
            else: print(n, x)
    r, s = sub(["timelong"], 40); report["time_long"] = r
    for x in r: print(x if isinstance(x, str) else " ".join(f"{k}: fwd {v['fwd']:.1f} (two sweeps {v['two-sweep']:.1f}) bwd {v['bwd']:.1f} | cuDNN {v['cudnn'][0]:.1f} + {v['cudnn'][1]:.1f}" for k, v in x.items()))
    print("all %.0f s" % (time.time() - t0))
    (OUT / "attn.json").write_text(json.dumps(report))

if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]: check(*sys.argv[2:4])
    elif sys.argv[1:2] == ["long"]: check_long(sys.argv[2])
    elif sys.argv[1:2] == ["timelong"]: time_long()
    elif sys.argv[1:2] == ["time"]: timings(sys.argv[2:])
    else: main()
