"""How much of a card a step used: model FLOPs and bytes against the card's peaks. Above 100 % is an error.

MFU divides the FLOPs that the model needs (causal attention at its half, nothing twice) by what the card could have
done in the time; the share of the bandwidth divides a step's fewest bytes in the same way. A figure above 100 % is
never reported: one of the inputs is wrong, and the error says which.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ridgeline.cost.op import StepCost
from ridgeline.errors import ConfigError
from ridgeline.hardware import PRECISIONS, DeviceSpec, Precision, present
from ridgeline.hardware.spec import TERA

CACHE_MULTIPLE = 4  # below this many times the L2 cache, part of the bytes may never have reached memory
MOST = 0.5  # share of a step's bytes in ops larger than the L2 cache from which a rate says something of the memory


class Utilisation(NamedTuple):
    """A step's share of the card.

    Attributes:
        mfu: model FLOPs over peak FLOPs.
        flops_per_s: model FLOPs a second, all GPUs together.
        bytes_per_s: the step's fewest bytes a second, all GPUs together.
        bandwidth: those bytes over the bandwidth; None where most belong to ops whose tensors fit in the L2 cache.
    """

    mfu: float
    flops_per_s: float
    bytes_per_s: float
    bandwidth: float | None


def _check(seconds: float, flops: float, gpus: int) -> None:
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, got {seconds}")
    if not flops >= 0:
        raise ConfigError(f"flops must not be negative, got {flops}")
    if gpus < 1:
        raise ConfigError(f"gpus must be at least 1, got {gpus}")


def _misplaced(spec: DeviceSpec, gpus: int) -> str | None:
    """What is wrong with the card or the number of cards that were named; None if nothing can be told."""
    here = present()
    if here is not None and here.key != spec.key:
        return f"the device is wrong: {here.name} is here, not {spec.name}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > gpus:
            return f"gpus is wrong: {world} processes took part, not {gpus}"
    return None


def _culprit(
    achieved: float, spec: DeviceSpec, precision: Precision, seconds: float, gpus: int, bytes_per_s: float | None
) -> str:
    """Which input made a utilisation impossible, from what can be checked: card, processes, precision, clock."""
    misplaced = _misplaced(spec, gpus)
    if misplaced is not None:
        return misplaced
    faster = [p for p in PRECISIONS if p in spec.tflops and achieved <= spec.peak(p) and p != precision]
    if faster:
        return f"the precision is wrong: that rate is possible in {faster[0]}, not in {precision}"
    if bytes_per_s is not None and bytes_per_s <= spec.bandwidth:
        return "flops is wrong: the same step's bytes would fit the time, so it did less arithmetic than was counted"
    return f"seconds is wrong: {seconds:.6g} s is too short; synchronise with the card before reading the clock"


def mfu(
    *,
    flops: float,
    seconds: float,
    spec: DeviceSpec,
    precision: Precision,
    gpus: int = 1,
    nbytes: float | None = None,
) -> float:
    """Model FLOPs utilisation of a step, between 0 and 1.

    Args:
        flops: FLOPs that the model needs for the step, on all GPUs together.
        seconds: how long the step took.
        spec: the card.
        precision: of the matrix products.
        gpus: how many cards shared the work.
        nbytes: the fewest bytes of the step, where known; they tell a wrong clock from a wrong count.

    Raises:
        ConfigError: the result is above 100 %; the message names the input that is wrong.
    """
    _check(seconds, flops, gpus)
    achieved, peak = flops / seconds / gpus, spec.peak(precision)
    if achieved > peak:
        per_s = None if nbytes is None else nbytes / seconds / gpus
        raise ConfigError(
            f"MFU of {achieved / peak:.0%} cannot be ({achieved / TERA:.1f} TFLOP/s a card, where {spec.name} has "
            f"{peak / TERA:.1f} in {precision}): {_culprit(achieved, spec, precision, seconds, gpus, per_s)}"
        )
    return achieved / peak


def bandwidth_share(*, nbytes: float, seconds: float, spec: DeviceSpec, gpus: int = 1) -> float | None:
    """Bytes/s of device memory over the card's bandwidth, between 0 and 1.

    None where the bytes are fewer than four times the L2 cache: they may not have come from memory at all.

    Args:
        nbytes: bytes moved, on all GPUs together.
        seconds, spec, gpus: as for `mfu`.

    Raises:
        ConfigError: the result is above 100 %; the message names the input that is wrong.
    """
    _check(seconds, nbytes, gpus)
    cache = spec.l2_bytes
    if cache is None or nbytes / gpus < CACHE_MULTIPLE * cache:
        return None
    rate = nbytes / seconds / gpus
    if rate > spec.bandwidth:
        wrong = _misplaced(spec, gpus) or f"seconds ({seconds:.6g}) is too short or bytes ({nbytes:.6g}) too many"
        raise ConfigError(
            f"{rate / spec.bandwidth:.0%} of the memory bandwidth cannot be ({rate / TERA:.2f} TB/s a card, where "
            f"{spec.name} has {spec.bandwidth / TERA:.2f}): {wrong}"
        )
    return rate / spec.bandwidth


def step_utilisation(
    step: StepCost, seconds: float, spec: DeviceSpec, precision: Precision, *, gpus: int = 1, steps: int = 1
) -> Utilisation:
    """Utilisation of `steps` steps that took `seconds`; `step` is one GPU's part of a step.

    A step's bytes are the fewest of ops that run one after another, on the plan that it was counted for. They say
    something of the memory where most belong to ops whose tensors do not fit in the L2 cache.

    Args:
        step: cost on one GPU.
        seconds: of all the steps.
        spec, precision, gpus: as for `mfu`.
        steps: how many.

    Raises:
        ConfigError: MFU or the share of the bandwidth is above 100 %; the message names the input that is wrong.
    """
    flops, nbytes = step.flops * gpus * steps, step.bytes * gpus * steps
    share = mfu(flops=flops, seconds=seconds, spec=spec, precision=precision, gpus=gpus, nbytes=nbytes)
    cache = spec.l2_bytes or math.inf
    outside = sum(op.bytes * op.count for op in step.ops if op.bytes > cache)
    bandwidth = None
    if outside > MOST * step.bytes:
        bandwidth = bandwidth_share(nbytes=nbytes, seconds=seconds, spec=spec, gpus=gpus)
    return Utilisation(share, flops / seconds, nbytes / seconds, bandwidth)
