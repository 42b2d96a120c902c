"""Recipes on a card: how soon does which model and optimiser reach a held-out loss on tinyshakespeare?

PYTHONPATH=src python dev/gpu/study_gpu.py SECONDS TEXT TRIAL…
PYTHONPATH=src python dev/gpu/study_gpu.py SECONDS TEXT all [games]

Every visible card has four processes; each sets up its next trial (import, compile, capture) while another trains,
and only one trains at a time, so a trial's seconds are those of a card of its own. A trial is a line of TRIALS, with
"#N" behind it for seed N; "games" are those on Boxing's demonstrations. Writes $OUT/study.json after every trial.
"""

import dataclasses
import json
import math
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

TARGET, POINTS, WORKERS = 1.4697, 15, int(os.environ.get("WORKERS", "4"))
SMALL = {"layers": 6, "width": 256, "heads": 8}
NANO = {"layers": 6, "width": 384, "heads": 6}
ADAMW = {"algorithm": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.1, "warmup": 100, "floor": 0.0}
MUON = {**ADAMW, "algorithm": "muon"}


def trial(decoder, optimizer, batch, steps, **more):
    return {"decoder": decoder, "optimizer": optimizer, "batch": batch, "steps": steps, **more}


def some(base, **changes):
    return {**base, **changes}


def nano(lr=2e-3, steps=1000, batch=64, dropout=0.2, optimizer=MUON, decoder=NANO, stages=(), **more):
    fields = ("positions", "kv_heads", "norm", "bias", "mlp_width", "layers")
    shape = {key: more.pop(key) for key in fields if key in more}
    return trial(some(decoder, dropout=dropout, **shape), some(optimizer, lr=lr, **more), batch, steps, stages=stages)


def small(lr=4e-3, steps=1200, batch=32, dropout=0.1, **more):
    return nano(lr, steps, batch, dropout, decoder=SMALL, **more)


# stages: (share of the steps until which it lasts, batch, context), before the trial's own batch and context
TRIALS = {
    "small": small(),
    "rel": small(positions="relative"),
    "lr2": small(2e-3),
    "short": small(stages=[(0.4, 128, 64)]),
    "rel-short": small(positions="relative", stages=[(0.4, 128, 64)]),
    "rel-800": small(steps=800, positions="relative"),
    "adamw": small(2e-3, optimizer=ADAMW),
    "batch": small(stages=[(0.5, 16, 256)]),
    "dropout-0": small(steps=900, dropout=0.0),
    "stable": small(stable=0.5),
    "rel-lr8": small(8e-3, positions="relative"),
    "fast": small(kv_heads=1, norm="rmsnorm", bias=False, mlp_width=512),
    "dropout-2": small(dropout=0.2),
    "layers-4": small(layers=4),
    "wd-3": small(weight_decay=0.3),
    "batch-64": small(6e-3, 700, 64),
    "warm-20": small(warmup=20),
    "adamw-rel": small(3e-3, optimizer=ADAMW, positions="relative"),
    "nano-rel": nano(4e-3, 500, positions="relative"),
    "nano-adamw": nano(1e-3, 2000, optimizer=ADAMW),
}


def boxing(lr=4e-3, steps=2000, batch=128, dropout=0.1, optimizer=MUON, stages=(), **more):
    decoder = {"layers": 2, "width": 128, "heads": 4, "dropout": dropout, "context": 16}
    made = trial(decoder, some(optimizer, lr=lr, weight_decay=0.05, **more), batch, steps, stages=stages)
    return {**made, "preset": "boxing", "context": 16}


GAMES = {
    "boxing": boxing(2e-3, 4000, 32, optimizer=ADAMW),
    "boxing-muon": boxing(2e-3, 4000, 32),
    "boxing-muon-128": boxing(),
    "boxing-adamw-128": boxing(optimizer=ADAMW),
    "boxing-muon-512": boxing(6e-3, 1000, 512),
    "boxing-muon-lr8": boxing(8e-3),
    "boxing-muon-d2": boxing(dropout=0.2),
    "boxing-adamw-512": boxing(6e-3, 1000, 512, optimizer=ADAMW),
}


def config_of(name, values, text, device):
    from ridgeline.data.api import load_dataset
    from ridgeline.presets import preset
    from ridgeline.train.resolve import resolve
    from ridgeline.train.settings import override

    base = values.get("preset", "gpt2-c256")
    text = "boxing" if base == "boxing" else text
    data = load_dataset(text)
    config = override(
        preset(base),
        {
            "model": {"decoder": {"context": 256, **values["decoder"]}},
            "optimizer": values["optimizer"],
            "batch": values["batch"],
            "steps": values["steps"],
            "window": {"context": values.get("context", 256)},
            "data": text,
            "device": device,
            "lanes": 1,
            "seed": values.get("seed", 0),
        },
    )
    return resolve(config, data), data


