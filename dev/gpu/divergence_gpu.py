"""Does a width-512 model diverge in bf16, and under which engine? hal-20m on Boxing's windows, loss and gradient norm.

PYTHONPATH=src:SITE python dev/gpu/divergence_gpu.py SECONDS [STEPS] [BATCH]

One process a way, over the visible cards: eager, torch.compile with and without mix-order reduction (one kernel for a
norm's input gradient and its weights' gradients, which Inductor builds from 5 · 2²⁰ elements on: 10,240 positions of
width 512, so a batch of 42 windows has it), and best. All see the same windows in the same order with the recipe's
rate. Writes $OUT/divergence.json, a record; each process keeps what it has. With 3 steps it only compiles, which takes
a minute; what is compiled lies in $TORCHINDUCTOR_CACHE_DIR, a folder for each way.
"""

import json
import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

WAYS = {  # name: engine, TORCHINDUCTOR_MIX_ORDER_REDUCTION
    "eager": ("eager", "1"),
    "compile": ("compile", "1"),
    "compile without mix-order reduction": ("compile", "0"),
    "best": ("best", "1"),
}
EVERY, TELL, BIN = 100, 500, 20  # steps between looks, between lines, of a point in the figure


def learn(name, device, steps, batch, out, deadline):
    """Trains under one engine; writes what it has to `out` at every look."""
    import torch

    torch.set_num_threads(1)
    from ridgeline.data.api import load_dataset
    from ridgeline.data.loader import Batches
    from ridgeline.data.resident import ResidentBatches
    from ridgeline.engine import TrainStep
    from ridgeline.presets import preset
    from ridgeline.train.engines import build_model, make_step
    from ridgeline.train.resolve import resolve
    from ridgeline.train.settings import override

    cuda = device != "cpu"
    if cuda:
        torch.cuda.set_device(device)
    data = load_dataset("boxing")
    given = {"data": "boxing", "steps": steps, "batch": batch, "lanes": 1, "device": device, "engine": WAYS[name][0]}
    if not cuda:
        given |= {"engine": "eager", "model": {"decoder": {"layers": 1, "width": 64}}, "window": {"context": 16}}
    else:
        given["precision"] = "bf16"
    config = resolve(override(preset("hal-20m"), given), data)
    torch.manual_seed(0)
    model = build_model(config)
    step = make_step(model, config)
    batches = Batches(data, config.window, batch=batch, seed=0)
    resident = ResidentBatches(batches, torch.device(device)) if cuda else None
    number = torch.zeros(2, dtype=torch.int64, device=device)
    losses, norms, seconds, found = [], [], 0.0, {"way": name, "device": device, "bad": None}
    while len(losses) < steps and time.time() < deadline:
        begun = time.perf_counter()
        done = len(losses)
        for index in range(done, min(done + EVERY, steps)):
            if resident is None:
                step(batches.next())
            elif isinstance(step, TrainStep):
                step(resident)
            else:
                number[1] = index
                resident.draw(number)
                step(dict(resident.tensors))
        rows = step.metrics(done)
        seconds += (time.perf_counter() - begun) * (done > 0)
        losses += [row.loss for row in rows]
        norms += [row.norm for row in rows]
        bad = next((row.step for row in rows if not math.isfinite(row.loss + row.norm)), None)
        if bad is not None and found["bad"] is None:
            found["bad"] = bad
            weights = [key for key, p in model.named_parameters() if not torch.isfinite(p).all()]
            grads = [
                key for key, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()
            ]
            found["tensors"] = {"weights": weights[:8], "gradients": grads[:8]}
        found |= {"losses": losses, "norms": norms, "ms": 1e3 * seconds / max(1, len(losses) - EVERY)}
        found["mixed"] = mixed()
        Path(out).write_text(json.dumps(found))
        if bad is not None or len(losses) == steps or len(losses) % TELL in (0, EVERY):
            print(name, len(losses), f"loss {losses[-1]:.4f} norm {norms[-1]:.3f} {found['ms']:.2f} ms", flush=True)
        if bad is not None:
            break


