"""What a run says of itself as it begins, and as it is ended from outside."""

from __future__ import annotations

import torch
from torch import nn

from ridgeline.data.resident import ResidentBatches
from ridgeline.engine import TrainStep
from ridgeline.models.accounting import parameters
from ridgeline.train.config import TrainConfig, is_best
from ridgeline.train.engines import fused_missing, fused_slower
from ridgeline.train.metrics import amount
from ridgeline.train.state import LAST

MIB, GIB = 2**20, 2**30


def introduction(config: TrainConfig, model: nn.Module, world: int, lanes: str) -> str:
    """The first line: what is trained, on what, how, and where it goes.

    Args:
        config: with everything decided.
        model: for its size.
        world: processes that train together.
        lanes: how many there are, and how that came about.
    """
    device = torch.device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        name = f"{name} ({threads} threads)"
    how = config.engine
    if is_best(how):
        how = f"{how} (fused blocks, {lanes})"
    elif device.type == "cuda" and (missing := fused_missing(config) or fused_slower(config)):
        how = f"{how} (not the fused blocks: {missing})"
    if config.optimizer.algorithm != "adamw":
        how = f"{how}, {config.optimizer.algorithm}"
    size = amount(sum(parameter.numel() for parameter in model.parameters()))
    where = f"{world} × {name}" if world > 1 else name
    return f"{config.preset}: {size} parameters on {where}, {config.precision}, {how}, in {config.out}"


def large_model(config: TrainConfig) -> str:
    """What a model takes that has no room, and what helps."""
    count = parameters(config.model)
    return (
        f"the model's {amount(count)} parameters take {16 * count / GIB:.1f} GiB with their gradients and the "
        "optimiser's moments; take a smaller model"
    )


def first_step(step: TrainStep, resident: ResidentBatches | None, seconds: float) -> str:
    """The second line, on a card: how long the first step took, compilation and capture included, and the memory."""
    memory = step.memory() | {"data set": resident.nbytes if resident else 0}
    sizes = sorted(memory.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / MIB:.0f}" for name, size in sizes if size >= MIB / 2)
    drawn = "batches drawn on the card" if resident else "batches from the host"
    total = sum(memory.values()) / MIB
    return f"first step {seconds:.1f} s; {drawn}; {total:.0f} MiB on the card: {parts}"


def bereaved(config: TrainConfig, rank: int) -> str:
    """The last line of a process that torchrun ends because of another one."""
    return (
        f"ridgeline: process {rank} was ended from outside, as torchrun does when another process of the run is gone; "
        f"the last checkpoint {config.out}/{LAST} is whole, go on with it by --resume {config.out}"
    )
