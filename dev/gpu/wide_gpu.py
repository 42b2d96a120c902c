"""The products of gpt2-124m's blocks by every kernel that could make them: error beside PyTorch's over fp64, the same bits
again, µs in turns from cold clocks and at the power limit.

    PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/wide_gpu.py [seconds] [product …]    (50 s cold, alone; $OUT/wide.json)
ROWS=8192 in the environment: so many instead of 65,536.

VARIANTS="name=folder,…" in the environment: other copies of the streaming product's sources, timed beside the package's;
REGISTERS="…": of those of the product with weights in registers.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OUT = os.environ.get("OUT", "/tmp")
N, C, F = int(os.environ.get("ROWS", 65536)), 768, 3072
HAL = 131072, 512, 832  # rows, the state's width, columns of the policy heads' first products
ROWS, CLASSES = 5120, 50304  # of a chunk of logits
CHECKED, LAUNCHES = 2048, 40  # rows; launches whose bits are compared
FOLDERS, HOLDERS = (
    dict(pair.split("=") for pair in os.environ.get(name, "").split(",") if pair) for name in ("VARIANTS", "REGISTERS")
)


def streaming(folder, *arguments, **rest):
    """The streaming product from a folder's sources, or the package's."""
    from ridgeline.ops.linear import gemm

    source = Path(folder).resolve() / "gemm_sm90.cu" if folder else Path(gemm.__file__).parent / "gemm_sm90.cu"
    if source != gemm.SOURCE:
        gemm.SOURCE = source
        gemm._kernel.cache_clear()
    return gemm.gemm(*arguments, gemm.Config(), **rest)


def registers(folder, *arguments, **rest):
    """The product with weights in registers from a folder's sources, or the package's."""
    from ridgeline.ops.linear import stationary

    source = Path(folder).resolve() / "stationary_sm90.cu" if folder else Path(stationary.__file__).parent / "stationary_sm90.cu"
    if source != stationary.SOURCE:
        stationary.SOURCE = source
        stationary._kernel.cache_clear()
    return stationary.stationary(*arguments, **rest)


def kernels(cublas):
    """Kernels by name: functions that take a product's operands."""
    named = {name: functools.partial(streaming, folder) for name, folder in {"streaming": "", **FOLDERS}.items()}
    named |= {name: functools.partial(registers, folder) for name, folder in {"registers": "", **HOLDERS}.items()}
    return named | {"cuBLAS": cublas}


