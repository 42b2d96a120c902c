"""Plain attention's backward in one kernel (ops/attention/spans.py) on the GPU: builds, checks against float64, times.

attn_spans_gpu.py [SHAPE ...], names as in attn_plain_gpu.py. Checked, and timed in turns beside the two kernels of plain.py and
what serves short windows; without a check passed there is no time. Writes $OUT/attn_spans.json; ends itself after SPANS_LIMIT
seconds (60).
"""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import attn_long_gpu as L
import attn_plain_gpu as P

OUT = Path(os.environ.get("OUT", "/tmp")); LIMIT = float(os.environ.get("SPANS_LIMIT", "60"))
ORDER = ["gpt2 T2048", "gpt2 B512", "gpt2 B32", "fast B512", "fast T2048", "fast B32", "T200", "T4096"]

def build(sums):
    import torch
    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.attention import hopper, spans
    c = cuda.build(hopper.SOURCES / "plain_backward.cu", spans.defines(torch.bfloat16, sums), "sm_90a"); cuda.build(hopper.SOURCES / "plain_sum.cu", spans.defines(torch.bfloat16, sums), "sm_90a")
    return sums, *[tuple(v)[0:3:2] for v in c.resources().values()], "serialized" in c.log

class Spans(P.Plain):
    def __init__(s, shape, tensors):
        from ridgeline.ops.attention import spans
        super().__init__(shape, tensors, "main"); s.m = spans
    def bwd(s, sums=None): s.m.backward(s.do, s.q, s.k, s.v, s.o, s.lse, *s.g, scale=s.scale, column_sums=sums)
    def sums(s):
        import torch
        sums = torch.full((s.m.column_sum_rows(s.q, s.k), s.d.shape[-1]), float("nan"), device="cuda")
        s.bwd(sums)
        return L.error(sums.sum(0), s.d.double().sum((0, 1)))

def say(*a): print("RESULT " + json.dumps(a), flush=True)

def work(names):
    import torch
    t0 = time.time()
    def timer(f, calls):
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(calls): f()
        return g
    for n in names:
        full = P.SHAPES[n]; B, T, H, G, D, _ = full
        shape = (min(B, 4), *full[1:]) if T > 256 or B > 64 else full
        if n in ("fast B512", "gpt2 B512"): shape = (300 if G == 1 else 90, *full[1:])
        tensors = L.make(shape); ref, share = L.reference(*tensors); yard = L.errors(ref, share, *P.sdpa(shape, tensors)); good = []
        for trial in ("spans",):
            try:
                us = Spans(shape, tensors); us.fwd(); us.bwd(); torch.cuda.synchronize(); first = us.d.clone()
                e = L.errors(ref, share, us.o, *us.g); bad = [k for k in e if not e[k] <= 1.5 * yard[k]]; finite = bool(torch.isfinite(first.float()).all())
                for _ in range(3): us.bwd()
                torch.cuda.synchronize(); same = torch.equal(first, us.d); sums = us.sums(); ok = not bad and finite and same and sums < 5e-3
                if ok: good.append(trial)
                say("check", n, trial, "ok" if ok else "BAD", round(max(e[k] / yard[k] for k in e), 2), f"sums {sums:.1e}", e if bad else "", "" if same else "not repeatable", "" if finite else "not finite")
            except Exception as x: say("check", n, trial, "FAILED", repr(x)[:200])
        del ref, tensors
        if n not in P.TIMED or not good: continue
        tensors = L.make(full); calls = 20 if B * T < 20000 else 4; runs, keep = {}, []
        for trial in [*good, "plain", "short"]:
            if trial == "short" and T > 256: continue
            o = P.Before(full, tensors) if trial == "short" else P.Plain(full, tensors, "apart") if trial == "plain" else Spans(full, tensors)
            o.fwd(); o.bwd(); keep.append(o); runs[trial] = timer(o.bwd, calls)
        got = {t: [] for t in runs}
        for turn in range(7):
            for t in (list(runs) if turn % 2 == 0 else list(runs)[::-1]):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                runs[t].replay(); a.record(); runs[t].replay(); b.record(); torch.cuda.synchronize(); got[t].append(a.elapsed_time(b) * 1e3 / calls)
        say("time", n, {t: round(sorted(v)[3], 1) for t, v in got.items()}, f"at {time.time() - t0:.0f} s")
        del runs, keep, tensors; torch.cuda.empty_cache()

def main(names):
    t0 = time.time(); report = []
    with cf.ProcessPoolExecutor(12) as pool:
        for line in pool.map(build, (False, True)): print(*line, flush=True)
    print("built in %.0f s" % (time.time() - t0), flush=True)
    p = subprocess.Popen([sys.executable, "-u", __file__, "work", *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    import threading
    threading.Timer(max(5.0, LIMIT - (time.time() - t0)), p.kill).start()
    for line in p.stdout:
        if line.startswith("RESULT "): report.append(json.loads(line[7:])); print(*report[-1], flush=True); (OUT / "attn_spans.json").write_text(json.dumps(report))
        elif "Error" in line: print(line.rstrip()[:300], flush=True)
    print("all %.0f s" % (time.time() - t0), flush=True); os._exit(0)

if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]: work(sys.argv[2:])
    else: main(sys.argv[1:] or ORDER)
