"""Fused stack and whole step on a card: numerics against fp64, µs a block for every choice, kernel table of a step.

PYTHONPATH=src python3 dev/gpu/fused_gpu.py [check|few|block|step] [workload ...]      (all four, and all workloads)
                                            repeat: the same bits again, for 6 s a workload
ONLY="late,mlp rows" in the environment: these choices alone.
"""

import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

OUT = os.environ.get("OUT", "/tmp")
from ridgeline.engine import TrainStep
from ridgeline.models import *
from ridgeline.models.fused import stack
from ridgeline.models.fused.choices import JOINED, choose, parted
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.early import early_launches
from ridgeline.ops.sink import ATTRIBUTE, GradientSink, join

D = DecoderConfig
FAST = D(layers=6, width=256, heads=8, kv_heads=1, mlp_width=512, norm="rmsnorm", bias=False, gelu="tanh")
GPT2 = D(layers=6, width=256, heads=8, gelu="tanh")
GPT2_124M = D(layers=12, width=768, heads=12, gelu="tanh", context=1024)
HAL = D(layers=6, width=512, heads=8, positions="relative", position_table=1024, dropout=0.2)
WORKLOADS = {
    "gpt2-c256": (GPT2, 32, 256),
    "fast-c256": (FAST, 32, 256),
    "fast-c256-2048": (dataclasses.replace(FAST, context=2048), 4, 2048),
    "gpt2-c256-2048": (dataclasses.replace(GPT2, context=2048), 4, 2048),
    "gpt2-c256-64": (GPT2, 64, 256),
    "gpt2-c256-512": (GPT2, 512, 256),
    "fast-c256-512": (FAST, 512, 256),
    "hal-20m": (HAL, 512, 256),
    "hal-5m": (dataclasses.replace(HAL, width=256, heads=4, mlp_width=1024, context=128), 512, 128),
    "gpt2-124m": (GPT2_124M, 64, 1024),
}
ALL = frozenset(("mlp", "out", "qkv"))
SMALL = {  # name: (early launches, changes to the choices)
    "chosen": (True, {}),
    "late": (False, {}),
    "mlp apart": (True, dict(rows=frozenset(("out", "qkv")))),
    "all apart": (True, dict(rows=frozenset())),
    "cuBLAS": (True, dict(rows=frozenset(), grouped=False, qkv="torch", out="torch", side_stream=True)),
}
LARGE = {
    "late": (False, {}),
    "half slopes": (False, dict(coded=False)),
    "early": (True, {}),
    "joins apart": (False, dict(joined=frozenset())),
    "mlp apart": (False, dict(joined=parted(JOINED))),
    "mlp rows": (False, dict(rows=frozenset(("mlp",)))),
    "not grouped": (False, dict(joined=frozenset(), grouped=False)),
    "cuBLAS": (True, dict(joined=frozenset(), grouped=False, qkv="torch", out="torch")),
}
MIDDLE = {
    "early": (True, {}),
    "late": (False, {}),
    "mlp rows": (True, dict(rows=frozenset(("mlp",)))),
    "mlp rows grouped": (True, dict(rows=frozenset(("mlp",)), grouped=True)),
    "grouped": (True, dict(grouped=True)),
    "late grouped": (False, dict(grouped=True)),
    "down residual": (True, dict(rest="residual")),
}
WIDE = {  # width 768
    "early": (True, {}),
    "late": (False, {}),
    "half slopes": (True, dict(coded=False)),
    "unfolded": (True, dict(folded=False)),
    "out cuBLAS": (True, dict(folded=False, out="torch")),
    "qkv cuBLAS": (True, dict(qkv="torch")),
    "down residual": (True, dict(rest="residual")),
    "GELU apart": (True, dict(mlp="torch", folded=False)),
}


def variants(name):
    only = os.environ.get("ONLY")
    return {key: how for key, how in all_variants(name).items() if not only or key in only.split(",")}


