"""What a validation says of each part of a controller: its loss, how often it is right, how far a stick is off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.engine import Replicas
from ridgeline.models import Head
from ridgeline.models.language import IGNORE


class HeadScores:
    """Sums over the batches of one validation.

    Args:
        heads: of the policy.
        points: float[classes, 2], where the stick is for each class of a head that is one, by its name.
        device: where the policy is.
    """

    def __init__(self, heads: Sequence[Head], points: Mapping[str, NDArray], device: torch.device) -> None:
        self.heads = tuple(heads)
        self._points = {
            name: torch.as_tensor(array, dtype=torch.float32, device=device) for name, array in points.items()
        }
        self._sums = torch.zeros(len(self.heads), 3, dtype=torch.float64, device=device)
        self._count = torch.zeros(1, dtype=torch.float64, device=device)

    def take(self, logits: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """Add a batch.

        Args:
            logits: [B, T, classes] of each head.
            targets: int[B, T, heads]; −100 does not count, in all heads alike.

        Returns:
            The batch's loss: the sum of the heads' means, as `ControllerPolicy.loss` has it.
        """
        counts = (targets != IGNORE).all(-1)
        sums = []
        for index, head in enumerate(self.heads):
            chosen_NV, target_N = logits[head.name][counts].float(), targets[..., index][counts].long()
            best_N = chosen_NV.argmax(-1)
            off = chosen_NV.new_zeros(())
            if head.name in self._points:
                points = self._points[head.name]
                off = (points[best_N] - points[target_N]).norm(dim=-1).sum()
            loss = F.cross_entropy(chosen_NV, target_N, reduction="sum")
            sums.append(torch.stack([loss, (best_N == target_N).sum(), off]).double())
        batch = torch.stack(sums)
        self._sums += batch
        self._count += counts.sum()
        return batch[:, 0].sum() / counts.sum()

    def values(self, replicas: Replicas) -> dict[str, float]:
        """Means over all that counted, in all processes.

        Returns:
            For each head val_loss.HEAD (nats) and val_accuracy.HEAD; for each stick val_stick_error.HEAD, the mean
            distance between the most likely and the right position, where 1 is a stick pushed to its end.
        """
        *sums, count = replicas.sum(torch.cat([self._sums.flatten(), self._count])).tolist()
        found: dict[str, float] = {}
        for index, head in enumerate(self.heads):
            loss, right, off = (value / count for value in sums[3 * index : 3 * index + 3])
            found |= {f"val_loss.{head.name}": loss, f"val_accuracy.{head.name}": right}
            if head.name in self._points:
                found[f"val_stick_error.{head.name}"] = off
        return found