def products():
    """Each product: what it launches by kernel, its result, and the same on some rows in any precision."""
    import torch
    from torch.nn import functional

    from ridgeline.ops.linear import gemm
    from ridgeline.ops.linear.products import slope_empty

    torch.manual_seed(0)
    draw = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).bfloat16()
    x, dz, wide = draw(N, C), draw(N, C), draw(N, F)
    up, down, qkv, out = (draw(*s, scale=s[1] ** -0.5) for s in ((F, C), (C, F), (3 * C, C), (C, C)))
    long_bias, short_bias, qkv_bias = draw(F, scale=0.3), draw(C, scale=0.3), draw(3 * C, scale=0.3)
    a, du, r, y = torch.empty_like(wide), torch.empty_like(wide), torch.empty_like(x), draw(N, 3 * C)
    slope = slope_empty(a, N, F, coded=True)

    def hidden(rows, dtype):
        u = functional.linear(x[rows].to(dtype), up.to(dtype), long_bias.to(dtype)).detach().requires_grad_()
        return u, functional.gelu(u, approximate="tanh")

    def gradient(rows, dtype):
        u, activated = hidden(rows, dtype)
        return torch.autograd.grad(activated, u, dz[rows].to(dtype) @ down.to(dtype))[0]

    linear = lambda x, w, b, rows, dtype: functional.linear(x[rows].to(dtype), w.to(dtype), b.to(dtype))
    yield "up", kernels(lambda x, w, o, **_: torch.mm(x, w.t(), out=o)), lambda k: k(
        x, up, a, bias_N=long_bias, gelu="tanh", slope_MN=slope
    ), a, lambda rows, dtype: hidden(rows, dtype)[1].detach()
    yield "dgelu", kernels(lambda x, w, o, **_: torch.mm(x, w, out=o)), lambda k: k(
        dz, down, du, transposed_b=True, factor_MN=slope
    ), du, gradient
    yield "qkv", kernels(lambda x, w, o, bias_N: torch.addmm(bias_N, x, w.t(), out=o)), lambda k: k(
        x, qkv, y, bias_N=qkv_bias
    ), y, lambda rows, dtype: linear(x, qkv, qkv_bias, rows, dtype)
    yield "out", kernels(lambda x, w, o, **_: torch.mm(x, w.t(), out=o)), lambda k: k(
        x, out, r, bias_N=short_bias, residual_MN=dz
    ), r, lambda rows, dtype: dz[rows].to(dtype) + linear(x, out, short_bias, rows, dtype)
    yield "dx out", kernels(lambda x, w, o, **_: torch.mm(x, w, out=o)), lambda k: k(
        dz, out, r, transposed_b=True
    ), r, lambda rows, dtype: dz[rows].to(dtype) @ out.to(dtype)
    long = kernels(lambda x, w, o, **_: torch.mm(x, w.t(), out=o))
    for name in ("registers", *HOLDERS):
        del long[name]
    yield "down", long, lambda k: k(
        wide, down, r, bias_N=short_bias, residual_MN=dz
    ), r, lambda rows, dtype: dz[rows].to(dtype) + linear(wide, down, short_bias, rows, dtype)
    chunk, classes, logits = draw(ROWS, C), draw(CLASSES, C, scale=C**-0.5), draw(ROWS, CLASSES)
    yield "logits", kernels(lambda x, w, o: torch.mm(x, w.t(), out=o)), lambda k: k(
        chunk, classes, logits
    ), logits, lambda rows, dtype: chunk[rows].to(dtype) @ classes.t().to(dtype)
    del chunk, classes, logits
    rows, width, heads = HAL
    q, state, weight, into = draw(rows, heads), draw(rows, width), draw(heads, width, scale=heads**-0.5), draw(rows, width)
    terms, factor = torch.randn(2, rows, device="cuda"), torch.full((1,), 0.7, device="cuda")
    ends = kernels(lambda x, w, o, **_: torch.mm(x, w, out=o))
    for name in ("registers", *HOLDERS):
        del ends[name]
    yield "terms", ends, lambda k: k(
        q, weight, into, transposed_b=True, terms=gemm.RowTerms(state, terms, factor)
    ), into, lambda some, dtype: (
        0.7 * (q[some].to(dtype) @ weight.to(dtype)).to(dtype)
        + terms[0, some, None].to(dtype)
        + terms[1, some, None].to(dtype) * state[some].to(dtype)
    )


