"""Fused stack on the GPU: numerics against fp64, then time and kernel table. PYTHONPATH=src python3 dev/gpu/fused_gpu.py"""

import collections
import json
import os
import subprocess
import sys
import time

import torch

OUT = os.environ.get("OUT", "/tmp")
from ridgeline.models import *
from ridgeline.ops.dropout import DropoutState

D = DecoderConfig
TRUNKS = {
    "hal-20m": (D(layers=6, width=512, heads=8, positions="relative", position_table=1024, dropout=0.2), 512, 256),
    "hal-5m": (
        D(
            layers=6,
            width=256,
            heads=4,
            mlp_width=1024,
            positions="relative",
            position_table=1024,
            dropout=0.2,
            context=128,
        ),
        512,
        128,
    ),
    "gpt2-c256": (D(layers=6, width=256, heads=8, gelu="tanh"), 32, 256),
    "fast-c256": (
        D(layers=6, width=256, heads=8, kv_heads=1, mlp_width=512, norm="rmsnorm", bias=False, gelu="tanh"),
        32,
        256,
    ),
}


def make(name, impl, layers=None):
    c, B, T = TRUNKS[name]
    if layers:
        import dataclasses

        c = dataclasses.replace(c, layers=layers)
    m = LanguageModel(LanguageConfig(vocabulary=65, decoder=c), impl=impl, seed=0)
    return m, B, T


def check(name):
    ref, B, T = make(name, "reference", layers=2)
    B = 3
    g = torch.Generator().manual_seed(1)
    for n, p in ref.named_parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=g)
    x = torch.randn(B, T, ref.config.decoder.width, generator=g)
    dy = torch.randn(B, T, ref.config.decoder.width, generator=g)
    st = DropoutState(torch.tensor([3, 4], device="cuda"), 5)

    def run(model, dtype):
        d = model.decoder.cuda().to(dtype).train()
        xx = x.cuda().to(dtype).requires_grad_()
        for p in d.parameters():
            p.grad = None
        y = d(xx, st)
        y.backward(dy.cuda().to(dtype))
        return {
            "y": y.detach().double(),
            "x": xx.grad.double(),
            **{n: p.grad.double() for n, p in d.named_parameters() if p.grad is not None},
        }

    import copy

    base = {
        k: v.to(torch.bfloat16).float() for k, v in ref.state_dict().items()
    }  # all start from weights a bf16 model can hold
    x = x.bfloat16().float()
    dy = dy.bfloat16().float()
    ref.load_state_dict(base)
    exact = run(copy.deepcopy(ref), torch.float64)
    pt = run(copy.deepcopy(ref), torch.bfloat16)
    f, _, _ = make(name, "fused", layers=2)
    f.load_state_dict(base)
    f = run(f, torch.bfloat16)
    rel = lambda a, b: float((a - b).norm() / b.norm())
    rows = {k: (rel(f[k], exact[k]), rel(pt[k], exact[k])) for k in exact}
    worst = sorted(rows.items(), key=lambda kv: -kv[1][0] / max(kv[1][1], 1e-9))[:6]
    print(
        name,
        "worst ratios to torch bf16:",
        [(k, f"{a:.1e}/{b:.1e}={a / max(b, 1e-12):.2f}") for k, (a, b) in worst],
        flush=True,
    )
    return rows


def timing(name, impl):
    m, B, T = make(name, impl)
    m = m.cuda().bfloat16().train()
    tok = torch.randint(65, (B, T), device="cuda")
    batch = {"tokens": tok, "targets": tok.roll(-1, 1)}
    st = DropoutState(torch.tensor([3, 4], device="cuda"), 0)
    x = torch.randn(B, T, m.config.decoder.width, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    fn = m.decoder
    if impl == "torch":
        fn = torch.compile(m.decoder)

    def step():
        xx = x.detach().requires_grad_()
        y = fn(xx, st)
        torch.autograd.grad(y, [xx] + list(m.decoder.parameters()), dy, allow_unused=True)

    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        t0 = time.time()
        step()
        torch.cuda.synchronize()
        first = time.time() - t0
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=s):
            step()
    torch.cuda.synchronize()
    ts = []
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b))
    ts.sort()
    ms = ts[len(ts) // 2]
    out = {
        "name": name,
        "impl": impl,
        "trunk_ms": ms,
        "ms_per_block": ms / m.config.decoder.layers,
        "first_s": first,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30,
    }
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    c = collections.Counter()
    n = collections.Counter()
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            c[e.name] += e.device_time / 3 / m.config.decoder.layers
            n[e.name] += 1 / 3
    out["kernels"] = [(k[:110], round(v, 1), round(n[k], 1)) for k, v in c.most_common(28)]
    print(json.dumps({k: v for k, v in out.items() if k != "kernels"}), flush=True)
    for k in out["kernels"]:
        print("   ", *k)
    return out


if __name__ == "__main__":
    if len(sys.argv) > 1:
        r = check(sys.argv[2]) if sys.argv[1] == "check" else timing(sys.argv[2], sys.argv[3])
        json.dump(r, open(f"{OUT}/fused_{'_'.join(sys.argv[1:])}.part", "w"))
    else:
        jobs = [["check", n] for n in TRUNKS] + [["time", n, i] for n in TRUNKS for i in ("fused", "torch")]
        for j in jobs:
            try:
                p = subprocess.run([sys.executable, __file__, *j], timeout=100, capture_output=True, text=True)
                print(
                    p.stdout[-3500:],
                    "" if p.returncode == 0 else "FAILED " + " ".join(j) + p.stderr[-1500:],
                    flush=True,
                )
            except subprocess.TimeoutExpired:
                print("TIMEOUT", j, flush=True)
        parts = {}
        for f in os.listdir(OUT):
            if f.endswith(".part"):
                parts[f[:-5]] = json.load(open(f"{OUT}/{f}"))
                os.remove(f"{OUT}/{f}")
        json.dump(parts, open(f"{OUT}/fused.json", "w"))
