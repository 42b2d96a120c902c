"""Versions of the short-window kernels side by side: built, checked, timed in turns within one process, traced.

attn_variants_gpu.py FOLDER ...   each with a short.py and a cuda/ of its own; the package's comes first. $OUT/attn_variants.json
"""
import concurrent.futures as cf, json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import attn_gpu as A

CASES = ("hal20", "hal20p0", "hal5", "plain64d", "c256", "mqa", "gqa64", "t177", "t37d32", "big")
TIMES = {n: A.TIMES[n] for n in ("HAL-20M p=.2", "HAL-20M p=0", "HAL-5M", "c256 B32", "c256 mqa B512")}
if os.environ.get("VARIANTS") == "hal":  # the relative backward alone
    CASES, TIMES = ("hal20", "hal5", "gqa64", "t177", "steep", "fp16", "big"), {n: A.TIMES[n] for n in ("HAL-20M p=.2", "HAL-5M")}
OUT = A.OUT

def build(job):
    folder, source, defines = job
    from ridgeline.ops import _cuda as cuda
    try:
        c = cuda.build(Path(folder or A.ROOT / "src/ridgeline/ops/attention") / "cuda" / source, dict(defines), "sm_90a")
        return folder, source, dict(defines), {k: tuple(v) for k, v in c.resources().items()}
    except Exception as e: return folder, source, dict(defines), str(e)[-400:]

def configs():
    wanted = {A.LARGE[1]} | {A.CASES[n] for n in CASES if n != "big"} | set(TIMES.values()); out = set()
    for B, T, H, G, D, rel, p, R, h in wanted:
        base = dict(HEAD_WIDTH=D, ROW_BLOCKS=-(-T // 64), RL_RELATIVE=rel, RL_DROPOUT=int(p > 0), RL_FP16=h)
        out.add(("forward.cu", tuple((base | dict(WARPGROUPS=3)).items())))
        out.add(("backward.cu", tuple((base | dict(RL_GROUPED=0 if G == H else 2 if (D == 32 or T <= 128) and B * G >= 396 else 1, RL_COLUMN_SUMS=1)).items())))
    return sorted(out)

def timings(folders, rounds=5):
    """Microseconds of a call inside a graph of four: the host's part stays out."""
    import torch
    def graph(f):
        f(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(4): f()
        return g.replay
    def us(replay, n=5):
        ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 250)
        return sorted(ts)[n // 2]
    for name, case in TIMES.items():
        t = A.make(case); runs = {}; keep = []
        for folder in folders:
            o = A.Ours(case, t, folder); o.fwd(); keep.append(o)
            runs[folder] = [graph(o.fwd), graph(lambda o=o: o.bwd(True))]
        got = {f: [[], []] for f in folders}
        for r in range(rounds):
            for f in (folders if r % 2 == 0 else folders[::-1]):
                for k in range(2): got[f][k].append(us(runs[f][k]))
        print("RESULT " + json.dumps({name: {Path(f or "main").name: [round(sorted(x)[rounds // 2], 1) for x in v] for f, v in got.items()}}), flush=True)
        del runs, keep, t; torch.cuda.empty_cache()

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
    right = set()
    with cf.ThreadPoolExecutor(len(folders)) as pool:
        for f, (out, err) in zip(folders, pool.map(lambda f: sub(__file__, ["check"], 40, f), folders)):
            lines = [json.loads(l[7:]) for l in out.splitlines() if l.startswith("RESULT ")]; n = Path(f or "main").name
            bad = [(c, w, k, v) for c, w, r in lines for k, v in r.items() if (k == "repeat" and not v) or (k != "repeat" and v[2] != "ok")]
            if not bad and len(lines) == 2 * len(CASES): right.add(n)
            print("checks", n, len(lines), "of", 2 * len(CASES), "bad:", str(bad)[:300] if bad else "none", err[:200], flush=True); report["check " + n] = lines
    good = [f for f in folders if Path(f or "main").name in right]  # what is wrong, or hangs, has no speed
    out, err = sub(__file__, ["time", *good], 60); sums = {}
    for l in out.splitlines():
        if l.startswith("RESULT "):
            for n, r in json.loads(l[7:]).items():
                report[n] = r; print(f"{n:14s}", " | ".join(f"{f} {v[0]:.1f} + {v[1]:.1f}" for f, v in r.items()), flush=True)
                if n == "HAL-20M p=.2": sums = {f: sum(v) for f, v in r.items()}
    if err: print("time", err)
    winner = min(sums, key=sums.get) if sums else "main"
    print("winner", winner, "all %.0f s" % (time.time() - t0))
    (OUT / "attn_winner.txt").write_text(winner); (OUT / "attn_variants.json").write_text(json.dumps(report))

if __name__ == "__main__":
    if sys.argv[1:2] == ["time"]: timings(sys.argv[2:])
    elif sys.argv[1:2] == ["check"]:
        import builtins
        for which in "fb":
            for name in CASES:
                lines = []; real = builtins.print; vars(A)["print"] = lambda *a, **k: lines.append(a[0])
                A.check(name, which)
                real("RESULT " + json.dumps([name, which, json.loads(lines[-1][7:])]), flush=True)
    else: main(sys.argv[1:])
