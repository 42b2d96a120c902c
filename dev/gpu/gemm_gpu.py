"""The Hopper GEMM on a GPU: numerics against float64, then times inside CUDA graphs, each case in its own process.

    PYTHONPATH=src python3 dev/gpu/gemm_gpu.py [seconds] [case …]      ($OUT/gemm.json; starts no case past the seconds)

RL_GEMM_VARIANTS names folders with changed copies of the kernels' sources ("name=folder,…"), timed beside it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = os.environ.get("OUT", "/tmp")
M_BIG = 131072
CASES = {  # name: (M, N, K, epilogue)
    "up": (M_BIG, 2048, 512, "gelu"),
    "dgelu": (M_BIG, 2048, 512, "factor"),
    "out_join": (M_BIG, 512, 512, "join"),
    "qkv": (M_BIG, 1536, 512, "bias"),
    "out_dgrad": (M_BIG, 512, 512, "dgrad"),
    "down": (M_BIG, 512, 2048, "residual"),
    "wide_up": (65536, 3072, 768, "gelu"),
    "wide_dgelu": (65536, 3072, 768, "factor"),
    "small_up": (8192, 1024, 256, "gelu"),
    "small_dgelu": (8192, 1024, 256, "factor"),
    "small_qkv": (8192, 768, 256, "bias"),
}
T, P = 256, 0.2


def variants():
    """Folders of sources: the package's, and those that the environment names."""
    from ridgeline.ops.linear import gemm

    named = [pair.split("=") for pair in os.environ.get("RL_GEMM_VARIANTS", "").split(",") if pair]
    return {"tree": gemm.SOURCE.parent, **{name: Path(folder).resolve() for name, folder in named}}


