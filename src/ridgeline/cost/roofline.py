"""The roofline: how long an op must take on a card, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.cost.op import OpCost
from ridgeline.errors import UnsupportedError
from ridgeline.hardware import Ceilings, DeviceSpec, Precision

Bound = Literal["matrix units", "memory", "vector units", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a card gives.

    Attributes:
        matrix: FLOP/s of matrix products.
        bandwidth: bytes/s of device memory.
        vector: FLOP/s outside matrix products; None where no figure could be verified.
        source: "dense peaks of the table" or "measured …".
        shared: products run on the vector units too, as in true fp32, so that both kinds of arithmetic add up.
    """

    matrix: float
    bandwidth: float
    vector: float | None
    source: str
    shared: bool = False


def table_rates(spec: DeviceSpec, precision: Precision) -> Rates:
    """Rates from the card's paper."""
    return Rates(
        matrix=spec.peak(precision),
        bandwidth=spec.bandwidth,
        vector=spec.vector_peak,
        source="dense peaks of the table",
        shared=precision == "fp32",
    )


def measured_rates(spec: DeviceSpec, ceilings: Ceilings, precision: Precision) -> Rates:
    """Rates that the card reached when it was measured.

    Raises:
        UnsupportedError: the precision was not measured.
    """
    if precision not in ceilings.products:
        raise UnsupportedError(f"no {precision} product was measured on {ceilings.card}; measure its ceilings again")
    return Rates(
        matrix=ceilings.products[precision],
        bandwidth=ceilings.copy_bytes_per_s,
        vector=spec.vector_peak or ceilings.products.get("fp32"),
        source=f"measured {ceilings.date}",
        shared=precision == "fp32",
    )


class Floor(NamedTuple):
    """The least time something takes, and what bounds it."""

    seconds: float
    bound: Bound


def times(cost: OpCost, rates: Rates) -> dict[Bound, float]:
    """Seconds that one run of an op keeps each resource busy."""
    matrix = cost.executed / rates.matrix
    vector = 0.0 if rates.vector is None else cost.vector_flops / rates.vector
    if rates.shared:
        matrix, vector = 0.0, matrix + vector
    return {"matrix units": matrix, "memory": cost.bytes / rates.bandwidth, "vector units": vector}


def floor(cost: OpCost, rates: Rates) -> Floor:
    """The least time of one run of an op: its busiest resource, the others hidden under it."""
    busy = times(cost, rates)
    bound = max(busy, key=lambda name: busy[name])
    return Floor(busy[bound], bound) if busy[bound] > 0 else Floor(0.0, "nothing")


def floor_of(costs: Iterable[OpCost], rates: Rates) -> Floor:
    """Floor of several ops one after another; bound by what bounds the larger part of that time."""
    total, by_bound = 0.0, dict[Bound, float]()
    for cost in costs:
        one = floor(cost, rates)
        total += one.seconds * cost.count
        by_bound[one.bound] = by_bound.get(one.bound, 0.0) + one.seconds * cost.count
    return Floor(total, max(by_bound, key=lambda name: by_bound[name])) if by_bound else Floor(0.0, "nothing")


def overlapped_floor(costs: Iterable[OpCost], rates: Rates) -> Floor:
    """Floor if every op ran under every other: the busiest resource over the whole step."""
    busy: dict[Bound, float] = {}
    for cost in costs:
        for name, seconds in times(cost, rates).items():
            busy[name] = busy.get(name, 0.0) + seconds * cost.count
    bound = max(busy, key=lambda name: busy[name])
    return Floor(busy[bound], bound)
