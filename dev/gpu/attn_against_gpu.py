"""Plain attention: this checkout's kernels against others', checked against float64 and timed in turns.

attn_against_gpu.py SECONDS CHECKOUT[,CHECKOUT ...] [SHAPE ...], names as in attn_plain_gpu.py and B64; 20 s for the default, 10 s for the
two at T 2048. At T <= 256 the kernels for short windows beside them, and the backward pass with column sums, as a step takes it. Exits with 0 if all of this one's are right: errors within 1.5 of flash attention's, the same bits again, column sums,
and two streams at once. Writes $OUT/attn_against.json as it goes; 3 if it ran out of time.
"""
import concurrent.futures as cf, importlib.util, json, os, sys, threading, time, types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
OUT = Path(os.environ.get("OUT", "/tmp")); LIMIT = float(sys.argv[1]) if sys.argv[1:] else 40
OTHERS = {Path(c).name: Path(c).resolve() / "src/ridgeline/ops/attention" for c in "".join(sys.argv[2:3]).split(",") if c}
SHAPES = {f"{m} B{B}": (B, 256, 8, G, 32, 0) for m, G in (("gpt2", 8), ("fast", 1)) for B in (64, 128)}
ORDER = ["gpt2 T2048", "fast T2048", "T4096", "fast B512", "gpt2 B512", "124m", "fast B32", "T200", "T1111"]
TIMED = [*ORDER[:7], "gpt2 B32", *SHAPES]

def load(name, path, **names):
    spec = importlib.util.spec_from_file_location(name, path); m = importlib.util.module_from_spec(spec); sys.modules[name] = m
    spec.loader.exec_module(m); vars(m).update(names); return m

def variant(name):
    from ridgeline.ops.attention import hopper, plain
    if name == "here": return plain
    other = OTHERS[name]; own = types.SimpleNamespace(**{**vars(hopper), "SOURCES": other / "cuda"})
    return load(f"plain_{name}", other / "plain.py", hopper=own, spans=load(f"spans_{name}", other / "spans.py", hopper=own))

def build(job):
    import torch
    from ridgeline.ops import _cuda as cuda
    name, file, D, sums = job; p = variant(name)
    if not (p.hopper.SOURCES / f"plain_{file}.cu").exists(): return name, file, "none"
    if file in ("backward", "sum"): macros = p.spans.defines(torch.bfloat16, bool(sums))
    else:
        l = getattr(p.LAUNCHES[D], file)
        macros = dict(HEAD_WIDTH=D, WARPGROUPS=l[0], RING_STAGES=l[1], BLOCKS_PER_PROCESSOR=l[2], RL_FP16=0, RL_COLUMN_SUMS=sums, STEP_COLUMNS=l[3])
    c = cuda.build(p.hopper.SOURCES / f"plain_{file}.cu", macros, "sm_90a")
    return name, file, D, sums, *[tuple(v)[0:3:2] for v in c.resources().values()], "SERIALIZED" if "serialized" in c.log else ""

