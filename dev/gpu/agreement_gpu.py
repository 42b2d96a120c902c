"""Losses of best, bf16 copies and autocast beside fp32, gpt2-c256, a seed at a time; one JSON.

PYTHONPATH=src OUT=$OUT python dev/gpu/agreement_gpu.py [SEEDS [BATCH]]   (10 s a seed; other checks may run beside)

What ridgeline.bench.agreement does, with one step a variant for all seeds, so that it is captured once. From 34
windows on the kernels for many rows are in it, with GELU's derivative in 8 bits.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from ridgeline.bench.agreement import REFERENCE, VARIANTS, batch_of, chain
from ridgeline.bench.workloads import workload
from ridgeline.engine import TrainStep
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig

STEPS, LAST = 500, 100
SETTINGS = OptimizerConfig(lr=1e-3, floor=1e-4, warmup=50)


def main():
    """Prints the distances after every seed."""
    began, seeds = time.time(), int(sys.argv[1]) if sys.argv[1:] else 5
    sizes = {"batch": int(sys.argv[2])} if sys.argv[2:] else {}
    case, tokens = workload("gpt2-c256", precision="bf16", **sizes), chain(65, 1_000_000, 7)
    assert case.model.decoder.dropout == 0.0
    steps, starts = {}, {}
    for name, variant in VARIANTS.items():
        model = build(case.model, impl=variant.impl, seed=0).cuda().train()
        steps[name] = TrainStep(model, optimizer=SETTINGS, steps=STEPS, precision=variant.precision, seed=0)
        starts[name] = steps[name].state_dict()
    losses = {name: [] for name in VARIANTS}
    for seed in range(seeds):
        batches = [batch_of(tokens, case, seed, number) for number in range(STEPS)]
        for name, variant in VARIANTS.items():
            step = steps[name]
            step.model.load_state_dict(build(case.model, impl=variant.impl, seed=seed).state_dict())
            step.load_state_dict(starts[name])
            for batch in batches:
                step(batch)
            losses[name].append([m.loss for m in step.metrics()])
        found, by_seed = {}, {}
        for name, runs in losses.items():
            pairs = [zip(a[-LAST:], b[-LAST:], strict=True) for a, b in zip(runs, losses[REFERENCE], strict=True)]
            by_seed[name] = [sum(abs(x - y) for x, y in pair) / LAST for pair in pairs]
            found[name] = {"distance": round(statistics.mean(by_seed[name]), 6), "worst": round(max(by_seed[name]), 6)}
            found[name]["final"] = round(runs[-1][-1], 5)
        if seed:  # of the same seeds and batches: what is left is chance or an approximation
            apart = [a - b for a, b in zip(by_seed["best"], by_seed["copies"], strict=True)]
            error = statistics.stdev(apart) / len(apart) ** 0.5
            found["best - copies"] = {"mean": round(statistics.mean(apart), 7), "standard error": round(error, 7)}
        print(f"seeds {seed + 1}, {time.time() - began:.0f} s", json.dumps(found), flush=True)
        curves = {name: [[round(x, 5) for x in run[::5]] for run in runs] for name, runs in losses.items()}
        Path(os.environ.get("OUT", "/tmp"), "agreement.json").write_text(json.dumps({**found, "curves": curves}))


main()