def check(launch, kernel, result, plainly, gelu):
    """Error over PyTorch's in bf16, and how many of some launches give other bits than the first."""
    import torch

    first, differ, ratio = None, 0, 0.0
    for _ in range(LAUNCHES):
        result.fill_(float("nan"))
        sums = launch(kernel)
        torch.cuda.synchronize()
        if first is None:
            first = result.clone(), None if sums is None else sums.clone()
        differ += not (torch.equal(first[0], result) and (sums is None or torch.equal(first[1], sums)))
    for start in (0, len(result) // 2 - 64, len(result) - CHECKED):
        rows = slice(start, start + CHECKED)
        exact, bf16 = plainly(rows, torch.float64).double(), plainly(rows, torch.bfloat16).double()
        ratio = max(ratio, float((result[rows].double() - exact).norm() / (bf16 - exact).norm()))
    found = {"ratio": round(ratio, 3), "differ": differ, "right": differ == 0 and ratio < (1.3 if gelu else 1.05)}
    if sums is not None:
        total = result.double().sum(0)
        found["sums off"] = float((sums.double().sum(0) - total).norm() / total.norm())
    return found


def at_the_limit(graphs, count, segment=0.12, rounds=4):
    """Median µs of a call in the second halves of segments that follow each other without a pause."""
    import torch

    times = {key: [] for key in graphs}
    for turn in range(rounds):
        for key in list(graphs) if turn % 2 else list(graphs)[::-1]:
            marks, begin = [], time.time()
            while time.time() < begin + segment:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                graphs[key].replay()
                if len(marks) > 2:
                    marks[-3].synchronize()
            torch.cuda.synchronize()
            spans = [p.elapsed_time(q) / count * 1e3 for p, q in zip(marks, marks[1:])]
            times[key] += spans[len(spans) // 2 :]
    return {key: statistics.median(us) for key, us in times.items()}


def compile_all():
    """Every kernel into the cache, side by side."""
    me = [sys.executable, __file__, "compile"]
    running = [subprocess.Popen([*me, str(i)]) for i in range(len(list(wanted())))]
    for process in running:
        process.wait()


def wanted():
    """(source, macros) of every kernel."""
    from ridgeline.ops.linear import gemm, stationary

    form = gemm.Form
    forms = {
        C: [
            form(bias=True, gelu="tanh", slope=True, coded=True), form(transposed_b=True, factor=True, coded=True),
            form(bias=True), form(bias=True, residual=True), form(transposed_b=True), form(),
        ],
        F: [form(bias=True, residual=True)],
        HAL[2]: [form(transposed_b=True, terms=True)],
    }  # fmt: skip
    for K, many in forms.items():
        for one in many:
            for folder in (gemm.SOURCE.parent, *map(Path, FOLDERS.values())):
                yield folder.resolve() / "gemm_sm90.cu", gemm.defines(gemm.Config(), K, one)
            for folder in (gemm.SOURCE.parent, *map(Path, HOLDERS.values())) if K == C else ():
                yield folder.resolve() / "stationary_sm90.cu", stationary.defines(K, one)


def main(seconds, names):
    """Checks every kernel of each product and times those that are right."""
    from gemm_gpu import graph_of, in_turns

    end, results, hidden = time.time() + seconds, {}, None
    compile_all()
    print(f"compiled, {end - time.time():.0f} s left", flush=True)
    for name, by, launch, result, plainly in products():
        hidden = launch if name == "up" else hidden
        if (names and name not in names and not (name == "up" and "dgelu" in names)) or time.time() > end - 3:
            continue
        found, graphs = {}, {}
        for key, kernel in by.items():
            try:
                if name == "dgelu" and key != "cuBLAS":
                    hidden(kernel)  # its codes lie in an order of its own
                found[key] = check(launch, kernel, result, plainly, name in ("up", "dgelu")) if key != "cuBLAS" else {}
                if found[key].get("right", True):
                    graphs[key] = graph_of(lambda k=kernel: launch(k), 4)
            except Exception as error:
                found[key] = {"error": repr(error)[:200]}
        for key, us in in_turns(graphs, 4, turns=9).items():
            found[key] |= {"us": round(us[len(us) // 2], 1), "best": round(us[0], 1)}
        for key, us in at_the_limit(graphs, 4).items():
            found[key]["hot"] = round(us, 1)
        for key, row in found.items():
            print(f"{name:7s} {key:12s}", row, flush=True)
        results[name] = found
        Path(f"{OUT}/wide.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        from ridgeline.ops import _cuda

        path, macros = list(wanted())[int(sys.argv[2])]
        _cuda.build(path, macros, "sm_90a")
        sys.exit()
    limit = float(sys.argv.pop(1)) if sys.argv[1:] and sys.argv[1].replace(".", "").isdigit() else 45
    main(limit, sys.argv[1:])
