"""The Hopper GEMM on a GPU: numerics against float64, then times inside CUDA graphs, each case in its own process.

    PYTHONPATH=src python3 dev/gpu/gemm_gpu.py [case …]      (about 60 s; $OUT/gemm.json)

RL_GEMM_VARIANTS names folders with changed copies of the kernels' sources ("name=folder,…"), timed beside it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

OUT = os.environ.get("OUT", "/tmp")
M_BIG = 131072
CASES = {  # name: (M, N, K, epilogue)
    "up": (M_BIG, 2048, 512, "gelu"),
    "dgelu": (M_BIG, 2048, 512, "derivative"),
    "qkv": (M_BIG, 1536, 512, "bias"),
    "out": (M_BIG, 512, 512, "plain"),
    "out_dgrad": (M_BIG, 512, 512, "dgrad"),
    "out_residual": (M_BIG, 512, 512, "residual"),
    "down": (M_BIG, 512, 2048, "residual"),
    "small_up": (8192, 1024, 256, "gelu"),
    "small_dgelu": (8192, 1024, 256, "derivative"),
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
    from ridgeline.ops.linear.reference import Masks, masked

    torch.manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    x, bias, c = draw(M, K), draw(N), draw(M, N)
    back = epilogue in ("derivative", "dgrad")
    w = draw(K, N, scale=K**-0.5) if back else draw(N, K, scale=K**-0.5)
    out, pre = draw(M, N), draw(M, N)
    masks = Masks(P, DropoutState(torch.tensor([5, 9], device="cuda"), 3), 2, T)
    extra = {
        "plain": {},
        "dgrad": {"transposed_b": True},
        "bias": {"bias_N": bias},
        "gelu": {"bias_N": bias, "gelu": "exact", "pre_MN": pre},
        "residual": {"bias_N": bias, "residual_MN": c, "masks": masks},
        "derivative": {"transposed_b": True, "gelu": "exact", "gelu_input_MN": c},
    }[epilogue]

    def launch(config, folder):
        for module in (gemm, stationary):
            if folder != module.SOURCE.parent:
                module.SOURCE = folder / module.SOURCE.name
                module._kernel.cache_clear()
        if isinstance(config, int):
            return stationary.stationary(x, w, out, **extra, cluster=config)
        return gemm.gemm(x, w, out, config, **extra)

    def reference(rows, dtype):
        y = x[rows].to(dtype) @ (w if back else w.t()).to(dtype)
        if epilogue in ("plain", "dgrad"):
            return y
        if back:
            u = c[rows].to(dtype).requires_grad_()
            return y * torch.autograd.grad(F.gelu(u).sum(), u)[0]
        y = y + bias.to(dtype)
        if epilogue == "residual":
            state = masks.state._replace(sample_offset=masks.state.sample_offset + rows.start // T)
            y = c[rows].to(dtype) + masked(y, masks._replace(state=state)).to(dtype)
        return F.gelu(y) if epilogue == "gelu" else y

    def cublas():
        torch.mm(x, w if back else w.t(), out=out)

    def cublas_bias():
        torch.addmm(bias, x, w.t(), out=out)

    others = {"cublas": cublas} | ({} if back else {"cublas+bias": cublas_bias})
    return launch, reference, out, pre if epilogue == "gelu" else None, others


def configurations(K, epilogue, label):
    """The kernels worth timing: a configuration of `gemm`, or how many blocks of `stationary` share rows."""
    from ridgeline.ops.linear.gemm import Config

    found = {"weights": 1, "weights, pairs": 2} if K <= 512 else {}
    if label == "tree" and epilogue not in ("plain", "dgrad"):
        found |= {f"m{m}": Config(tile_m=m, resident=K <= 512) for m in (64, 128)}
    return found


def check(launch, reference, out, pre, config, folder):
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
    if pre is not None:
        import torch.nn.functional as F

        found["pre"] = float((F.gelu(pre.double()) - out.double()).norm() / out.double().norm())
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


def run_case(name):
    """Checks every configuration and variant, then times all of them in turn."""
    import torch

    M, N, K, epilogue = CASES[name]
    launch, reference, out, pre, others = problem(M, N, K, epilogue)
    count = 4 if M >= M_BIG else 40
    graphs, found = {}, {}
    for label, folder in variants().items():
        for kernel, config in configurations(K, epilogue, label).items():
            key = f"{label} {kernel}"
            try:
                found[key] = check(launch, reference, out, pre, config, folder)
                graphs[key] = graph_of(lambda c=config, f=folder: launch(c, f), count)
            except Exception as error:
                found[key] = {"error": repr(error)[:300]}
    for key, step in others.items():
        found[key], graphs[key] = {}, graph_of(step, count)
    times = {key: [] for key in graphs}
    for turn in range(9):
        for key, graph in graphs.items() if turn % 2 else reversed(graphs.items()):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[key].append(begin.elapsed_time(end) / count * 1e3)
    for key, us in times.items():
        us = sorted(us[1:])
        found[key] |= {"us": round(us[len(us) // 2], 1), "best": round(us[0], 1), "worst": round(us[-1], 1)}
    print(name, M, N, K)
    for key, row in found.items():
        print(f"    {key:20}", row, flush=True)
    Path(f"{OUT}/gemm_{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "child":
        run_case(sys.argv[2])
        sys.exit()
    began, results = time.time(), {}
    for case in sys.argv[1:] or CASES:
        path = Path(OUT) / f"gemm_{case}.json"
        path.unlink(missing_ok=True)
        try:
            subprocess.run([sys.executable, __file__, "child", case], timeout=60, check=True)
            results[case] = json.loads(path.read_text())
            path.unlink()
        except Exception as error:
            print(case, "FAILED", repr(error)[:200], flush=True)
            results[case] = {"error": repr(error)[:300]}
    Path(f"{OUT}/gemm.json").write_text(json.dumps(results))
    print(f"total {time.time() - began:.0f} s")