def problem(M, N, K, epilogue):
    """Operands, a launch for a configuration, and the function in any precision on some rows."""
    import torch
    import torch.nn.functional as F

    from ridgeline.ops.dropout import DropoutState
    from ridgeline.ops.linear import gemm, stationary
    from ridgeline.ops.linear.products import slope_empty
    from ridgeline.ops.linear.reference import Masks, masked

    torch.manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    x, bias, c = draw(M, K), draw(N), draw(M, N)
    back = epilogue in ("factor", "dgrad")
    w = draw(K, N, scale=K**-0.5) if back else draw(N, K, scale=K**-0.5)
    out, slope = draw(M, N), slope_empty(x, M, N).uniform_(-0.2, 1.2)
    masks = Masks(P, DropoutState(torch.tensor([5, 9], device="cuda"), 3), 2, T)
    extra = {
        "plain": {},
        "dgrad": {"transposed_b": True},
        "bias": {"bias_N": bias},
        "gelu": {"bias_N": bias, "gelu": "exact", "slope_MN": slope},
        "residual": {"bias_N": bias, "residual_MN": c, "masks": masks},
        "join": {"bias_N": bias, "residual_MN": c, "masks": masks},
        "factor": {"transposed_b": True, "factor_MN": slope},
    }[epilogue]

    def launch(config, folder):
        module: Any
        for module in (gemm, stationary):
            if folder != module.SOURCE.parent:
                module.SOURCE = folder / module.SOURCE.name
                module._kernel.cache_clear()
        if config is None:
            return stationary.stationary(x, w, out, **extra)
        return gemm.gemm(x, w, out, config, **extra)

    def reference(rows, dtype, derivative=False):
        y = x[rows].to(dtype) @ (w if back else w.t()).to(dtype)
        if epilogue in ("plain", "dgrad"):
            return y
        if back:
            return (y.double() * slope[rows].double()).to(dtype)
        y = y + bias.to(dtype)
        if epilogue in ("residual", "join"):
            state = masks.state._replace(sample_offset=masks.state.sample_offset + rows.start // T)
            y = c[rows].to(dtype) + masked(y, masks._replace(state=state)).to(dtype)
        if derivative:
            return torch.autograd.grad(F.gelu(y.requires_grad_()).sum(), y)[0]
        return F.gelu(y) if epilogue == "gelu" else y

    def cublas():
        torch.mm(x, w if back else w.t(), out=out)

    def cublas_bias():
        torch.addmm(bias, x, w.t(), out=out)

    others = {"cublas": cublas} | ({} if back else {"cublas+bias": cublas_bias})
    if epilogue == "join":
        others = joins(x, w, bias, c, masks, out)
    return launch, reference, out, slope if epilogue == "gelu" else None, others


def joins(x, w, bias, residual, masks, out):
    """Attention's output projection with the join behind it, in three divisions of the work."""
    import torch

    from ridgeline.ops.linear import stationary
    from ridgeline.ops.norm import triton as norms

    h, scale, shift = torch.empty_like(out), torch.ones_like(bias), torch.zeros_like(bias)
    mean, rstd = (torch.empty(len(out), device="cuda") for _ in range(2))

    def norm(**rest):
        norms.norm_forward_raw(out, scale, shift, h, mean, rstd, eps=1e-5, kind="layernorm", **rest)

    def join():
        norm(
            r_NC=out, residual_NC=residual, branch_bias_C=bias,
            T=masks.T, p=masks.p, dropout=masks.state, site=masks.site,
        )  # fmt: skip

    def torch_join():
        torch.mm(x, w.t(), out=out)
        join()

    def cuda_join():
        stationary.stationary(x, w, out)
        join()

    def residual_norm():
        stationary.stationary(x, w, out, bias_N=bias, residual_MN=residual, masks=masks)
        norm()

    return {"torch": torch_join, "cuda": cuda_join, "residual": residual_norm}


def configurations(K, epilogue, label):
    """The kernels worth timing: a configuration of `gemm`, None for `stationary`."""
    from ridgeline.ops.linear.gemm import Config

    return {"weights": None} if K <= 512 else {"m128": Config()}


def check(launch, reference, out, slope, config, folder):
    """Error relative to torch's bf16, over all outputs; the same bits twice."""
    import torch

    M = out.shape[0]
    out.fill_(float("nan"))
    sums = launch(config, folder)
    torch.cuda.synchronize()
    first, again = out.clone(), launch(config, folder)
    torch.cuda.synchronize()
    same = torch.equal(first, out) and (sums is None or torch.equal(sums, again))
    ratio = 0.0
    for start in (0, M // 2, M - 1024):
        rows = slice(start, start + 1024)
        exact, plain = reference(rows, torch.float64), reference(rows, torch.bfloat16)
        ratio = max(ratio, float((out[rows].double() - exact).norm() / (plain.double() - exact).norm()))
    found = {"ratio": round(ratio, 3), "same": same, "finite": bool(torch.isfinite(out).all())}
    if sums is not None:
        total = out.double().sum(0)
        found["sums"] = float((sums.double().sum(0) - total).norm() / total.norm())
    if slope is not None:
        exact, right = reference(slice(0, 1024), torch.float64, True), slope[:1024].double()
        found["slope"] = round(float((right - exact).norm() / exact.norm()), 6)
    return found


def graph_of(step, count):
    """A graph of `count` calls."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                step()
    return graph


def joules():
    """What the card has used so far."""
    import ctypes

    from ridgeline.bench.nvml import Monitor

    monitor, millijoules = Monitor(), ctypes.c_ulonglong()
    monitor._nvml.nvmlDeviceGetTotalEnergyConsumption(monitor._handle, ctypes.byref(millijoules))
    return millijoules.value / 1e3


def hot(graph, seconds=0.6):
    """Milliseconds and joules of a graph when it has run for so long that the power limit holds the clock."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    runs = max(2, int(seconds * 500 / marks[0].elapsed_time(marks[1])))
    used = []
    for mark in marks[1:]:
        for _ in range(runs):
            graph.replay()
        mark.record()
        torch.cuda.synchronize()
        used.append(joules())
    return marks[1].elapsed_time(marks[2]) / runs, (used[1] - used[0]) / runs


def in_turns(graphs, count, turns=6):
    """Sorted µs of a call of each graph, which holds `count` of them: a replay a turn, their order swapped, the first left out."""
    import torch

    times = {key: [] for key in graphs}
    for turn in range(turns):
        for key in list(graphs) if turn % 2 else list(graphs)[::-1]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[key].replay()
            end.record()
            torch.cuda.synchronize()
            times[key].append(begin.elapsed_time(end) / count * 1e3)
    return {key: sorted(us[1:]) for key, us in times.items()}


def run_case(name):
    """Checks every configuration and variant, then times all of them in turn."""
    import torch

    M, N, K, epilogue = CASES[name]
    launch, reference, out, slope, others = problem(M, N, K, epilogue)
    count = 4 if M >= M_BIG else 40
    graphs, found = {}, {}
    for label, folder in variants().items():
        for kernel, config in configurations(K, epilogue, label).items():
            key = f"{label} {kernel}"
            try:
                found[key] = check(launch, reference, out, slope, config, folder)
                graphs[key] = graph_of(lambda c=config, f=folder: launch(c, f), count)
            except Exception as error:
                found[key] = {"error": repr(error)[:300]}
    for key, step in others.items():
        found[key], graphs[key] = {}, graph_of(step, count)
    for key, us in in_turns(graphs, count, turns=9).items():
        found[key] |= {"us": round(us[len(us) // 2], 1), "best": round(us[0], 1), "worst": round(us[-1], 1)}
        if M > 8192:
            ms, energy = hot(graphs[key])
            found[key] |= {"hot": round(ms / count * 1e3, 1), "mJ": round(energy / count * 1e3, 1)}
    print(name, M, N, K)
    for key, row in found.items():
        print(f"    {key:20}", row, flush=True)
    Path(f"{OUT}/gemm_{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "child":
        run_case(sys.argv[2])
        sys.exit()
    began, results = time.time(), {}
    limit = float(sys.argv.pop(1)) if sys.argv[1:] and sys.argv[1].isdigit() else 90
    for case in sys.argv[1:] or CASES:
        left = limit - (time.time() - began)
        if left < 5:
            print(case, "no time left", flush=True)
            continue
        path = Path(OUT) / f"gemm_{case}.json"
        path.unlink(missing_ok=True)
        try:
            subprocess.run([sys.executable, __file__, "child", case], timeout=left, check=True)
            results[case] = json.loads(path.read_text())
            path.unlink()
        except Exception as error:
            print(case, "FAILED", repr(error)[:200], flush=True)
            results[case] = {"error": repr(error)[:300]}
    Path(f"{OUT}/gemm.json").write_text(json.dumps(results))
    print(f"total {time.time() - began:.0f} s")
