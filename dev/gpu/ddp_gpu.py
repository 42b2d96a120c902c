"""Two GPUs: equality with one and weak scaling; one JSON (needs nvidia-h200-x2).

PYTHONPATH=src OUT=$OUT python -m torch.distributed.run --standalone --nproc-per-node 2 dev/gpu/ddp_gpu.py
"""

import json
import os
import time

import torch
import torch.distributed as dist

from ridgeline.bench.contenders import OPTIMIZER
from ridgeline.bench.workloads import random_batch, workload
from ridgeline.engine import Replicas, TrainStep
from ridgeline.models import build

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
report = {}


class Alone(Replicas):
    """A single process in spite of the group."""

    def __init__(self):
        super().__init__()
        self.rank, self.world = 0, 1


def note(key, value):
    report[key] = value
    if rank == 0:
        print(key, json.dumps(value), flush=True)
        with open(f"{os.environ.get('OUT', '/tmp')}/ddp.json", "w") as file:
            json.dump(report, file, indent=1)


def step_of(case, replicas, impl="torch", compile="default", capture=True):
    torch.manual_seed(0)
    return TrainStep(
        build(case.model, impl=impl, seed=0).to(device).train(),
        optimizer=OPTIMIZER,
        precision="bf16",
        compile=compile,
        capture=capture,
        replicas=replicas,
        seed=3,
    )


def timed(call, seconds=1.5):
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(10):
        call()
    b.record()
    b.synchronize()
    n = torch.tensor([max(10, int(seconds * 1e4 / a.elapsed_time(b)))], device=device)
    dist.broadcast(n, 0)
    a.record()
    for _ in range(int(n)):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / int(n)


# 1. two halves against the whole, with the counter's dropout masks
case = workload("hal-5m", batch=16, context=64)
batch = random_batch(case, device)
half = {k: v[rank * 8 : rank * 8 + 8] for k, v in batch.items()}
try:
    both, alone = step_of(case, Replicas(), "reference", None), step_of(case, Alone(), "reference", None)
    for _ in range(30):
        both(half)
        alone(batch)
    other = [torch.empty_like(both.flat.masters) for _ in range(2)]
    dist.all_gather(other, both.flat.masters)
    note(
        "equality",
        {
            "replicas_equal": torch.equal(other[0], other[1]),
            "loss": [[round(m.loss, 5) for m in s.metrics()[::10]] for s in (both, alone)],
            "norm": [[round(m.norm, 5) for m in s.metrics()[::10]] for s in (both, alone)],
            "weights_relative": float((both.flat.masters - alone.flat.masters).norm() / alone.flat.masters.norm()),
        },
    )
    del both, alone
except Exception as error:
    note("equality", f"{type(error).__name__}: {error}"[:400])

# 2. weak scaling, one captured graph a step with the all-reduce inside
for name in ("gpt2-c256", "hal-20m"):
    case = workload(name)
    batch = random_batch(case, device, seed=rank)
    try:
        began = time.time()
        steps = {"1 GPU": step_of(case, Alone()), "2 GPUs": step_of(case, Replicas())}
        for step in steps.values():
            step(batch)
        torch.cuda.synchronize()
        ready = time.time() - began
        found = {}
        for _ in range(3):
            for label, step in steps.items():
                found.setdefault(label, []).append(timed(lambda s=step: s(batch)))
        ms = {label: sorted(v)[1] for label, v in found.items()}
        note(
            name,
            {
                "ms": ms,
                "efficiency": ms["1 GPU"] / ms["2 GPUs"],
                "tok_s": {k: round(case.tokens * (1 + (k != "1 GPU")) / v * 1e3) for k, v in ms.items()},
                "ready_s": ready,
                "phases": steps["2 GPUs"].phases(batch),
            },
        )
        del steps
        torch.cuda.empty_cache()
    except Exception as error:
        note(name, f"{type(error).__name__}: {error}"[:400])
dist.destroy_process_group()
