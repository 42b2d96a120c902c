"""fp32 on a card: the short-window attention against fp64 and beside PyTorch's, then where a step's time goes.

PYTHONPATH=src OUT=$OUT python3 dev/gpu/float_gpu.py [SECONDS]      (about 40 s; $OUT/float.json)
"""

import collections
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from fused_gpu import captured, chosen, interleaved

from ridgeline.engine import TrainStep
from ridgeline.models import DecoderConfig, LanguageConfig, LanguageModel
from ridgeline.ops.attention import float32, long, short

END = time.time() + float(sys.argv[1] if len(sys.argv) > 1 else 60)
OUT, found = os.environ.get("OUT", "/tmp"), {}
torch.backends.cuda.matmul.allow_tf32 = False


def tell(key, value):
    found[key] = value
    print(key, value, flush=True)
    json.dump(found, open(f"{OUT}/float.json", "w"))


def four(step):
    """A graph of four calls."""
    return captured(lambda: [step() for _ in range(4)])


def attention(name, B, T, H, G):
    D, scale = 32, 32**-0.5
    joint = torch.randn(B, T, (H + 2 * G) * D, device="cuda")
    gradient = torch.empty_like(joint)
    split = lambda x: [y.unflatten(-1, (-1, D)) for y in x.split((H * D, G * D, G * D), -1)]
    (q, k, v), (dq, dk, dv) = split(joint), split(gradient)
    d_out, out, lse = torch.randn(B, T, H, D, device="cuda"), torch.empty(B, T, H, D, device="cuda"), torch.empty(B, H, T, device="cuda")
    drop = short.dropping(0.0, None, 0)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [x.transpose(1, 2).repeat_interleave(1 if n == 0 else H // G, 1) for n, x in enumerate(exact)]
    weights = (wide[0] @ wide[1].mT * scale).masked_fill(torch.ones(T, T, device="cuda", dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    right = (weights @ wide[2]).transpose(1, 2)
    wanted = [right.detach(), *torch.autograd.grad(right, exact, d_out.double())]
    relative = lambda got: [f"{float((a - b).norm() / b.norm()):.1e}" for a, b in zip(got, wanted)]
    runs = {
        "cuda-fp32": (
            lambda: float32.forward(q, k, v, out, lse, scale=scale),
            lambda: float32.backward(d_out, q, k, v, out, lse, dq, dk, dv, scale=scale),
        ),
        "triton": (
            lambda: long.forward(q, k, v, None, out, lse, scale=scale, drop=drop),
            lambda: long.backward(d_out, q, k, v, None, out, lse, dq, dk, dv, None, scale=scale, drop=drop),
        ),
    }
    graphs = {}
    for key, (forward, backward) in runs.items():
        for x in (out, gradient, lse):
            x.fill_(float("nan"))
        forward()
        backward()
        torch.cuda.synchronize()
        first = gradient.clone()
        tell(f"{name} {key} errors out dq dk dv", relative((out, dq, dk, dv)))
        backward()
        torch.cuda.synchronize()
        if not torch.equal(first, gradient):
            tell(f"{name} {key}", "NOT REPEATABLE")
        graphs[f"{key} forward"], graphs[f"{key} backward"] = four(forward), four(backward)
    heads = [x.detach().transpose(1, 2).repeat_interleave(1 if n == 0 else H // G, 1) for n, x in enumerate((q, k, v))]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        sdpa = lambda: F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        y = sdpa()
        tell(f"{name} efficient errors", relative((y.transpose(1, 2),)))
        graphs["efficient forward"] = four(sdpa)
    tell(f"{name} us", {key: round(us / 4, 1) for key, us in interleaved(graphs, 7, 5).items()})


def step(name, config, beside):
    name += "" if beside else " one stream"
    m = LanguageModel(LanguageConfig(vocabulary=65, decoder=config), impl="fused", seed=0).cuda()
    train = TrainStep(m, precision="fp32")
    tokens = torch.randint(65, (32, 257), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    with chosen(True, {"side_stream": beside}):
        for _ in range(20):
            train(batch)
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(50):
        train(batch)
    b.record()
    torch.cuda.synchronize()
    tell(f"{name} step ms", round(a.elapsed_time(b) / 50, 4))
    if not beside:
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            train(batch)
        torch.cuda.synchronize()
    total, count = collections.Counter(), collections.Counter()
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            total[e.name[:70]] += (e.time_range.end - e.time_range.start) / 3
            count[e.name[:70]] += 1
    for kernel, us in total.most_common(24):
        tell(f"  {name} {kernel}", f"{us:.0f} us {count[kernel] / 3:.0f} x")


for name, kv in (("gpt2", 8), ("fast", 1)):
    attention(name, 32, 256, 8, kv)
attention("odd", 3, 177, 8, 2)
for name, config in (
    ("gpt2-c256", DecoderConfig(layers=6, width=256, heads=8, gelu="tanh")),
    ("fast-c256", DecoderConfig(layers=6, width=256, heads=8, kv_heads=1, mlp_width=512, norm="rmsnorm", bias=False, gelu="tanh")),
):
    for beside in (True, False):
        if time.time() < END - 8:
            step(name, config, beside)
