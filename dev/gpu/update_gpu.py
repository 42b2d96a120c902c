"""The second half of a step alone: AdamW by operations and by kernels, Muon with and without streams beside.

PYTHONPATH=src OUT=$OUT python dev/gpu/update_gpu.py [PRESET …]      (one card, alone; 15 s a preset, caches warm)
"""

import json
import os
import sys
from pathlib import Path

import torch

from ridgeline.engine import FlatParameters, Update
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig, hidden_matrices
from ridgeline.presets import preset

WAYS = {  # implementation, Muon, streams
    "adamw torch": ("torch", False, False),
    "adamw": ("triton", False, False),
    "muon": ("triton", True, True),
    "muon, one stream": ("triton", True, False),
}
ROUNDS, SECONDS = 4, 0.05


def captured(name, impl, muon, streams):
    """A replay of one update, and what it works on."""
    model = build(preset(name).model, seed=0).cuda()
    flat = FlatParameters(model, compute=torch.bfloat16, orthogonal=hidden_matrices(model) if muon else ())
    for view in flat.views(flat.grad[: flat.size]).values():
        view.normal_()
    flat.lanes[0].loss.fill_(1.0)
    update = Update(flat, OptimizerConfig(algorithm="muon" if muon else "adamw"), impl=impl)
    if muon and not streams:
        update._muon._streams = []
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(3):
            update()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        update()
    return graph, model, update


def microseconds(graph, seconds):
    """Of one replay, over as many as fill the time."""
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 5
    for _ in range(2):
        a.record()
        for _ in range(count):
            graph.replay()
        b.record()
        b.synchronize()
        each = a.elapsed_time(b) / count
        count = max(5, int(seconds * 1e3 / each))
    return 1e3 * each


def main():
    """Prints a line a preset, its ways taking turns."""
    report = {}
    for name in sys.argv[1:] or ("gpt2-c256", "hal-20m"):
        made = {way: captured(name, *settings) for way, settings in WAYS.items()}
        times = {way: [] for way in made}
        for turn in range(ROUNDS):
            for way in list(made)[:: 1 if turn % 2 else -1]:
                times[way].append(microseconds(made[way][0], SECONDS))
        row = {way: round(sorted(found)[ROUNDS // 2], 1) for way, found in times.items()}
        row["finite"] = all(bool(torch.isfinite(update.flat.masters).all()) for _, _, update in made.values())
        report[name] = {"parameters": made["adamw"][2].flat.size, "us": row}
        print(name, json.dumps(report[name]), flush=True)
        Path(os.environ.get("OUT", "/tmp"), "update.json").write_text(json.dumps(report, indent=1))


main()
