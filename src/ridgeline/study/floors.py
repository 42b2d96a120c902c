"""How fast a candidate could be at most where it would train, before any second is spent on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ridgeline.bench.case import Case
from ridgeline.bench.explain import default_plan, rates_for
from ridgeline.cost.roofline import Rates, floor_of
from ridgeline.errors import UnsupportedError
from ridgeline.hardware import DeviceSpec, present
from ridgeline.models.plan import PLAIN
from ridgeline.train.config import TrainConfig

PRODUCT = 768  # rows, columns and depth of the product that measures a CPU
COPY_FLOATS = 1 << 24
REPEATS = 20


class Machine(NamedTuple):
    """Where candidates train: what it gives, and the card, or None for a CPU."""

    rates: Rates
    card: DeviceSpec | None

    def case(self, config: TrainConfig) -> Case:
        """The step of a config on the plan that this machine would follow."""
        return Case(
            name=config.preset,
            model=config.model,
            batch=config.batch,
            context=config.window.context,
            precision="fp32" if self.card is None else config.precision,  # type: ignore[arg-type]
            plan=PLAIN if self.card is None else default_plan(self.card),
            accumulation=config.accumulation,
        )

    def floor_s(self, config: TrainConfig) -> float:
        """Least seconds of an optimisation step."""
        return floor_of(self.case(config).cost().ops, self.rates).seconds

    def holds(self, config: TrainConfig) -> bool:
        """Whether a step fits the card's memory; a CPU's is not asked."""
        return self.card is None or self.case(config).fits(self.card)


def this_machine(config: TrainConfig) -> Machine:
    """The device of a config: a card's rates are those of the table, a CPU's are measured, which takes a moment.

    Raises:
        UnsupportedError: a card whose rates are not known.
    """
    device = torch.device(config.device)
    if device.type == "cpu":
        return Machine(_cpu_rates(), None)
    spec = present(device.index or 0)
    if spec is None:
        raise UnsupportedError(f"{device} cannot be asked for what it is; search on another device")
    rates, _ = rates_for(spec, config.precision, None)  # type: ignore[arg-type]
    return Machine(rates, spec)


def _cpu_rates() -> Rates:
    a, b = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    source, target = torch.randn(COPY_FLOATS), torch.empty(COPY_FLOATS)
    product = _best(lambda: torch.mm(a, b))
    copy = _best(lambda: target.copy_(source))
    return Rates(
        matrix=2 * PRODUCT**3 / product,
        bandwidth=2 * 4 * COPY_FLOATS / copy,
        vector=None,
        source="measured",
        shared=True,
    )


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)
