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
    if build.func.__name__ in ("norm_forward", "norm_backward"):
        args[0] = 256  # a whole sample
    return partial(build.func, *args)


def all_cases(group):
    from functools import partial

    from triton_cases import embeddings, ends, losses, norms, pointwise, update

    if group == "normf":
        for N, C in ((131072, 512), (8192, 256)):
            for kind in ("alone", "joined", "joined+drop"):
                yield f"norm fwd {kind} {N}x{C}", partial(norms.norm_forward, N, C, kind)
    if group == "normf":
        yield "norm fwd padded 131072x521 of 576", partial(norms.norm_padded, 131072, 521, 528, 576, False)
    if group == "normb":
        yield "norm bwd padded 131072x521 of 576", partial(norms.norm_padded, 131072, 521, 528, 576, True)
        for N, C in ((131072, 512), (8192, 256)):
            for kind in ("alone", "joined", "joined+drop"):
                yield f"norm bwd {kind} {N}x{C}", partial(norms.norm_backward, N, C, kind)
        yield "norm bwd joined+drop 32768x1024", partial(norms.norm_backward, 32768, 1024, "joined+drop")
    if group == "wide":
        yield "norm bwd joined 65536x768", partial(norms.norm_backward, 65536, 768, "joined")
        yield "dtable sorted 65536x768 V50257", partial(embeddings.dtable, 65536, 1, 50257, 768, False)
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
            yield f"column sums {P}x{W}", partial(pointwise.sums, P, W)
    if group == "ends":
        yield "heads 131072x512 9/37/6", partial(ends.heads, 131072, 512)
        yield "input layer 131072 162->512", partial(ends.inputs, 131072, 512)
    if group == "act":
        for N, F in ((131072, 2048), (8192, 1024)):
            yield f"gelu fwd {N}x{F}", partial(pointwise.act, N, F, False)
            yield f"gelu bwd {N}x{F}", partial(pointwise.act, N, F, True)
    if group == "drop":
        yield "dropout 131072x512", partial(pointwise.drop, 512, 256, 512)
        yield "dropout 8192x256", partial(pointwise.drop, 32, 256, 256)
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
            yield f"xent {N}x{V} rows of {W}", partial(losses.xent, N, V, W)
    if group == "embed":
        yield "gather+pos+drop 8192x256 V65", partial(embeddings.gather, 32, 256, 65, 256)
        yield "gather+pos 131072x512 V1000", partial(embeddings.gather, 512, 256, 1000, 512)
        yield "dtable one-hot 8192x256 V65", partial(embeddings.dtable, 8192, 1, 65, 256, True)
        yield "dtable one-hot 131072x2x32 V400", partial(embeddings.dtable, 131072, 2, 400, 32, True)
        yield "dtable sorted 32768x512 V50257", partial(embeddings.dtable, 32768, 1, 50257, 512, False)
        yield "dpositions 512x256x512", partial(embeddings.dpos, 512, 256, 512)
        yield "dpositions 32x256x256", partial(embeddings.dpos, 32, 256, 256)
    if group == "optim":
        yield "adamw 20M", partial(update.optim, 20_000_000 // 2048 * 2048)
        yield "adamw 5M", partial(update.optim, 5_000_000 // 2048 * 2048)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("--"):
        sys.path.insert(0, "src")
        child(sys.argv[1], sys.argv[2])
    else:
        parent([a for a in sys.argv[1:]] or list(GROUPS))
