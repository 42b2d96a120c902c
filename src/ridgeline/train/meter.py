"""The share of the card that a run uses, where the card is known."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.cost.utilisation import mfu
from ridgeline.hardware import PRECISIONS, DeviceSpec, present
from ridgeline.models.accounting import step_cost
from ridgeline.train.config import TrainConfig


def mfu_meter(config: TrainConfig, spec: DeviceSpec | None = None, cards: int = 1) -> Callable[[float], float] | None:
    """A function from tokens/s to model FLOPs utilisation, 0 to 1; None where the card's peak is not known.

    It counts the FLOPs that the model needs: causal attention at its half, nothing twice.

    Args:
        config: with device and precision decided.
        spec: the card; None for the one that the config's device is.
        cards: how many of them train together.

    The function raises ConfigError above 100 %, and names the input that is wrong.
    """
    device = torch.device(config.device)
    if spec is None and device.type == "cuda":
        spec = present(device.index or 0)
    number = next((known for known in PRECISIONS if known == config.precision.removesuffix("-autocast")), None)
    if spec is None or number is None or number not in spec.tflops:
        return None
    card, precision = spec, number
    cost = step_cost(config.model, batch=config.batch, context=config.window.context, precision=precision)
    flops_per_token = cost.flops / config.step_tokens / cards
    return lambda rate: mfu(flops=flops_per_token * rate, seconds=1.0, spec=card, precision=precision)
