"""Milliseconds of one decision, by model, number of games and way; on the CPU with one thread, and on a card.

PYTHONPATH=src python dev/gpu/play_gpu.py [cpu] [cuda] [MODEL …]     writes $OUT/decisions.json
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ridgeline.data.window import WindowSpec
from ridgeline.games.boxing.adapter import GAME
from ridgeline.games.boxing.policy import policy_config
from ridgeline.models import ControllerPolicy
from ridgeline.play.decide import Decider, source
from ridgeline.play.player import Player
from ridgeline.play.window import Window
from ridgeline.presets import preset

WAYS = {  # name: (cache, capture, states before the first decision as a share of the context)
    "whole window, full": ("none", False, 1.0),
    "whole window, full, captured": ("none", True, 1.0),
    "cached, half full": ("exact", False, 0.5),
    "cached, half full, captured": ("exact", True, 0.5),
    "rolling, full": ("rolling", False, 1.0),
    "rolling, full, captured": ("rolling", True, 1.0),
}


def row(numbers, generator):
    return np.zeros(0, np.uint16), generator.standard_normal(numbers).astype(np.float32)


def measure(name, device, way, games):
    cache, capture, full = WAYS[way]
    config = policy_config(preset(name).model.decoder)
    context = config.decoder.context
    policy = ControllerPolicy(config, seed=0).eval().to(device)
    player = Player(policy, "boxing", GAME.features(), WindowSpec(context=context), torch.device(device), cache)
    decide = Decider(
        player, games, temperature=1.0, generators=[source(seed) for seed in range(games)], capture=capture
    )
    generator = np.random.default_rng(0)
    windows = [Window(context, row(config.numbers, generator), 2) for _ in range(games)]
    rows = [row(config.numbers, generator) for _ in range(64)]

    def advance(count):
        for step in range(count):
            for window in windows:
                window.append(rows[step % 64], (0, 0))

    advance(max(1, int(full * context)) if full < 1 else context)
    if decide._cache is not None:
        decide._cache.position.fill_(len(windows[0]) - 1)
    seconds = 0.5 if device == "cpu" else 0.12
    times, began = [], time.perf_counter()
    left = context - len(windows[0]) if full < 1 else 300
    clock = time.thread_time if device == "cpu" else time.perf_counter  # a busy machine takes the core away
    while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < left):
        t = clock()
        decide(windows)
        times.append(clock() - t)
        if full < 1:
            advance(1)
    return round(1e3 * statistics.median(times[2:]), 3)


def main():
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    table, words = {}, sys.argv[1:]
    devices = [word for word in words if word in ("cpu", "cuda")] or ["cpu"]
    models = [word for word in words if word not in ("cpu", "cuda")] or ["hal-20m", "hal-5m", "boxing"]
    for device in devices:
        for name in models:
            for way, (_, capture, _) in WAYS.items():
                if capture and device == "cpu":
                    continue
                for games in (1, 8, 30):
                    if device == "cpu" and games == 30:
                        continue
                    key = f"{device} | {name} | {way} | {games}"
                    try:
                        table[key] = measure(name, device, way, games)
                    except Exception as error:  # the others go on
                        table[key] = repr(error)[:300]
                    print(key, table[key], flush=True)
                    (out / "decisions.json").write_text(json.dumps(table, indent=1))


main()
