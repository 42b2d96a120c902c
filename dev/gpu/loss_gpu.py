"""A language model's head on a card: the kernels of its loss against fp64 and each other, then the whole head by rows of a chunk.

    PYTHONPATH=src:dev/gpu OUT=… python3 dev/gpu/loss_gpu.py [seconds]      ($OUT/loss.json; gpt2-124m: 65,536 × 768, 50,257 classes)
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from gemm_gpu import graph_of, hot, in_turns

from ridgeline.ops._triton.support import Launch
from ridgeline.ops.cross_entropy import cross_entropy, linear, rows
from ridgeline.ops.cross_entropy import triton as kernels

N, C, V, W, BF = 65536, 768, 50257, 50304, torch.bfloat16
CHECKED, CHUNK = 1024, 5120
SWEEPS = {"triton": None, "triton, 2 programs": Launch(rows=4, columns=2048, warps=8, per_processor=2), "triton, 8 deep": Launch(rows=8, columns=1024, warps=4, per_processor=4)}
CHUNKS = (5120, 5504, 11008, 16384)


def targets_of(count):
    targets = torch.randint(V, (count,), device="cuda")
    targets[torch.rand(count, device="cuda") < 0.1] = -100
    return targets


def loss_kernels(logits, targets, out, counts):
    """name: (what to call, its partial losses)."""
    partials = torch.full((rows.loss_partials(len(logits), logits),), float("nan"), device="cuda")
    made = {"rows": (lambda: rows.cross_entropy_raw(logits, targets, out, partials, counts, classes=V), partials)}
    for name, launch in SWEEPS.items():
        losses = torch.full((kernels.loss_partials(len(logits), V, logits, launch),), float("nan"), device="cuda")
        made[name] = (lambda launch=launch, losses=losses: kernels.cross_entropy_raw(logits, targets, out, losses, counts, classes=V, launch=launch), losses)
    return made


def check():
    """Relative errors of loss and gradient; only kernels within 1.1 times Triton's are timed."""
    torch.manual_seed(0)
    x, targets = torch.randn(CHECKED, W, device="cuda").to(BF) * 3, targets_of(CHECKED)
    wide = x[:, :V].double().requires_grad_()
    loss = cross_entropy(wide, targets)
    (right,) = torch.autograd.grad(loss, [wide])
    x[:, V:] = float("nan")
    counts, found = torch.zeros(kernels.COUNTS, dtype=torch.int32, device="cuda"), {}
    kernels.count_valid_raw(targets, counts)
    for name in ("triton", "triton, 2 programs", "triton, 8 deep", "rows"):
        results = []
        for _ in range(2):
            logits = x.clone()
            step, partials = loss_kernels(logits, targets, logits, counts)[name]
            step()
            results.append((logits, partials.clone()))
        same = all(torch.equal(a, b) for a, b in zip(*results))
        off = float((results[0][0][:, :V].double() - right).norm() / right.norm())
        loss_off = abs(float(results[0][1].double().sum() / counts.sum() - loss.detach())) / float(loss.detach())
        clean = not results[0][0][:, V:].any()
        found[name] = {"gradient": off, "loss": loss_off, "same bits": same, "padding 0": clean}
        found[name]["right"] = same and clean and off < 1.1 * found["triton"]["gradient"] and loss_off < 1e-5
        print("check", name, found[name], flush=True)
    return found


def timed(graphs, counts, end, seconds=0.2):
    """µs in bursts (median of five turns) and at the power cap."""
    found = {}
    for name, us in in_turns(graphs, counts).items():
        found[name] = {"us": round(us[2], 1), "best": round(us[0], 1)}
        if time.time() < end:
            found[name]["cap"] = round(hot(graphs[name], seconds)[0] / counts * 1e3, 1)
        print(name, found[name], flush=True)
    return found


def time_kernels(right, end):
    logits, targets = torch.randn(CHUNK, W, device="cuda").to(BF), targets_of(CHUNK)
    out, counts = torch.empty_like(logits), torch.zeros(kernels.COUNTS, dtype=torch.int32, device="cuda")
    kernels.count_valid_raw(targets, counts)
    steps = {name: step for name, (step, _) in loss_kernels(logits, targets, out, counts).items() if right[name]["right"]}
    print(f"a chunk of {CHUNK} rows, floor {2 * CHUNK * W * 2 / 4.2e6:.0f} us", flush=True)
    return timed({name: graph_of(step, 2) for name, step in steps.items()}, 2, end)


def time_heads(end):
    """The head's loss with all its gradients, by rows of a chunk."""
    hidden, weight = torch.randn(N, C, device="cuda").to(BF), (torch.randn(W, C, device="cuda") * C**-0.5).to(BF)
    head, targets, loss, graphs, kept = linear.Head(weight, None, V), targets_of(N), torch.empty(1, device="cuda"), {}, {}
    for chunk in CHUNKS:
        if time.time() > end - 8:
            break
        key = f"head, {chunk} rows"
        buffers = kept[key] = linear.make_buffers(hidden, head, chunk)  # a graph does not keep what it writes
        graphs[key] = graph_of(lambda buffers=buffers: linear.chunked_loss(hidden, head, targets, loss, buffers), 1)
        graphs[key].replay()
        torch.cuda.synchronize()
        print(key, "loss", float(loss), "MiB", buffers.logits_KW.numel() * 2 >> 20, flush=True)
    return timed(graphs, 1, end, 0.3)


if __name__ == "__main__":
    end = time.time() + float(sys.argv[1] if sys.argv[1:] else 40)
    results = {"check": check()}
    for part, run in (("kernels", lambda: time_kernels(results["check"], end)), ("heads", lambda: time_heads(end))):
        results[part] = run()
        Path(os.environ.get("OUT", "/tmp"), "loss.json").write_text(json.dumps(results))