def main(names):
    t0, report = time.time(), []
    def end(): print("out of time", flush=True); os._exit(3)
    threading.Timer(LIMIT, end).start()
    def say(*a): report.append(a); print(*a, flush=True); (OUT / "attn_against.json").write_text(json.dumps(report))
    variants = [*OTHERS, "here"]
    wide = [("forward", 64, 0), ("queries", 64, 0), ("keys", 64, 0), ("queries", 64, 1), ("keys", 64, 1)] if set(names) & {"124m", "T1111"} else []
    jobs = [(v, *x) for v in variants for x in [("backward", 32, 0), ("backward", 32, 1), ("forward", 32, 0), ("sum", 32, 0), *wide]]
    with cf.ProcessPoolExecutor(14) as pool:
        for line in pool.map(build, jobs): print(*line, flush=True)
    print(f"built at {time.time() - t0:.0f} s", flush=True)
    if "compile" in sys.argv: os._exit(0)
    import torch
    import attn_long_gpu as L, attn_plain_gpu as P
    from ridgeline.ops.attention import short
    P.SHAPES.update(SHAPES)
    class Ours(P.Plain):
        def __init__(s, shape, tensors, m): super().__init__(shape, tensors, "main"); s.p, s.l = m, None
        def fwd(s): s.p.forward(s.q, s.k, s.v, s.o, s.lse, scale=s.scale)
        def bwd(s): s.p.backward(s.do, s.q, s.k, s.v, s.o, s.lse, *s.g, scale=s.scale)
    def with_sums(o):
        o.partial = torch.empty(o.p.column_sum_rows(o.q, o.k), o.d.shape[-1], device="cuda")
        return lambda: o.p.backward(o.do, o.q, o.k, o.v, o.o, o.lse, *o.g, scale=o.scale, column_sums=o.partial)
    def short_with_sums(o):
        o.partial = torch.empty(short.column_sum_rows(o.q), sum(x.shape[2] for x in o.g) * o.q.shape[3], device="cuda")
        return lambda: short.backward(o.do, o.q, o.k, o.v, None, o.o, o.lse, *o.g, None, o.w, scale=o.scale, drop=o.drop, column_sums=o.partial)
    def timer(f, calls):
        g, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream): f()
        torch.cuda.synchronize()
        with torch.cuda.graph(g, stream=stream):
            for _ in range(calls): f()
        return g
    def two_streams(shape, m):
        both = [Ours(shape, L.make(shape), m) for _ in range(2)]; streams = [torch.cuda.Stream() for _ in range(2)]
        for o in both: o.fwd(); o.bwd()
        torch.cuda.synchronize(); bits = [o.d.clone() for o in both]
        for _ in range(30):
            for o, stream in zip(both, streams):
                with torch.cuda.stream(stream): o.bwd()
        torch.cuda.synchronize(); return all(torch.equal(o.d, b) for o, b in zip(both, bits))
    modules, right = {v: variant(v) for v in variants}, True
    for n in names:
        full = P.SHAPES[n]; B, T, H, G, D, _ = full; good = []
        shape = (min(B, 4), *full[1:]) if T > 256 or B > 64 else full
        if T == 256 and B > 64: shape = (300 if G == 1 else 90, *full[1:])
        tensors = L.make(shape); ref, part = L.reference(*tensors); yard = L.errors(ref, part, *P.sdpa(shape, tensors))
        for v in variants:
            try:
                us = Ours(shape, tensors, modules[v]); us.fwd(); us.bwd(); torch.cuda.synchronize(); first = us.o.clone(), us.d.clone()
                e = L.errors(ref, part, us.o, *us.g); finite = all(bool(torch.isfinite(x.float()).all()) for x in first)
                for _ in range(3): us.fwd(); us.bwd()
                torch.cuda.synchronize(); same = torch.equal(first[0], us.o) and torch.equal(first[1], us.d); sums = us.sums() if v == "here" else 0
                bad = [k for k in e if not e[k] <= 1.5 * yard[k]]; ok = not bad and finite and same and sums < 5e-3
                if ok: good.append(v)
                say("check", n, v, "ok" if ok else "BAD", round(max(e[k] / yard[k] for k in e), 3), f"sums {sums:.1e}", {k: (e[k], yard[k]) for k in bad}, "" if same else "not repeatable", "" if finite else "not finite")
            except Exception as x: say("check", n, v, "FAILED", repr(x)[:300])
        right = right and "here" in good
        if T == 2048 and "here" in good:
            fine = two_streams(full, modules["here"]); right = right and fine; say("two streams", n, "ok" if fine else "BAD")
        del ref, tensors
        if n not in TIMED or not good: continue
        tensors = L.make(full); calls = 20 if B * T < 20000 else 4; runs, keep = {}, []
        for v in good:
            o = Ours(full, tensors, modules[v]); o.fwd(); o.bwd(); keep.append(o)
            runs["forward", v], runs["backward", v] = timer(o.fwd, calls), timer(o.bwd, calls)
            if T == 2048: runs["both", v] = timer(lambda o=o: (o.fwd(), o.bwd()), 10)
            if T <= 256: runs["backward with sums", v] = timer(with_sums(o), calls)
        if T <= 256:
            o = P.Before(full, tensors); o.fwd(); o.bwd(); keep.append(o)
            runs["forward", "short"], runs["backward", "short"] = timer(o.fwd, calls), timer(o.bwd, calls)
            runs["backward with sums", "short"] = timer(short_with_sums(o), calls)
        got = {t: [] for t in runs}
        for turn in range(7):
            for t in (list(runs) if turn % 2 == 0 else list(runs)[::-1]):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                runs[t].replay(); a.record(); runs[t].replay(); b.record(); torch.cuda.synchronize(); got[t].append(a.elapsed_time(b) * 1e3 / (10 if t[0] == "both" else calls))
        for way in ("forward", "backward", "backward with sums", "both"):
            if found := {t[1]: round(sorted(x)[3], 1) for t, x in got.items() if t[0] == way}: say("time", n, way, found, f"us, at {time.time() - t0:.0f} s")
        del runs, keep, tensors; torch.cuda.empty_cache()
    print(f"all {time.time() - t0:.0f} s, {'right' if right else 'NOT RIGHT'}", flush=True); os._exit(0 if right else 4)

if __name__ == "__main__": main([x for x in sys.argv[3:] if x != "compile"] or ORDER)
