"""Lanes, the fused update, and their equality on a GPU; one JSON.  PYTHONPATH=src python dev/gpu/engine2_gpu.py [CHECK…]"""

import json
import os
import subprocess
import sys
import time

OUT = os.environ.get("OUT", "/tmp")
CHECKS = {"fused": 75, "bitwise": 60, "update": 40, "lanes_c256": 100, "lanes_hal": 150}


def timed(calls, seconds=1.0, rounds=4):
    """Interleaved medians, ms, of named graph replays."""
    import torch

    found = {name: [] for name in calls}
    for r in range(rounds):
        for name, call in list(calls.items()) if r % 2 == 0 else reversed(list(calls.items())):
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            call()
            b.record()
            b.synchronize()
            n = max(3, int(seconds * 1e3 / max(a.elapsed_time(b), 0.01) / 4))
            a.record()
            for _ in range(n):
                call()
            b.record()
            b.synchronize()
            found[name].append(a.elapsed_time(b) / n)
    return {
        name: {"ms": round(sorted(t)[len(t) // 2], 4), "all": [round(x, 4) for x in t]} for name, t in found.items()
    }


def make(name, lanes, sizes=None, compile="default", impl="torch", **rest):
    import torch

    from ridgeline.bench.contenders import OPTIMIZER
    from ridgeline.bench.workloads import random_batch, workload
    from ridgeline.engine import TrainStep
    from ridgeline.models import build

    case = workload(name, **(sizes or {}))
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    step = TrainStep(
        build(case.model, impl=impl, seed=0).to(device).train(),
        optimizer=OPTIMIZER,
        precision="bf16",
        lanes=lanes,
        compile=compile,
        **rest,
    )
    batch = random_batch(case, device)
    return step, (lambda: step(batch)), case


def bitwise():
    import torch

    torch.use_deterministic_algorithms(True)
    result = {}
    for lanes, accumulate in ((1, 1), (2, 1), (2, 2)):
        for compile in (None,):
            steps = [
                make(
                    "hal-5m", lanes, {"batch": 16, "context": 64}, compile, accumulate=accumulate, capture=c, steps=100
                )[:2]
                for c in (False, True)
            ]
            for step, call in steps:
                torch.manual_seed(5)
                for _ in range(100):
                    call()
            a, b = steps[0][0], steps[1][0]
            torch.cuda.synchronize()
            result[f"lanes {lanes} parts {accumulate}"] = {
                "equal": all(torch.equal(x, y) for x, y in zip(a.update.state(), b.update.state(), strict=True)),
                "loss": [round(b.metrics()[i].loss, 4) for i in (0, -1)],
                "losses_equal": [m.loss for m in a.metrics()] == [m.loss for m in b.metrics()],
            }
    key = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[key]
    for _ in range(100):
        steps[1][1]()
    torch.cuda.synchronize()
    result["allocations"] = torch.cuda.memory_stats()[key] - before
    return result


def update():
    """The second half of a step alone: AdamW by operations and by kernels, Muon with and without streams."""
    import torch

    from ridgeline.engine import FlatParameters, Update
    from ridgeline.models import build
    from ridgeline.optim import OptimizerConfig, hidden_matrices
    from ridgeline.presets import preset

    result = {}
    for name in ("gpt2-c256", "hal-20m"):
        calls, kept = {}, []
        for label, impl, muon, streams in (
            ("adamw torch", "torch", False, False),
            ("adamw", "triton", False, False),
            ("muon", "triton", True, True),
            ("muon, one stream", "triton", True, False),
        ):
            model = build(preset(name).model, seed=0).cuda()
            flat = FlatParameters(model, compute=torch.bfloat16, orthogonal=hidden_matrices(model) if muon else ())
            flat.grad.normal_()
            flat.lanes[0].loss.fill_(1.0)
            u = Update(flat, OptimizerConfig(algorithm="muon" if muon else "adamw"), impl=impl)
            if muon and not streams:
                u._muon._streams = []
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for _ in range(3):
                    u()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side):
                u()
            calls[label] = graph.replay
            kept.append((model, u))
        result[name] = {"parameters": flat.size, **timed(calls, 0.2)}
        weights = [update.flat.views(update.flat.masters) for _, update in kept[2:]]
        result[name]["finite"] = all(bool(torch.isfinite(w).all()) for named in weights for w in named.values())
        print("PART", name, json.dumps(result[name]), file=sys.stderr, flush=True)
    return result


def lanes_of(name, options, sizes=None, seconds=1.0):
    import torch

    calls, tokens, first, kept = {}, 0, {}, None
    for label, lanes, compile in options:
        began = time.time()
        step, call, case = make(name, lanes, sizes, compile)
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            first[label] = f"{type(error).__name__}: {error}"[:300]
            continue
        calls[label], tokens, first[label] = call, case.tokens, round(time.time() - began, 1)
        kept = kept or (step, case)
    found = timed(calls, seconds)
    for label, row in found.items():
        row["tok_s"] = round(tokens / row["ms"] * 1e3)
    try:
        from ridgeline.bench.workloads import random_batch

        first["phases of 1"] = kept[0].phases(random_batch(kept[1], torch.device("cuda:0")))
        first["memory of 1"] = {k: round(v / 2**20, 1) for k, v in kept[0].memory().items()}
    except Exception as error:
        first["phases of 1"] = f"{type(error).__name__}: {error}"[:300]
    return {"times": found, "first_s": first, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def lanes_c256():
    return {
        "B32": lanes_of(
            "gpt2-c256",
            [("1", 1, "default"), ("2", 2, "default"), ("4", 4, "default"), ("1 eager", 1, None), ("2 eager", 2, None)],
        ),
        "B512": lanes_of("gpt2-c256", [("1", 1, "default"), ("2", 2, "default")], {"batch": 512}),
    }


def lanes_hal():
    return lanes_of("hal-20m", [("1", 1, "default"), ("2", 2, "default")], seconds=2.0)


def fused():
    """impl="fused" under TrainStep: lanes, phases, memory, captured against uncaptured, kernels a step."""
    import torch

    from ridgeline.bench.workloads import random_batch

    result = {}
    began = time.time()
    for name, lanes in (("gpt2-c256", (1, 2, 4)), ("hal-20m", (1, 2)), ("fast-c256", (1, 2)), ("hal-5m", (1, 2))):
        if time.time() - began > 50:
            break
        row, calls, kept, tokens = {}, {}, None, 0
        try:
            for n in lanes:
                start = time.time()
                step, call, case = make(name, n, None, None, "fused")
                call()
                torch.cuda.synchronize()
                row[f"first_s {n}"] = round(time.time() - start, 1)
                calls[f"lanes {n}"], tokens = call, case.tokens
                kept = kept or (step, case)
            row["times"] = timed(calls, 0.6)
            for label in row["times"].values():
                label["M tok/s"] = round(tokens / label["ms"] / 1e3, 3)
            step, case = kept
            row["phases"] = {
                k: round(v, 4) for k, v in step.phases(random_batch(case, torch.device("cuda:0")), 6).items()
            }
            row["memory_mib"] = {k: round(v / 2**20, 1) for k, v in step.memory().items()}
            row["losses"] = [round(m.loss, 4) for m in step.metrics()[:3]]
            del step, kept, calls, call
            torch.cuda.empty_cache()
            a, b = (
                make(name, 2, {"batch": 8, "context": 64}, None, "fused", capture=c, steps=30)[:2]
                for c in (False, True)
            )
            for _ in range(30):
                a[1]()
                b[1]()
            torch.cuda.synchronize()
            row["captured_equals_calls"] = all(
                torch.equal(x, y) for x, y in zip(a[0].update.state(), b[0].update.state(), strict=True)
            )
            del a, b
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:400]
        result[name] = row
        torch.cuda.empty_cache()
        print("PART", name, json.dumps(row), file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print("RESULT " + json.dumps(globals()[sys.argv[2]]()))
        sys.exit()
    report, env = {}, {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for check in sys.argv[1:] or CHECKS:
        began = time.time()
        own = env if check == "bitwise" else {k: v for k, v in env.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", check],
                capture_output=True,
                text=True,
                timeout=CHECKS[check],
                env=own,
            )
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            report[check] = json.loads(line[7:]) if line else {"error": done.stderr[-1500:]}
        except subprocess.TimeoutExpired as error:
            report[check] = {"error": f"timeout; {str(error.stderr)[-800:]}"}
        report[check]["wall_s"] = round(time.time() - began, 1)
        print(check, json.dumps(report[check]), flush=True)
        with open(f"{OUT}/engine2.json", "w") as file:
            json.dump(report, file, indent=1)
