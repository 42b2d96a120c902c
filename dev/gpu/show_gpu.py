"""Every row of the fused block's table in one run: each op beside PyTorch's and its goal, on a cool card and at its limit.

    RIDGELINE_REVISION=… PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/show_gpu.py [seconds] [ops|hal-20m|gpt2-c256|fast-c256 …]

Alone on a card; 40 s with full caches. A kernel that is not right against float64 gets no time. Cool: a burst of four
calls after a rest, median of seven. Hot: all rows in turns, none resting, so that the power limit holds the clock, as in
a step. Outside the blocks: the whole step less the stack of its six blocks, in turns. $OUT/show.json is a record of kind
"ops" whose µs are the hot ones, with the cool ones as rows "…, cool"; each part is written as soon as it is known.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
B, T, H, D, C, F, Q, P = 512, 256, 8, 64, 512, 2048, 1536, 0.2
N = B * T
FLOPS, BYTES = 800e12, 4.2e12
SHAPE = f"{N} x {C}"
REST_S = 0.06
HEAD_START = 2_000_000  # cycles by which the host is ahead, so that no launch is waited for


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def draw(*shape, scale=1.0):
    import torch

    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Row:
    """One op: its goal, what PyTorch does in its place, FLOPs and bytes, and how far it is from float64 beside PyTorch."""

    def __init__(self, name, ours, torch_name, theirs, *, goal=None, flops=0, rows=0, right=lambda: (0.0, 1.0)):
        self.name, self.ours, self.torch_name, self.theirs, self.goal, self.right = name, ours, torch_name, theirs, goal, right
        self.flops, self.bytes = flops, rows * N * 2


def attention_row():
    """Relative attention with dropout, both passes; PyTorch's is plain, without either."""
    import attn_gpu
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = attn_gpu.TIMES["HAL-20M p=.2"]
    us = attn_gpu.Ours(case, attn_gpu.make(case))
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in (us.q, us.k, us.v))
    do = us.do.transpose(1, 2).contiguous()

    def ours():
        us.fwd()
        us.bwd(True)

    def theirs():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), do)

    def right():
        small = attn_gpu.CASES["hal20"]
        tensors = attn_gpu.make(small)
        exact, plain = (attn_gpu.reference(small, tensors, dtype) for dtype in (torch.float64, torch.bfloat16))
        mine = attn_gpu.Ours(small, tensors)
        mine.fwd()
        mine.bwd(True)
        got = mine.out() | mine.grads()
        return max((relative(got[n], exact[n]) / max(relative(plain[n], exact[n]), 1e-9), n) for n in got if n != "lse")[0], 1.0

    rows = [Row("relative attention, forward + backward, dropout 0.2", ours, "plain SDPA, cuDNN, neither", theirs, goal=1000,
                rows=12 * C, right=right)]  # fmt: skip
    parts = {"forward": (us.fwd, 4), "backward with column sums": (lambda: us.bwd(True), 8)}
    return rows + [Row(f"relative attention, {n}", step, None, None, rows=units * C) for n, (step, units) in parts.items()]


def norm_rows():
    import torch

    from ridgeline.ops.dropout import DropoutState
    from ridgeline.ops.linear import Masks
    from ridgeline.ops.linear.reference import masked
    from ridgeline.ops.norm import triton as norms

    r, z, h, out = draw(N, C), draw(N, C), draw(N, C), draw(N, C)
    scale, shift, bias = 1 + draw(C, scale=0.1), draw(C, scale=0.1), draw(C)
    mean, rstd = (torch.empty(N, device="cuda") for _ in range(2))
    state = DropoutState(torch.tensor([5, 9], device="cuda"), 3)
    norm = torch.nn.functional.layer_norm

    def alone():
        norms.norm_forward_raw(r, scale, shift, h, mean, rstd, eps=1e-5, kind="layernorm")

    def joined():
        norms.norm_forward_raw(
            z, scale, shift, h, mean, rstd, eps=1e-5, kind="layernorm", r_NC=out, residual_NC=r, branch_bias_C=bias,
            T=T, p=P, dropout=state, site=2,
        )  # fmt: skip

    def torch_joined():
        norm(r + torch.nn.functional.dropout(z + bias, P), (C,), scale, shift)

    def right(step, stream):
        def ratio():
            step()
            exact = norm(stream()[:1024].double(), (C,), scale.double(), shift.double())
            return relative(h[:1024], exact), relative(norm(stream()[:1024].bfloat16(), (C,), scale, shift), exact)

        return ratio

    first = Masks(P, state, 2, T)
    stream = lambda: r[:1024].double() + masked(z[:1024].double() + bias.double(), first)
    return [
        Row("LayerNorm forward, alone", alone, "layer_norm", lambda: norm(r, (C,), scale, shift), goal=75, rows=2 * C,
            right=right(alone, lambda: r)),
        Row("LayerNorm forward, joined with the residual, dropout", joined, "add, dropout, add, layer_norm", torch_joined,
            goal=140, rows=4 * C, right=right(joined, stream)),
    ]  # fmt: skip


