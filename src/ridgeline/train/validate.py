"""Loss on the held-out part."""

from __future__ import annotations

import torch

from ridgeline.data.loader import Validation
from ridgeline.engine import Replicas
from ridgeline.models.language import IGNORE
from ridgeline.train.by_head import HeadScores
from ridgeline.train.step import Step


def validate(
    step: Step,
    validation: Validation,
    device: torch.device,
    windows: int = 0,
    replicas: Replicas | None = None,
    by_head: HeadScores | None = None,
) -> float:
    """Mean loss in nats over the held-out positions that count, without dropout.

    Args:
        step: whose weights and precision are used.
        validation: the held-out windows.
        device: where the model is.
        windows: look at about so many windows, in batches spread evenly over the held-out part; 0 for all.
        replicas: the processes that share each batch, all of which get the result; None for this one alone.
        by_head: what takes note of each head of a policy.
    """
    replicas = replicas or Replicas()
    total = len(validation)
    wanted = min(total, -(-windows // validation.batch)) if windows else total
    chosen = {index * total // wanted for index in range(wanted)}
    losses, counts = [], []
    with step.weights() as model, torch.inference_mode():
        training = model.training
        model.eval()
        for index, batch in enumerate(validation):
            count = int((batch["targets"] != IGNORE).sum())
            if index in chosen and count:
                counts.append(count)
                moved = {name: tensor.to(device) for name, tensor in batch.items()}
                if by_head is None:
                    losses.append(model.loss(moved).double())  # type: ignore[operator]
                else:
                    losses.append(by_head.take(model(moved), moved["targets"]))
        model.train(training)
    weights = torch.tensor(counts, dtype=torch.float64)
    summed = (torch.stack(losses).cpu() * weights).sum() if losses else weights.sum()
    loss, weight = replicas.sum(torch.stack([summed, weights.sum()]))
    return float(loss / weight)
