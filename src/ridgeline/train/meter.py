"""The share of the card that a run uses, where the card is known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.cost import Utilisation, step_utilisation
from ridgeline.hardware import PRECISIONS, DeviceSpec, present
from ridgeline.models.accounting import step_cost
from ridgeline.train.config import TrainConfig

Meter = Callable[[float], Utilisation]
"""From tokens/s of all cards together to what that takes of each."""


def meter(config: TrainConfig, spec: DeviceSpec | None = None, cards: int = 1) -> Meter | None:
    """What measures a run; None where the card's peak is not known.

    It counts the FLOPs that the model needs (causal attention at its half, nothing twice) and the fewest bytes.

    Args:
        config: with device and precision decided.
        spec: the card; None for the one that the config's device is.
        cards: how many of them train together.

    What it returns raises ConfigError above 100 %, and names the input that is wrong.
    """
    device = torch.device(config.device)
    if spec is None and device.type == "cuda":
        spec = present(device.index or 0)
    number = next((known for known in PRECISIONS if known == config.precision.removesuffix("-autocast")), None)
    if spec is None or number is None or number not in spec.tflops:
        return None
    card, precision = spec, number
    context, accumulation = config.window.context, config.accumulation
    batch = config.batch // cards
    cost = step_cost(config.model, batch=batch, context=context, precision=precision, accumulation=accumulation)

    def measured(rate: float) -> Utilisation:
        return step_utilisation(cost, config.step_tokens / rate, card, precision, gpus=cards)

    return measured
