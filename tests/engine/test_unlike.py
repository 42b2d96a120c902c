"""Processes that train together and do not do the same: batches of different sizes, different models or settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from engine.helpers import LANGUAGE, SETTINGS, language_batch, stranger, stranger_loss
from ridgeline.engine import Replicas, TrainStep
from ridgeline.engine.flat import FlatParameters
from ridgeline.engine.reduction import Reduction
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.models import build

WORLD = 3


def words(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except RidgelineError as error:
        return str(error)
    return ""


def settings(rank: int) -> dict[str, str]:
    """What each way of differing in the last process says."""
    last = rank == WORLD - 1

    def step(model: nn.Module, **rest) -> TrainStep:
        return TrainStep(model, stranger_loss, **{"optimizer": SETTINGS, "precision": "fp32", **rest})

    other = stranger()
    if last:
        other.proj = nn.Linear(16, 8)
    return {
        "shape": words(lambda: step(other)),
        "rate": words(lambda: step(stranger(), optimizer=dataclasses.replace(SETTINGS, lr=0.5 if last else 0.1))),
        "precision": words(lambda: step(stranger(), precision="bf16" if last else "fp32")),
        "same": words(lambda: step(stranger())),
    }


def sizes(rank: int) -> dict[str, object]:
    """What batches of different sizes say, and what is left behind."""
    found: dict[str, object] = {}
    step = TrainStep(stranger(), stranger_loss, SETTINGS, precision="fp32")
    step(language_batch(rank))
    before = step.flat.masters.clone()
    found["samples"] = words(lambda: step(language_batch(rank, batch=4 + rank // 2)))
    found["unchanged"] = torch.equal(step.flat.masters, before) and step.taken == 1
    step(language_batch(rank))
    found["after"] = step.taken
    own = TrainStep(build(LANGUAGE, impl="reference", seed=3), precision="fp32")
    found["positions"] = words(lambda: own(language_batch(rank, context=8 - rank)))
    free = TrainStep(
        stranger(), stranger_loss, precision="fp32", weight=lambda part: torch.tensor(float(len(part["tokens"])))
    )
    found["weighted"] = words(lambda: free(language_batch(rank, batch=1 + rank)))
    return found


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    torch.save((settings(rank), sizes(rank)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_that_do_not_do_the_same_are_told_in_each(tmp_path: Path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=WORLD)
    for rank in range(WORLD):
        said, found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert "parameters of process 0 and of another one differ" in said["shape"]
        rate = 0.5 if rank == WORLD - 1 else 0.1
        assert (
            f"optimizer of process 0 and of another one differ, here OptimizerConfig(algorithm='adamw', lr={rate}"
            in (said["rate"])
        )
        assert "settings of process 0" in said["precision"]
        assert said["same"] == ""
        assert "process 0 has 4 samples, process 2 has 5; give each as many" in found["samples"]
        assert found["unchanged"]
        assert found["after"] == 2
        assert "process 0 has 32 positions, process 1 has 28" in found["positions"]
        assert found["weighted"] == ""


def test_a_captured_step_on_unequal_batches_is_skipped_and_told_later():
    """The sum as two processes leave it: the other one's size in its own place."""
    replicas, other = Replicas(), [4.0]
    replicas.world = 2
    flat = FlatParameters(stranger(), compute=torch.float32, world=2)

    def start(piece: torch.Tensor) -> None:
        if piece.data_ptr() <= flat.lanes[0].sizes.data_ptr() < piece.data_ptr() + 4 * len(piece):
            flat.lanes[0].sizes[1] = other[0]

    replicas.start = start
    reduction = Reduction(replicas, flat, size=4)
    for size, uneven in ((4.0, False), (5.0, True), (4.0, False)):
        other[0] = size
        reduction.tell()
        flat.lanes[0].loss.fill_(1.0)
        reduction.finish()
        assert bool(flat.lanes[0].loss.isnan()) == uneven
    with pytest.raises(ConfigError, match="process 0 has 4 samples, process 1 has 5"):
        reduction.check()
    reduction.check()


def test_more_processes_than_the_buffers_end_has_room_for():
    flat = FlatParameters(stranger(), compute=torch.float32, world=300)
    lane = flat.lanes[0]
    assert len(lane.sizes) == 300
    assert len(lane.carried) == flat.size + 302
    assert lane.sizes.data_ptr() == lane.weight.data_ptr() + 4