def up_rows():
    import torch

    from ridgeline.ops.linear import products
    from ridgeline.ops.linear.folded import FoldedNorm

    x, w, bias, a = draw(N, C), draw(F, C, scale=C**-0.5), draw(F), draw(N, F)
    slope = products.slope_empty(a, N, F)
    mean, rstd = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")
    scale, shift = 1 + draw(C, scale=0.1), draw(C, scale=0.1)
    wide = x.float().unflatten(1, (-1, 64))
    shares = torch.stack([wide.sum(2), wide.square().sum(2)], 2).transpose(0, 1).contiguous()
    folded = FoldedNorm("layernorm", 1e-5, scale, shift, shares, mean, rstd)

    def up(norm=None):
        products.forward_raw(x, w, a, bias_M=bias, gelu="exact", slope_NM=slope, norm=norm, impl="cuda")

    def right(norm):
        def ratio():
            up(norm)
            found = []
            for dtype in (torch.float64, torch.bfloat16):
                h = x[:1024].to(dtype)
                if norm is not None:
                    h = torch.nn.functional.layer_norm(h, (C,), scale.to(dtype), shift.to(dtype))
                u = (h @ w.to(dtype).t() + bias.to(dtype)).requires_grad_()
                y = torch.nn.functional.gelu(u)
                found.append((y.detach(), torch.autograd.grad(y.sum(), u)[0]))
            (y, dy), (y_torch, dy_torch) = found
            return max(relative(a[:1024], y) / relative(y_torch, y), relative(slope[:1024], dy) / relative(dy_torch, dy)), 1.0

        return ratio

    bare, gelu = lambda: torch.mm(x, w.t()), torch.nn.functional.gelu
    return [
        Row("linear + bias + exact GELU, its derivative stored", up, "product alone", bare, goal=520, flops=2 * N * C * F,
            rows=C + 2 * F, right=right(None)),
        Row("the same behind a folded norm", lambda: up(folded), "layer_norm, linear, gelu", lambda: gelu(torch.addmm(
            bias, torch.nn.functional.layer_norm(x, (C,), scale, shift), w.t())), flops=2 * N * C * F, rows=C + 2 * F, right=right(folded)),
    ]  # fmt: skip


def weight_rows():
    import torch

    from ridgeline.ops.linear import products

    pairs = [(draw(N, m), draw(N, k)) for m, k in ((Q, C), (C, C), (F, C), (C, F))]
    into = [torch.zeros(dy.shape[1], x.shape[1], device="cuda") for dy, x in pairs]

    def ours():
        for (dy, x), gradient in zip(pairs, into, strict=True):
            products.weight_gradient_raw(dy, x, gradient, accumulate=False)

    def theirs():
        for dy, x in pairs:
            torch.mm(dy.t(), x)

    def right():
        ours()
        found = [(relative(g, exact := dy.double().t() @ x.double()), relative(dy.t() @ x, exact)) for (dy, x), g in zip(pairs, into)]
        return max(mine / other for mine, other in found), 1.0

    flops = 2 * N * sum(dy.shape[1] * x.shape[1] for dy, x in pairs)
    return [Row("weight gradients, four of a layer, into fp32", ours, "cuBLAS, bf16", theirs, goal=1264, flops=flops, right=right)]