def learn(name, values, text, device, card, deadline):
    """One trial: (step, seconds, held-out loss) at a dozen points, and what it took to set up."""
    import torch

    from ridgeline.data.loader import Batches, Validation
    from ridgeline.engine import TrainStep
    from ridgeline.train.engines import build_model, make_step, resident_batches

    begun = time.perf_counter()
    config, data = config_of(name, values, text, device)
    torch.manual_seed(config.seed)
    model = build_model(config)
    step = make_step(model, config)
    batches = Batches(data, config.window, batch=config.batch, seed=config.seed)
    resident = resident_batches(config, step, batches)
    stages = [(config.steps, batches, resident)]
    for share, batch, length in reversed(values.get("stages", ())):
        window = dataclasses.replace(config.window, context=length)
        shorter = Batches(data, window, batch=batch, seed=config.seed)
        stages.insert(0, (int(share * config.steps), shorter, resident_batches(config, step, shorter)))
    cuda = device != "cpu"
    wait = torch.cuda.synchronize if cuda else lambda: None
    size = max(16, 32768 // config.window.context if cuda else 16)
    held = [
        ({key: tensor.to(device) for key, tensor in batch.items()}, int((batch["targets"] != -100).sum()))
        for batch in Validation(data, config.window, batch=size)
    ]
    held = held if cuda else held[:1]

    def validate():
        with step.weights() as now, torch.inference_mode():
            now.eval()
            losses = [now.loss(batch).double() * count for batch, count in held]
            now.train()
        return float(sum(losses)) / sum(count for _, count in held)

    def go(taken):
        _, batches, resident = next(stage for stage in stages if taken < stage[0])
        if resident is not None and isinstance(step, TrainStep):
            step(resident)
            batches.skip()
        else:
            step(batches.next())

    for _, _, ready in stages[1:]:
        if ready is not None and isinstance(step, TrainStep):
            step.prepare(ready)
    go(0)
    validate()
    wait()
    setup, taken, seconds, points = time.perf_counter() - begun, 1, 0.0, []
    with card:
        for point in range(1, POINTS + 1):
            until = config.steps * point // POINTS
            started = time.perf_counter()
            while taken < until:
                go(taken)
                taken += 1
            wait()
            seconds += time.perf_counter() - started
            points.append((taken, round(seconds, 3), round(validate(), 4)))
            if time.time() > deadline or not math.isfinite(points[-1][2]):
                break
    rows = step.metrics(taken - 50)
    return {
        "values": values,
        "parameters": sum(p.numel() for p in model.parameters()),
        "setup_s": round(setup, 1),
        "ms": round(1e3 * seconds / taken, 3),
        "points": points,
        "train_loss": round(sum(row.loss for row in rows) / len(rows), 4),
        "norm": round(sum(row.norm for row in rows) / len(rows), 3),
        "engine": config.engine,
    }


def work(jobs, results, text, device, card, deadline):
    """A worker's life."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    while time.time() < deadline:
        try:
            name, values = jobs.get(timeout=0.2)
        except Exception:
            break
        try:
            results.put((name, learn(name, values, text, device, card, deadline)))
        except Exception as error:
            results.put((name, {"error": f"{type(error).__name__}: {error}"[:400]}))
    results.put((None, None))


def said(result):
    """A trial in a line."""
    if "error" in result:
        return result["error"][:160]
    points = result["points"]
    held = next((a for a, b in zip(points, points[1:]) if max(a[2], b[2]) <= TARGET), None)
    curve = " ".join(f"{loss:.3f}" for _, _, loss in points)
    return (
        f"{result['ms']} ms, set-up {result['setup_s']} s, held {held[1] if held else '-'}, "
        f"train {result['train_loss']}, {points[-1][1]} s: {curve} ({points[-1][2]})"
    )


def main():
    begun = time.time()
    limit, text, asked = float(sys.argv[1]), str(Path(sys.argv[2]).resolve()), sys.argv[3:]
    groups = {"all": TRIALS, "games": GAMES}
    names = [t for name in asked for t in groups.get(name, [name])]
    import torch

    if any(name.startswith("boxing") for name in names):
        from ridgeline.cli.data import replay_shipped

        replay_shipped("boxing")
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for name in names:
        key, _, seed = name.partition("#")
        jobs.put((name, {**(TRIALS | GAMES)[key], "seed": int(seed or 0), **json.loads(os.environ.get("CHANGE", "{}"))}))
    workers = []
    for device in devices:
        card = context.Lock()
        for _ in range(WORKERS):
            given = (jobs, results, text, device, card, begun + limit - 3)
            workers.append(context.Process(target=work, args=given, daemon=True))
            workers[-1].start()
    found, running = {}, len(workers)
    while running and time.time() < begun + limit:
        try:
            name, result = results.get(timeout=max(0.1, begun + limit - time.time()))
        except Exception:
            break
        if name is None:
            running -= 1
            continue
        found[name] = result
        print(name, said(result), flush=True)
        (out / "study.json").write_text(json.dumps(found))
    for worker in workers:
        worker.kill()
    print(f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
