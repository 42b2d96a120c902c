"""Several processes on parts of a batch train as one process on the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.helpers import LANGUAGE, language_batch
from ridgeline.engine import Replicas, TrainStep
from ridgeline.errors import ConfigError
from ridgeline.models import build
from ridgeline.optim import OptimizerConfig

STEPS, BATCH = 6, 8
SETTINGS = OptimizerConfig(lr=1e-2, clip=0.5)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    batch = language_batch(step, batch=BATCH)
    batch["targets"][0] = -100  # so that the processes have unequal numbers of targets
    return batch


def train(rank: int, world: int, accumulate: int, bucket: int) -> TrainStep:
    model = build(LANGUAGE, impl="reference", seed=3 + rank)  # only the first process' weights may count
    step = TrainStep(
        model, optimizer=SETTINGS, precision="fp32", seed=7, accumulate=accumulate, replicas=Replicas(bucket=bucket)
    )
    size = BATCH // world
    for i in range(STEPS):
        step({name: tensor[rank * size : (rank + 1) * size] for name, tensor in batch_of(i).items()})
    return step


def worker(rank: int, world: int, accumulate: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    step = train(rank, world, accumulate, bucket=1000)
    torch.save((step.flat.masters, step.metrics()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_processes_equal_one(tmp_path: Path, world: int, accumulate: int):
    mp.spawn(worker, args=(world, accumulate, str(tmp_path)), nprocs=world)
    alone = train(0, 1, 1, bucket=1000)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for masters, metrics in results:
        assert torch.equal(masters, results[0][0])  # the replicas never drift apart
        torch.testing.assert_close(masters, alone.flat.masters, rtol=1e-3, atol=1e-4)
        for one, many in zip(alone.metrics(), metrics, strict=True):
            assert many.loss == pytest.approx(one.loss, rel=1e-5)
            assert many.norm == pytest.approx(one.norm, rel=1e-4)


def test_a_bucket_holds_something():
    with pytest.raises(ConfigError, match="bucket"):
        Replicas(bucket=0)