def burst(graph, count):
    import torch

    time.sleep(REST_S)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def warm(graphs, count, seconds):
    """Median µs of a call of each graph, in turns without a rest: the first half of the seconds does not count."""
    import torch

    times, began = {key: [] for key in graphs}, time.time()
    while time.time() < began + seconds or len(next(iter(times.values()))) < 3:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        torch.cuda._sleep(HEAD_START)
        marks[0].record()
        for graph, mark in zip(graphs.values(), marks[1:]):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        for key, a, b in zip(graphs, marks, marks[1:]):
            times[key].append(a.elapsed_time(b) / count * 1e3)
    return {key: statistics.median(us[len(us) // 2 :]) for key, us in times.items()}


def result(name, impl, us, row=None, theirs=None, shape=SHAPE, error=None):
    """A row of the record."""
    floor = max(row.flops / FLOPS, row.bytes / BYTES) * 1e6 if row is not None else 0
    return {
        "name": name, "shape": shape, "impl": impl, "us": us and round(us, 1), "error": error,
        "tflops": round(row.flops / us / 1e6, 1) if us and row is not None and row.flops else None,
        "tb_per_s": round(row.bytes / us / 1e6, 2) if us and row is not None and row.bytes else None,
        "floor_share": round(floor / us, 3) if us and floor else None,
        "vs_pytorch": round(theirs / us, 2) if us and theirs else None,
    }  # fmt: skip


def ops(seconds):
    """Checks, then times of all single ops."""
    import torch
    from gemm_gpu import graph_of

    torch.manual_seed(0)
    rows, found, graphs, count = [], [], {}, 4
    for group in (norm_rows, up_rows, weight_rows, attention_row):
        try:
            rows += group()
        except Exception as fault:
            found.append(result(group.__name__, "cuda", None, error=repr(fault)[:200]))
            print(group.__name__, "FAILED", repr(fault)[:200], flush=True)
    for row in rows:
        try:
            mine, other = row.right()
            if not mine <= 1.5 * other:
                raise ValueError(f"wrong: {mine:.3g} where PyTorch's error is {other:.3g}")
            graphs[row.name] = graph_of(row.ours, count)
            if row.theirs is not None:
                graphs[row.torch_name] = graph_of(row.theirs, count)
        except Exception as fault:
            found.append(result(row.name, "cuda", None, error=repr(fault)[:200]))
            print(f"{row.name}: FAILED {fault!r}"[:200], flush=True)
    cool = {key: statistics.median(burst(graph, count) for _ in range(7)) for key, graph in graphs.items()}
    hot = warm(graphs, count, max(2.0, min(5.0, seconds / 4)))
    for row in rows:
        if row.name in graphs:
            theirs = (cool.get(row.torch_name), hot.get(row.torch_name))
            found.append(result(row.name, "ridgeline", hot[row.name], row, theirs[1]))
            found.append(result(f"{row.name}, cool", "ridgeline", cool[row.name], row, theirs[0]))
            if row.theirs is not None:
                found += [result(row.name, row.torch_name, theirs[1], row), result(f"{row.name}, cool", row.torch_name, theirs[0], row)]
            told = f"; {row.torch_name} {theirs[0]:.1f} cool, {theirs[1]:.1f} hot" if row.theirs is not None else ""
            goal = f"goal {row.goal}" if row.goal else ""
            print(f"{row.name}: {cool[row.name]:.1f} us cool, {hot[row.name]:.1f} hot; {goal}{told}", flush=True)
    return found


def torch_stack(name, layers):
    """PyTorch's own blocks in bf16, attention as the articles write it, forward and backward in a graph."""
    import types

    import fused_gpu as fused
    import torch

    from ridgeline.bench.contenders import _explicit_attention
    from ridgeline.models.decoder import Attention

    m, batch, length = fused.model_of(name, "torch", layers)
    m = m.cuda().bfloat16().train()
    if m.config.decoder.positions == "relative":
        for module in m.modules():
            if isinstance(module, Attention):
                module.forward = types.MethodType(_explicit_attention, module)
    x = torch.randn(batch, length, m.config.decoder.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    weights = [p for n, p in m.decoder.named_parameters() if n != "positions"]
    return Captured(lambda: torch.autograd.grad(m.decoder.transform(x, None), [x, *weights], dy, allow_unused=True))


class Captured:
    """A graph, and the function that holds what it reads and writes: what is freed behind a graph is somebody else's."""

    def __init__(self, step):
        import fused_gpu as fused

        self.step, self.graph = step, fused.captured(step)

    def replay(self):
        self.graph.replay()


def block(name, seconds):
    """A block of `name`, and for hal-20m all that a step has outside its blocks."""
    import fused_gpu as fused
    import torch

    end, wide = time.time() + seconds, name == "hal-20m"
    goal = {"hal-20m": 5400, "gpt2-c256": 140, "fast-c256": 100}[name]
    shape = f"{N if wide else 8192} x {C if wide else 256}"
    step, layers, *_ = fused.stack_step(name)
    graphs = {"stack": Captured(step)}
    if wide:
        from ridgeline.bench.contenders import build_step, find_contender
        from ridgeline.bench.workloads import random_batch, workload

        case = workload("hal-20m")
        train, batch = build_step(find_contender("best"), case, torch.device("cuda")), random_batch(case, torch.device("cuda"))
        for _ in range(3):
            train(batch)
        torch.cuda.synchronize()
        graphs["step"] = type("Step", (), {"replay": staticmethod(lambda: train(batch))})
    found = []
    cool = {key: statistics.median(burst(graph, 1) for _ in range(7)) for key, graph in graphs.items()}
    hot = warm(graphs, 1, 4.0 if wide else 1.0)
    for key, us in (("", hot), (", cool", cool)):
        found.append(result(f"one block, forward + backward{key}", name, us["stack"] / layers, shape=shape))
        if wide:
            found.append(result(f"everything outside the six blocks{key}", name, us["step"] - us["stack"], shape=shape))
            found.append(result(f"whole step{key}", name, us["step"], shape=shape))
    print(f"{name} block: {cool['stack'] / layers:.1f} us cool, {hot['stack'] / layers:.1f} hot; goal {goal}", flush=True)
    if wide:
        outside = [us["step"] - us["stack"] for us in (cool, hot)]
        print(f"{name} outside its blocks: {outside[0]:.0f} us cool, {outside[1]:.0f} hot; goal 1800", flush=True)
    if time.time() < end - 4:
        few = 2
        graph = torch_stack(name, few)
        theirs = [statistics.median(burst(graph, few) for _ in range(5)), warm({"torch": graph}, few, 1.0)["torch"]]
        print(f"{name} block by PyTorch, captured, eager kernels: {theirs[0]:.1f} us cool, {theirs[1]:.1f} hot", flush=True)
        found += [result(f"one block, forward + backward{key}", f"{name}, PyTorch's eager kernels captured", us, shape=shape)
                  for key, us in zip((", cool", ""), theirs)]  # fmt: skip
    return found


def record(rows):
    """$OUT/show.json from what is known so far."""
    import torch

    from ridgeline.bench.circumstances import versions
    from ridgeline.bench.nvml import Monitor
    from ridgeline.records import OpResult, Record, WorkloadInfo, write_record

    fields = {field.name for field in dataclasses.fields(OpResult)}
    made = Record(
        kind="ops", date=datetime.now(UTC).isoformat(timespec="seconds"), git=os.environ.get("RIDGELINE_REVISION"),
        card=torch.cuda.get_device_name(), gpus=1, versions=versions(Monitor()),
        workload=WorkloadInfo(name="hal-20m", batch=B, context=T, precision="bf16"),
        ops=[OpResult(**{key: value for key, value in row.items() if key in fields}) for row in rows],
    )  # fmt: skip
    write_record(made, OUT / "show.json")


PARTS = {"ops": ops, **{name: (lambda seconds, name=name: block(name, seconds)) for name in ("hal-20m", "gpt2-c256", "fast-c256")}}

if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "child":
        (OUT / f"show_{sys.argv[2]}.json").write_text(json.dumps(PARTS[sys.argv[2]](float(sys.argv[3]))))
        sys.exit()
    seconds = next((float(a) for a in sys.argv[1:] if a.isdigit()), 60)
    end, found = time.time() + seconds, []
    wanted = [a for a in sys.argv[1:] if a in PARTS] or list(PARTS)
    for part in wanted:
        left, file = end - time.time(), OUT / f"show_{part}.json"
        if left < 6:
            print(part, "no time left", flush=True)
            continue
        file.unlink(missing_ok=True)
        try:
            subprocess.run([sys.executable, __file__, "child", part, f"{left - 1:.0f}"], timeout=left, check=True)
            found += json.loads(file.read_text())
            file.unlink()
            record(found)
        except Exception as fault:
            print(part, "FAILED", repr(fault)[:200], flush=True)
    print(f"total {seconds - (end - time.time()):.0f} s", flush=True)
