"""Weight gradients and the sums behind them inside whole steps: this version's beside earlier ones', in turns.

PYTHONPATH=src:dev/gpu OUT=$OUT python dev/gpu/gradients_gpu.py [SECONDS] [compile] [workload ...]     (30 s, two workloads)

RL_VERSIONS="main=FOLDER side=FOLDER": earlier ops/linear (wgrad.py, reduce.py and their sources). With `compile` nothing
is run, only compiled.
"""

import importlib.util
import json
import os
import sys
import time

import fused_gpu
import torch

from ridgeline.engine import TrainStep
from ridgeline.models import LanguageConfig, LanguageModel
from ridgeline.models.fused import gradients as stack_gradients
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import reduce, wgrad

NAMES = [a for a in sys.argv[1:] if a in fused_gpu.WORKLOADS] or ["fast-c256", "gpt2-c256"]
END = time.time() + next((float(a) for a in sys.argv[1:] if a.isdigit()), 60)
OUT, found = os.environ.get("OUT", "/tmp"), {}


def tell(key, value):
    found[key] = value
    print(f"{time.time() - END:6.1f} {key} {value}", flush=True)
    json.dump(found, open(f"{OUT}/gradients.json", "w"))


def load(folder, name):
    """A module of an earlier version, which finds that version's `reduce`."""
    spec = importlib.util.spec_from_file_location(f"{os.path.basename(folder)}_{name}", f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def versions():
    """Name: wgrad, reduce."""
    all_, key = {"now": (wgrad, reduce)}, "ridgeline.ops.linear.reduce"
    for pair in os.environ.get("RL_VERSIONS", "").split():
        name, folder = pair.split("=")
        older = load(folder, "reduce")
        sys.modules[key] = older
        all_[name] = load(folder, "wgrad"), older
        sys.modules[key] = reduce
    return all_


VERSIONS = versions()


def compiled():
    """Every version's kernels."""
    for gradients, sums in VERSIONS.values():
        cuda.build(sums.SOURCE, {"MAX_JOBS": sums.MAX_JOBS, "RL_FP16": 0})
        cuda.build(gradients.SOURCE, gradients.macros(gradients.Plan([], True, 0, []), 256, torch.bfloat16))


def right(name, gradients):
    """All weight gradients of six layers and a sum of what was there before, over fp64; twice the same bits."""
    config, B, T = fused_gpu.WORKLOADS[name]
    C, F, Q, N = config.width, config.hidden, config.qkv_width, min(B * T, 8192)
    shapes = [(Q, C), (C, C), (F, C), (C, F)] * config.layers
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")
    group = [wgrad.Gradient(normal(N, m), normal(N, k), nan(m, k), nan(m) if config.bias else None) for m, k in shapes]
    partials, extra = torch.randn(264, 1, 512, device="cuda"), nan(1, 512)
    run = lambda: gradients.weight_gradients_raw(group, also=[(reduce.Job(partials, extra))])
    graph = fused_gpu.captured(run)
    for g in group:
        g.dweight_MK.fill_(float("nan"))
    extra.fill_(float("nan"))
    graph.replay()
    first = [g.dweight_MK.clone() for g in group]
    graph.replay()
    relative = lambda got, exact: float((got - exact).norm() / exact.norm())
    worst = max(relative(g.dweight_MK, g.dy_NM.double().t() @ g.x_NK.double()) for g in group)
    if config.bias:
        worst = max(worst, *(relative(g.dbias_M, g.dy_NM.double().sum(0)) for g in group))
    worst = max(worst, relative(extra, partials.double().sum(0)))
    same = all(torch.equal(g.dweight_MK, f) for g, f in zip(group, first))
    return worst < 1e-5 and same, worst, graph


def step(name):
    """Checks, then the launches alone and whole steps in turns, then kernels by their own time."""
    config, B, T = fused_gpu.WORKLOADS[name]
    fused_gpu.variants = lambda name: {"chosen": (True, {})}
    tell(f"{name} stack", fused_gpu.check(name))
    tokens = torch.randint(65, (B, T + 1), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    alone, runs = {}, {}
    for key, (gradients, _) in VERSIONS.items():
        good, worst, alone[key] = right(name, gradients)
        tell(f"{name} {key} {'right' if good else 'WRONG'}", f"{worst:.1e}")
        stack_gradients.weight_gradients_raw = gradients.weight_gradients_raw
        m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
        runs[key] = TrainStep(m, precision="bf16")
        for _ in range(5):
            runs[key](batch)
        tell(f"{name} {key} loss after 5", float(runs[key].metrics()[-1].loss))
    few = B * T > 65536
    tell(f"{name} launches us", {k: round(us, 1) for k, us in fused_gpu.interleaved(alone, 5, 5 if few else 20).items()})
    spent = {key: [] for key in runs}
    for turn in range(9):
        for key in list(runs) if turn % 2 else list(runs)[::-1]:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            runs[key](batch)
            a.record()
            for _ in range(8 if few else 60):
                runs[key](batch)
            b.record()
            torch.cuda.synchronize()
            spent[key].append(a.elapsed_time(b) / (8 if few else 60))
    tell(f"{name} step ms", {k: [round(sorted(ms)[n], 4) for n in (4, 0, 8)] for k, ms in spent.items()})
    for key in [k for k in ("now", "main") if k in runs and time.time() < END - 4]:
        tell(f"{name} {key} own us", own(runs[key], batch))


def own(run, batch):
    """What the end of a step takes: kernels by their own time, one launched early also counts its wait."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(5):
            run(batch)
        torch.cuda.synchronize()
    on_card = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    sums, reach = {}, 0.0
    for e in sorted(on_card, key=lambda e: e.time_range.start):
        sums[e.name] = sums.get(e.name, 0.0) + max(0.0, e.time_range.end - max(e.time_range.start, reach)) / 5
        reach = max(reach, e.time_range.end)
    return {k: round(v, 1) for k, v in sums.items() if k in ("weight_gradients", "reduce") or "column_sums" in k or "adamw" in k}


compiled()
tell("compiled", list(VERSIONS))
if "compile" not in sys.argv:
    for name in NAMES:
        if time.time() < END - 8:
            step(name)
