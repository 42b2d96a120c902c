"""What a step of hal-20m costs outside its six blocks, three ways in one run: by its kernels' own times in a profile of
the whole captured step, as the whole step less the blocks alone, in turns, and alone with blocks that do nothing.

PYTHONPATH=src:dev/gpu OUT=$OUT python3 dev/gpu/outside_gpu.py [seconds]     (25 s cold; DRY=1: tiny, without a card)

The blocks are what `fused_gpu.py block` times: from the input's dropout and the first norm to the last norm. Issue 4's
row counts "input, heads, loss, norm, clip, AdamW".
"""

import collections
import json
import os
import statistics
import sys
import time

import fused_gpu
import torch

from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import TrainStep
from ridgeline.models import ControllerPolicy

DRY = bool(os.environ.get("DRY"))
DEVICE, IMPL = ("cpu", "reference") if DRY else ("cuda", "fused")
MARK = "spin_kernel"


class Mark(torch.autograd.Function):
    """A kernel of a known name here, in both passes."""

    @staticmethod
    def forward(ctx, x):
        mark()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        mark()
        return dx


def mark():
    if not DRY:
        torch.cuda._sleep(100)


def step_of(case, wrap=None):
    """A captured step on random data, its blocks wrapped, and its batch."""
    model = ControllerPolicy(case.model, impl=IMPL, seed=0).to(DEVICE)
    if wrap is not None:
        model.decoder.transform = wrap(model.decoder.transform)
    train = TrainStep(model, precision="fp32" if DRY else "bf16")
    batch = random_batch(case, torch.device(DEVICE))
    for _ in range(3):
        train(batch)
    return train, batch


def marked(transform):
    return lambda x, dropout=None: Mark.apply(transform(Mark.apply(x), dropout))


def nothing(transform):
    return lambda x, dropout=None: x


def events_of(train, batch, steps=4):
    """(start, end, name) of every kernel of `steps` steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            train(batch)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in prof.events() if e.device_type == cuda)


def parts(events):
    """Own µs and gaps of every kernel by part of the step: a list of {part: Counter}, one a whole period.

    A period begins and ends at the first mark of a step: blocks forward, heads, blocks backward, rest.
    """
    marks = [i for i, e in enumerate(events) if MARK in e[2]]
    periods, names = [], ("blocks forward", "heads", "blocks backward", "input, norm, clip, AdamW")
    for first in range(0, len(marks) - 4, 4):
        found = {}
        for part, start, end in zip(names, marks[first:], marks[first + 1 :]):
            own, gaps, reach = collections.Counter(), [], events[start][1]
            for begin, finish, name in events[start + 1 : end]:
                own[name] += max(0.0, finish - max(begin, reach))
                gaps.append(max(0.0, begin - reach))
                reach = max(reach, finish)
            found[part] = own, sum(gaps), max(gaps, default=0.0), end - start - 1
        periods.append(found)
    return periods


def by_profile(case):
    """The figure by own times, and its kernels."""
    train, batch = step_of(case, marked)
    periods = parts(events_of(train, batch))
    out = {}
    for part in periods[0]:
        own = sum((p[part][0] for p in periods), collections.Counter())
        count = len(periods)
        us, gaps = sum(own.values()) / count, sum(p[part][1] for p in periods) / count
        longest = max(p[part][2] for p in periods)
        out[part] = us
        print(f"  {part}: {us:.0f} us own in {periods[0][part][3]} kernels, gaps {gaps:.0f} (longest {longest:.0f})")
        if "blocks" not in part:
            for name, value in own.most_common(14):
                print(f"     {value / count:7.1f}  {name[:88]}")
    outside = sum(us for part, us in out.items() if "blocks" not in part)
    blocks = sum(us for part, us in out.items() if "blocks" in part)
    print(f"OUTSIDE THE SIX BLOCKS by own times in the profile: {outside:.0f} us; blocks {blocks:.0f} = 6 x {blocks / 6:.0f}")
    return {"outside": outside, "parts": out}


def by_difference(case, end):
    """The figure by events, in turns; `blocks` a captured graph."""
    train, batch = step_of(case)
    passes, *_ = fused_gpu.passes(ControllerPolicy(case.model, impl=IMPL, seed=0), case.batch, case.context)
    graph = fused_gpu.captured(passes)
    times = {"step": [], "blocks": []}
    while len(times["step"]) < 7 and time.time() < end:
        for name, call in (("step", lambda: train(batch)), ("blocks", graph.replay)):
            times[name] += fused_gpu.turns(lambda _, call=call: call(), None, 6, 2)[1:]
    step, blocks = (statistics.median(times[name]) * 1e3 for name in times)
    pairs = sorted((s - b) * 1e3 for s, b in zip(times["step"], times["blocks"]))
    print(
        f"OUTSIDE THE SIX BLOCKS by difference, {len(pairs)} turns: step {step:.0f} - blocks {blocks:.0f} "
        f"(6 x {blocks / 6:.0f}) = {step - blocks:.0f} us; pairs {pairs[0]:.0f} to {pairs[-1]:.0f}",
        flush=True,
    )
    return {"step": times["step"], "blocks": times["blocks"]}


def alone(case):
    """The step with blocks that do nothing."""
    train, batch = step_of(case, nothing)
    us = [ms * 1e3 for ms in fused_gpu.turns(train, batch, 20, 8)][1:]
    print(f"alone (no blocks, so at full clock): {statistics.median(us):.0f} us, {min(us):.0f} to {max(us):.0f}", flush=True)
    return us


def main(seconds):
    end, found = time.time() + seconds, {}
    case = workload("hal-20m", batch=2, context=16, precision="fp32") if DRY else workload("hal-20m")
    trials = {"profile": lambda: by_profile(case), "difference": lambda: by_difference(case, end), "alone": lambda: alone(case)}
    for name, trial in trials.items():
        if time.time() > end:
            print(f"{name}: no time left", flush=True)
            continue
        try:
            found[name] = trial()
        except Exception as error:
            print(f"FAILED {name}: {error!r}"[:600], flush=True)
        torch.cuda.empty_cache()
        with open(f"{os.environ.get('OUT', '/tmp')}/outside.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
