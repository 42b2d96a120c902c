"""Loss on the held-out part."""

from __future__ import annotations

import torch

from ridgeline.data.loader import Validation
from ridgeline.models.language import IGNORE
from ridgeline.train.step import Step


def validate(step: Step, validation: Validation, device: torch.device, windows: int = 0) -> float:
    """Mean loss in nats over the held-out positions that count, without dropout.

    Args:
        step: whose weights and precision are used.
        validation: the held-out windows.
        device: where the model is.
        windows: look at about so many windows, in batches spread evenly over the held-out part; 0 for all.
    """
    total = len(validation)
    wanted = min(total, -(-windows // validation.batch)) if windows else total
    chosen = {index * total // wanted for index in range(wanted)}
    losses, counts = [], []
    with step.weights() as model, torch.inference_mode():
        training = model.training
        model.eval()
        for index, batch in enumerate(validation):
            if index in chosen:
                counts.append(int((batch["targets"] != IGNORE).sum()))
                moved = {name: tensor.to(device) for name, tensor in batch.items()}
                losses.append(model.loss(moved).double())  # type: ignore[operator]
        model.train(training)
    weights = torch.tensor(counts, dtype=torch.float64)
    return float((torch.stack(losses).cpu() * weights).sum() / weights.sum())