def all_variants(name):
    config, B, T = WORKLOADS[name]
    if config.width == 768:
        return WIDE
    if config.width != 256:
        chosen_here = choose(config, torch.device("cuda"), torch.bfloat16, B, T)
        unfolded = {"unfolded": (True, dict(folded=False))} if chosen_here.folded else {}
        half = {"half slopes": (True, dict(coded=False)), "late half": (False, dict(coded=False))}
        sums = {"sums apart": (True, dict(sums_at_once=False)), "down residual": (True, dict(rest="residual"))}
        return {"early": (True, {}), **unfolded, **sums, "late": (False, {}), **half}
    return MIDDLE if config.dropout else SMALL if B * T <= 32768 else LARGE


@contextlib.contextmanager
def chosen(early, changes):
    """The stack with other choices than its own."""
    stack.choose = lambda *a: dataclasses.replace(choose(*a), early=early, **changes)
    try:
        with early_launches(early):
            yield
    finally:
        stack.choose = choose


def model_of(name, impl, layers=6):
    config, B, T = WORKLOADS[name]
    config = dataclasses.replace(config, layers=layers)
    return LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl=impl, seed=0), B, T


def check(name, B=None):
    """Outputs and gradients of two blocks over PyTorch's bf16 error against fp64, called and captured, early and not."""
    ref, full, T = model_of(name, "reference", 2)
    B = B or min(full, 264)  # above 65,536 rows, as at 512
    generator = torch.Generator().manual_seed(1)
    for p in ref.parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=generator)
        p.data = p.data.bfloat16().float()
    x, dy = (torch.randn(B, T, ref.config.decoder.width, generator=generator).bfloat16().cuda() for _ in range(2))
    state = DropoutState(torch.tensor([3, 4], device="cuda"), 5)

    def run(impl, dtype, graph=False):
        d = copy.deepcopy(ref.decoder).cuda().to(dtype).train()
        d.impl = impl
        xx, dd = x.to(dtype).requires_grad_(), dy.to(dtype)
        names, weights = zip(*[(n, p) for n, p in d.named_parameters() if n != "positions"])
        results = []

        def step():
            y = d.transform(xx, state)
            results[:] = [y.detach(), *torch.autograd.grad(y, [xx, *weights], dd)]

        if graph:
            replay = captured(step)
            for r in results:
                r.fill_(float("nan"))
            replay.replay()
        else:
            step()
        torch.cuda.synchronize()
        return dict(zip(("y", "x", *names), [r.double() for r in results]))

    relative = lambda a, b: float((a - b).norm() / b.norm())
    exact, pytorch = run("reference", torch.float64), run("reference", torch.bfloat16)
    torch.cuda.empty_cache()
    error = {n: max(relative(pytorch[n], exact[n]), 1e-9) for n in exact}
    out, first = {}, None
    for key, (early, changes) in variants(name).items():
        for graph in (False, True):
            try:
                with chosen(early, changes):
                    got = run("fused", torch.bfloat16, graph)
                ratios = {n: relative(got[n], exact[n]) / error[n] for n in exact}
                worst = max(ratios, key=lambda n: ratios[n] if ratios[n] == ratios[n] else float("inf"))
                out[f"{key}{', graph' * graph}"] = (round(ratios[worst], 2), worst)
                if first is None:
                    first = got
                elif key in ("chosen", "early", "late") and not all(torch.equal(got[n], first[n]) for n in got):
                    out[f"{key}{', graph' * graph}"] += ("NOT THE SAME BITS",)
            except Exception as fault:
                out[f"{key}{', graph' * graph}"] = repr(fault)[:110]
    bad = {k: v for k, v in out.items() if isinstance(v, str) or not v[0] <= 1.5 or len(v) > 2}
    good = [v for k, v in out.items() if k not in bad]
    print(f"check {name} B {B} T {T}: {len(good)} right, {len(bad)} BAD, worst of the right {max(good, default=None)}")
    for key, value in list(bad.items())[:4]:
        print(f"   BAD {key}: {value}"[:139], flush=True)
    return out


