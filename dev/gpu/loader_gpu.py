"""What the loader delivers beside what a step takes: host and card, text and windows; one JSON.

PYTHONPATH=src python dev/gpu/loader_gpu.py [WORDS OF A ROW …]       (without a card: the host's part alone)
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ridgeline.data import games, shards, text
from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches
from ridgeline.data.window import WindowSpec
from ridgeline.games.table import GameTable

# workload: kind of data, context, stride, batch, goal of the step in positions/s
ROWS = {
    "hal-20m B 512 T 256": ("games", 256, 1, 512, 3.8e6),
    "hal-5m B 512 T 128 stride 2": ("games", 128, 2, 512, 10e6),
    "gpt2-c256 B 32 T 256": ("text", 256, 1, 32, 8e6),
    "fast-c256 B 32 T 256": ("text", 256, 1, 32, 10.5e6),
    "gpt2-c256 B 512 T 256": ("text", 256, 1, 512, 13.2e6),
    "fast-c256 B 512 T 256": ("text", 256, 1, 512, 18e6),
    "fast-c256 B 4 T 2048": ("text", 2048, 1, 4, 7e6),
    "gpt2-124m B 64 T 1024": ("text", 1024, 1, 64, None),
}
GAMES, FRAMES, TOKENS = 100, 6000, 10_000_000


def make(folder):
    draw = np.random.default_rng(0)
    tables = []
    for _ in range(GAMES):
        heads = np.stack([draw.integers(n, size=FRAMES) for n in (9, 37, 6)], 1).astype(np.uint8)
        tables.append(
            GameTable(
                categories=np.stack([draw.integers(n, size=FRAMES) for n in (7, 33, 33, 400, 400)], 1).astype(
                    np.uint16
                ),
                numbers=draw.normal(size=(FRAMES, 18)).astype(np.float32),
                controller=np.concatenate([np.zeros((1, 3), np.uint8), heads[:-1]]),
                target=heads,
            )
        )
    groups = (("stage", 7, 1), ("character", 33, 2), ("action", 400, 2))
    names = (("c", 9), ("main", 37), ("buttons", 6))
    origin = [{}] * GAMES
    games.write(
        folder / "g", tables, name="g", game="x", heads=names, groups=groups, features={"game": "x"}, provenance=origin
    )
    content = draw.integers(97, 162, TOKENS).astype(np.uint8)
    text.write(folder / "t", content, "bytes", name="t", source="random")
    return {"games": games.open_games(shards.read(folder / "g")), "text": text.open_text(shards.read(folder / "t"))}


def seconds(call, limit=0.6):
    times, end = [], time.perf_counter() + limit
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def on_card(data, window, batch):
    device = torch.device("cuda")
    resident = ResidentBatches(Batches(data, window, batch=batch), device)
    step = torch.tensor([0, 0], device=device)
    host = Batches(data, window, batch=batch)
    for number in range(3):
        step[1] = number
        resident.draw(step)
        expected = host.next()
        assert all(torch.equal(expected[name], tensor.cpu()) for name, tensor in resident.tensors.items()), number
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        resident.draw(step)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        resident.draw(step)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        a.record()
        for _ in range(50):
            graph.replay()
        b.record()
        b.synchronize()
    return a.elapsed_time(b) / 50e3


def main():
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        data = make(Path(folder))
        for name, (kind, context, stride, batch, goal) in ROWS.items():
            if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                continue
            window = WindowSpec(context=context, stride=stride)
            batches, positions = Batches(data[kind], window, batch=batch), batch * context
            out = batches.next()
            row = {"host M/s": positions / seconds(lambda b=batches, o=out: b.next(o)) / 1e6}
            if torch.cuda.is_available():
                row["card M/s"] = positions / on_card(data[kind], window, batch) / 1e6
            row["raw frames a position"] = stride
            if goal:
                row |= {f"{k.split()[0]} / goal": v * 1e6 / goal for k, v in list(row.items()) if k.endswith("M/s")}
            report[name] = {k: round(v, 2) for k, v in row.items()}
            print(name, json.dumps(report[name]), flush=True)
    (Path(os.environ.get("OUT", "/tmp")) / "loader.json").write_text(json.dumps(report, indent=1))


main()