def mixed():
    """How many kernels with mix-order reduction were written, now or when what is in the cache was compiled."""
    metrics = sys.modules.get("torch._inductor.metrics")
    if metrics is None:
        return None
    count, file = (
        getattr(metrics, "codegen_mix_order_reduction", 0),
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "mixed",
    )
    if count:
        file.write_text(str(count))
    return int(file.read_text()) if file.exists() else count


def binned(values, pick):
    """What `pick` makes of each BIN values."""
    return [pick(values[i : i + BIN]) for i in range(0, len(values) - BIN + 1, BIN)]


def record(found, batch, cuda):
    """The record of all ways; figures end where numbers are no longer finite."""
    import torch

    from ridgeline.bench.circumstances import git_revision, versions
    from ridgeline.bench.nvml import monitor
    from ridgeline.records import ContenderResult, Record, WorkloadInfo

    curves, rows = [], []
    for result in found:
        good = result["bad"] if result["bad"] is not None else len(result["losses"])
        losses, norms = result["losses"][:good], result["norms"][:good]
        loss, norm = binned(losses, lambda part: sum(part) / len(part)), binned(norms, max)
        if loss:
            axes = {"x_label": "step", "y_label": "training loss (nats)", "below_label": "gradient norm"}
            x = [BIN * (i + 1) for i in range(len(loss))]
            curves.append({"figure": "training", "name": result["way"], "x": x, "y": loss, "below": norm, **axes})
        rows.append(
            {
                "way": result["way"],
                "steps": len(result["losses"]),
                "first_step_that_is_not_finite": result["bad"],
                "loss_of_the_last_100_steps": sum(losses[-100:]) / max(1, len(losses[-100:])),
                "largest_norm": max(norms, default=None),
                "largest_norm_after_step_100": max(norms[100:], default=None),
                "kernels_with_mix_order_reduction": result.get("mixed"),
                "tensors": json.dumps(result["tensors"]) if "tensors" in result else None,
            }
        )
    curves.append({"figure": "runs", "name": "divergence", "rows": rows})
    device = torch.device("cuda:0" if cuda else "cpu")
    return Record(
        kind="study",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=git_revision(),
        card=torch.cuda.get_device_name(device) if cuda else "CPU",
        gpus=1 if cuda else 0,
        versions=versions(monitor(device)),
        workload=WorkloadInfo(name="hal-20m", batch=batch, context=256, precision="bf16"),
        contenders=[ContenderResult(name=result["way"], error=None) for result in found],
        curves=curves,
    )


def main():
    """All ways beside each other, and the record of what they came to."""
    begun, limit = time.time(), float(sys.argv[1])
    steps, batch = int(sys.argv[2]) if len(sys.argv) > 2 else 3000, int(sys.argv[3]) if len(sys.argv) > 3 else 42
    import torch

    from ridgeline.cli.data import replay_shipped
    from ridgeline.records import write_record

    replay_shipped("boxing")
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"/tmp/divergence-{os.getpid()}")
    running, files = [], []
    order = ["eager", "compile", "best", "compile without mix-order reduction"]
    for place, name in enumerate(order):
        files.append(out / f"divergence_{place}.json")
        environment = {**os.environ, "TORCHINDUCTOR_MIX_ORDER_REDUCTION": WAYS[name][1], "OMP_NUM_THREADS": "1"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/divergence-{place}"
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // 3)))
        device = devices[(place % 4 in (1, 3)) % len(devices)]
        given = [name, device, str(steps), str(batch), str(files[-1]), str(begun + limit - 4)]
        running.append(subprocess.Popen([sys.executable, __file__, "--one", *given], env=environment))
    for process in running:
        try:
            process.wait(max(0.1, begun + limit - 2 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    found.sort(key=lambda result: list(WAYS).index(result["way"]))
    made = record(found, batch, devices != ["cpu"])
    write_record(made, out / "divergence.json")
    for row in made.curves[-1]["rows"]:
        print({key: value for key, value in row.items() if value is not None}, flush=True)
    for file in files:
        file.unlink(missing_ok=True)
    print(f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        name, device, steps, batch, out, deadline = sys.argv[2:]
        learn(name, device, int(steps), int(batch), out, float(deadline))
    else:
        main()