def captured(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    return graph


def interleaved(graphs, rounds=9, repeats=10):
    """Median µs of a replay of each graph."""
    times = {key: [] for key in graphs}
    for turn in range(rounds + 2):
        for key in list(graphs) if turn % 2 else list(graphs)[::-1]:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[key].replay()
            a.record()
            for _ in range(repeats):
                graphs[key].replay()
            b.record()
            torch.cuda.synchronize()
            times[key] += [a.elapsed_time(b) / repeats * 1000] * (turn > 1)
    return {key: statistics.median(values) for key, values in times.items()}


def passes(m, B, T):
    """Both passes of a decoder's blocks with its first and last norm, their weights' sinks, and the buffer of those."""
    m = m.cuda().bfloat16().train()
    state = DropoutState(torch.tensor([3, 4], device="cuda"), 0)
    x = torch.randn(B, T, m.config.decoder.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    weights = [p for n, p in m.decoder.named_parameters() if n != "positions"]
    flat = torch.zeros(sum(-(-p.numel() // 64) * 64 for p in weights), device="cuda")
    start, sinks = 0, []
    for p in weights:
        sinks.append(GradientSink(flat[start : start + p.numel()].view(p.shape)))
        setattr(p, ATTRIBUTE, sinks[-1])
        start += -(-p.numel() // 64) * 64

    def step():
        for sink in sinks:
            sink.begin(add=False)
        torch.autograd.grad(m.decoder.transform(x, state), [x, *weights], dy, allow_unused=True)
        join(sinks)

    return step, sinks, flat


def stack_step(name):
    """A stack's forward and backward as a function that holds all it uses, gradients into flat memory; its layers, flat memory, sinks."""
    m, B, T = model_of(name, "fused")
    step, sinks, flat = passes(m, B, T)
    return step, m.config.decoder.layers, flat, sinks


def block(name):
    step, layers, flat, sinks = stack_step(name)
    _, B, T = WORKLOADS[name]
    graphs, first, sums = {}, {}, {}
    for key, (early, changes) in variants(name).items():
        try:
            t0 = time.time()
            with chosen(early, changes):
                graphs[key] = captured(step)
            first[key] = time.time() - t0
            totals = []
            for _ in range(3):
                flat.fill_(float("nan"))
                graphs[key].replay()
                torch.cuda.synchronize()
                totals.append(torch.stack([s.target.double().norm() for s in sinks]).tolist())
            sums[key] = totals[0]
            if any(t != totals[0] for t in totals):
                print(name, key, "REPEATS DIFFER", flush=True)
        except Exception as error:
            print(name, key, "FAILED", repr(error)[:300], flush=True)
    base = next(iter(sums.values()))
    for key, norms in sums.items():
        off = max(abs(a / b - 1) if b else abs(a) for a, b in zip(norms, base))
        if not off < 0.01:
            print(name, key, f"GRADIENT NORMS OFF by {off:.3g}", flush=True)
    few = (5, 4) if B * T > 65536 else (9, 10)  # so many milliseconds a replay that half a minute would go by
    out = {key: us / layers for key, us in interleaved(graphs, *few).items()}
    for key, us in out.items():
        print(f"{name} {key:22s} {us:8.1f} us a block", flush=True)
    return out


def turns(train, batch, repeats, count):
    """ms a step in each of `count` turns of `repeats` steps."""
    times = []
    for _ in range(count):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(repeats):
            train(batch)
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / repeats)
    return times


def step(name):
    """One whole training step: its time by events, then every kernel in order with the gaps, from a replayed graph."""
    config, B, T = WORKLOADS[name]
    V, tied = (50257, True) if config.width == 768 else (65, False)
    m = LanguageModel(LanguageConfig(vocabulary=V, decoder=config, tied=tied), impl="fused", seed=0).cuda()
    train = TrainStep(m, precision="bf16")
    tokens = torch.randint(V, (B, T + 1), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    repeats = 6 if B * T > 65536 else 20
    for _ in range(repeats):
        train(batch)
    torch.cuda.synchronize()
    times = turns(train, batch, repeats, 9)
    ms = statistics.median(times)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            train(batch)
        torch.cuda.synchronize()
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    cuts = [i for i, e in enumerate(events) if "gather_kernel" in e[2]]
    events = events[cuts[1] : cuts[2]] if len(cuts) > 2 else events[len(events) // 3 : 2 * len(events) // 3]
    rows, busy, reach, origin = [], 0.0, events[0][0], events[0][0]
    for start, end, kernel in events:
        own = max(0.0, end - max(start, reach))  # a kernel launched early also counts its wait for the one before
        rows.append((round(start - origin, 1), round(end - start, 1), round(start - reach, 1), own, kernel[:90]))
        busy += own
        reach = max(reach, end)
    totals, counts, gaps, alone = (collections.Counter() for _ in range(4))
    for _, took, gap, own, kernel in rows:
        totals[kernel] += took
        counts[kernel] += 1
        gaps[kernel] += max(gap, 0)
        alone[kernel] += own
    span = reach - origin
    print(
        f"{name} step {ms:.4f} ms = {B * T / ms / 1e3:.2f} M tokens/s, {len(rows)} kernels; profiled span {span:.0f} us,"
    )
    print(f"   covered {busy:.0f}, gaps {span - busy:.0f}, kernel time {sum(totals.values()):.0f}", flush=True)
    for kernel, own in alone.most_common(30):
        n = counts[kernel]
        print(
            f"   {own:8.1f} us own {n:3d} x {own / n:6.1f} ({totals[kernel] / n:6.1f}), gaps {gaps[kernel]:5.1f}  {kernel}"
        )
    with contextlib.suppress(Exception):
        print("   phases ms", {k: round(v, 4) for k, v in train.phases(batch).items()}, flush=True)
    with open(f"{OUT}/timeline_{name}.txt", "w") as file:
        file.writelines(f"{a:9.1f} {b:7.1f} {c:6.1f} {d:6.1f}  {k}\n" for a, b, c, d, k in rows)
    return {"ms": ms, "kernels": len(rows), "span": span, "covered": busy, "rows": rows}


def repeat(name):
    """Whether hundreds of replays of both passes leave the same gradients to the bit."""
    step, _, flat, _ = stack_step(name)
    _, B, T = WORKLOADS[name]
    replay, end = captured(step), time.time() + 6
    flat.fill_(float("nan"))
    replay.replay()
    first, differ, count = flat.clone(), 0, 0
    while time.time() < end:
        for _ in range(4 if B * T > 32768 else 20):
            flat.fill_(float("nan"))
            replay.replay()
            differ = differ + (flat.view(torch.int32) != first.view(torch.int32)).any().int()
            count += 1
        torch.cuda.synchronize()
    print(f"repeat {name}: {int(differ)} of {count} replays differ", flush=True)
    return {"differ": int(differ), "replays": count}


TRIALS = {"check": check, "few": lambda name: check(name, 2), "block": block, "step": step, "repeat": repeat}


def start(trial, name):
    return subprocess.Popen(
        [sys.executable, __file__, "--one", trial, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def tell(process, trial, name, seconds):
    try:
        text, _ = process.communicate(timeout=max(seconds, 1))
        if process.returncode:
            print(f"FAILED {trial} {name} " + text[-700:], flush=True)
        else:
            lines = [line for line in text.splitlines() if "Warn" not in line and "_warn" not in line]
            print("\n".join(lines), flush=True)
    except subprocess.TimeoutExpired:
        process.kill()
        print("TIMEOUT", trial, name, (process.communicate()[0] or "")[-700:], flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--one":
        trial, name = sys.argv[2:]
        json.dump(TRIALS[trial](name), open(f"{OUT}/fused_{trial}_{name}.json", "w"))
        sys.exit()
    seconds = next((float(a) for a in sys.argv[1:] if a.isdigit()), 600)
    end = time.time() + seconds
    trials = [a for a in sys.argv[1:] if a in TRIALS] or ["check", "few", "block", "step"]
    names = [a for a in sys.argv[1:] if a in WORKLOADS] or list(WORKLOADS)
    checks = [(t, n) for t in trials for n in names if t == "check" or t == "few" and not n.endswith("-512")]
    running = [(start(*job), *job) for job in checks]  # numerics beside each other
    for job in running:
        tell(*job, end - time.time())
    for trial, name in itertools.product(trials, names):  # times one after another
        if trial in ("block", "step", "repeat") and time.time() < end - 6:
            tell(start(trial, name), trial, name, end - time.time())
