"""Versions of the short-window kernels side by side: built, checked, timed in turns within one process, traced.

attn_variants_gpu.py FOLDER ...   each with a short.py and a cuda/ of its own; the package's comes first. $OUT/attn_variants.json
"""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import attn_gpu as A

CASES = ("hal20", "hal20p0", "hal5", "plain64", "plain64d", "c256", "mqa", "gqa64", "t16", "t100", "t177", "t37d32", "t256d32r", "fp16", "mqablock", "big")
OUT, TRACED = A.OUT, ("HAL-20M p=.2",)

def build(job):
    folder, source, defines = job
    from ridgeline.ops import _cuda as cuda
    try:
        c = cuda.build(Path(folder or A.ROOT / "src/ridgeline/ops/attention") / "cuda" / source, dict(defines), "sm_90a")
        return folder, source, dict(defines), {k: tuple(v) for k, v in c.resources().items()}
    except Exception as e: return folder, source, dict(defines), str(e)[-400:]

def configs():
    wanted = {A.LARGE[1]} | {A.CASES[n] for n in CASES if n != "big"} | set(A.TIMES.values()); out = set()
    for B, T, H, G, D, rel, p, R, h in wanted:
        base = dict(HEAD_WIDTH=D, ROW_BLOCKS=-(-T // 64), RL_RELATIVE=rel, RL_DROPOUT=int(p > 0), RL_FP16=h)
        out.add(("forward.cu", tuple((base | dict(WARPGROUPS=3)).items())))
        out.add(("backward.cu", tuple((base | dict(RL_GROUPED=0 if G == H else 2 if (D == 32 or T <= 128) and B * G >= 396 else 1, RL_COLUMN_SUMS=1)).items())))
    return sorted(out)

def timings(folders, rounds=3):
    import torch
    flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    def med(f, n=8):
        f(); ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_(); a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
        return sorted(ts)[n // 2]
    def graph(f):
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(10): f()
        return g.replay
    for name, case in A.TIMES.items():
        t = A.make(case); small = case[0] <= 32; runs = {}
        for folder in folders:
            us = A.Ours(case, t, folder); us.fwd()
            fs = (us.fwd, lambda us=us: us.bwd(True))
            runs[folder] = [graph(f) for f in fs] if small else fs
        got = {f: [[], []] for f in folders}
        for r in range(rounds):
            for f in (folders if r % 2 == 0 else folders[::-1]):
                for k in range(2): got[f][k].append(med(runs[f][k]) / (10 if small else 1))
        print("RESULT " + json.dumps({name: {Path(f or "main").name: [round(sorted(x)[rounds // 2], 1) for x in v] + [round(max(v[1]) - min(v[1]), 1)] for f, v in got.items()}}), flush=True)
        del runs, t; torch.cuda.empty_cache()

def sub(script, args, timeout, folder=None):
    e = dict(os.environ) | ({"ATTN_FOLDER": folder} if folder else {})
    try:
        p = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, timeout=timeout, cwd=A.ROOT, env=e)
        return p.stdout, (p.stderr.strip().splitlines() or ["?"])[-1][:300] if p.returncode else ""
    except subprocess.TimeoutExpired as e: return (e.stdout or b"").decode(), "TIMEOUT"

def main(folders):
    t0 = time.time(); folders = ["", *[str(Path(f).resolve()) for f in folders]]; report = {}
    with cf.ProcessPoolExecutor(14) as pool: built = list(pool.map(build, [(f, *c) for f in folders for c in configs()]))
    print("built %d in %.0f s" % (len(built), time.time() - t0), flush=True); report["build"] = built
    for f, s, d, r in built:
        if not isinstance(r, dict): print(Path(f or "main").name, s, d, r)
    with cf.ThreadPoolExecutor(len(folders)) as pool:
        for f, (out, err) in zip(folders, pool.map(lambda f: sub(__file__, ["check"], 60, f), folders)):
            lines = [json.loads(l[7:]) for l in out.splitlines() if l.startswith("RESULT ")]
            bad = [(n, w, k, v) for n, w, r in lines for k, v in r.items() if (k == "repeat" and not v) or (k != "repeat" and v[2] != "ok")]
            print("checks", Path(f or "main").name, len(lines), "of", 2 * len(CASES), "bad:", bad or "none", err, flush=True); report["check " + f] = lines
    out, err = sub(__file__, ["time", *folders], 100)
    for l in out.splitlines():
        if l.startswith("RESULT "):
            for n, r in json.loads(l[7:]).items():
                report[n] = r; print(n, "(forward, backward with sums, its spread)"); [print("    %-6s" % f, *("%8.1f" % x for x in v)) for f, v in r.items()]
    if err: print("time", err)
    (OUT / "attn_variants.json").write_text(json.dumps(report))
    for f in folders[1:]:
        out, err = sub(str(Path(__file__).with_name("attn_trace_gpu.py")), TRACED, 30, f); print("==", Path(f or "main").name); print(out[:9000], err, flush=True)
    print("all %.0f s" % (time.time() - t0))

if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]: timings(sys.argv[2:])
    elif sys.argv[1:2] == ["check"]:
        import builtins
        for which in "fb":
            for name in CASES:
                lines = []; real = builtins.print; A.print = lambda *a, **k: lines.append(a[0])
                A.check(name, which)
                real("RESULT " + json.dumps([name, which, json.loads(lines[-1][7:])]), flush=True)
    else: main(sys.argv[1:])
