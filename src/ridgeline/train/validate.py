"""Loss on the held-out part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.data.loader import Validation
from ridgeline.engine import Replicas, TrainStep
from ridgeline.models.language import IGNORE
from ridgeline.train.by_head import HeadScores
from ridgeline.train.step import Batch, Step

KEPT_BYTES = 2**28  # of held-out windows that stay on a card from one validation to the next


class Evaluation:
    """Mean loss in nats over the held-out positions that count, without dropout; called as often as a run validates.

    Where the step engine captures its steps, the forward pass of a batch is captured at the first call too, and every
    later batch is one launch of it. The numbers are those of the same calls one by one.

    Args:
        step: whose weights and precision are used.
        validation: the held-out windows.
        device: where the model is.
        replicas: the processes that share each batch, all of which get the result; None for this one alone.
        capture: False to call the forward pass kernel by kernel although the step is captured; numbers are the same.
    """

    def __init__(
        self,
        step: Step,
        validation: Validation,
        device: torch.device,
        replicas: Replicas | None = None,
        *,
        capture: bool = True,
    ) -> None:
        self._step, self._validation, self._device = step, validation, device
        self._replicas = replicas or Replicas()
        self._engine = step if capture and isinstance(step, TrainStep) and step.captures else None
        self._forwards: dict[bool, _Replay] = {}
        self._kept: list[tuple[int, Batch]] | None = None

    def __call__(self, by_head: HeadScores | None = None) -> float:
        """The loss with the step's present weights.

        Args:
            by_head: what takes note of each head of a policy.
        """
        losses, counts = [], []
        with self._step.weights() as model, torch.inference_mode():
            training = model.training
            model.eval()
            for count, batch in self._batches():
                counts.append(count)
                result = self._forward(model, batch, logits=by_head is not None)
                losses.append(result.double() if by_head is None else by_head.take(result, batch["targets"]))
            model.train(training)
        weights = torch.tensor(counts, dtype=torch.float64)
        summed = (torch.stack(losses).cpu() * weights).sum() if losses else weights.sum()
        loss, weight = self._replicas.sum(torch.stack([summed, weights.sum()]))
        return float(loss / weight)

    def _forward(self, model: nn.Module, batch: Batch, *, logits: bool) -> Any:
        """A batch's loss, or its logits, which a captured pass overwrites at the next batch."""
        if self._engine is None:
            return _pass(model, batch, logits=logits)
        if logits not in self._forwards:
            self._forwards[logits] = _Replay(self._engine, model, batch, logits=logits)
        return self._forwards[logits](batch)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """The batches on the device, each with how many of its positions count."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[tuple[int, Batch]] | None = [] if self._device.type == "cuda" else None
        size = 0
        for batch in self._validation:
            count = int((batch["targets"] != IGNORE).sum())
            if count:
                moved = {name: tensor.to(self._device) for name, tensor in batch.items()}
                size += sum(tensor.nbytes for tensor in moved.values())
                if size > KEPT_BYTES:
                    kept = None
                if kept is not None:
                    kept.append((count, moved))
                yield count, moved
        self._kept = kept


def _pass(model: nn.Module, batch: Batch, *, logits: bool) -> Any:
    return model(batch) if logits else model.loss(batch)  # type: ignore[operator]


class _Replay:
    """The captured forward pass of one batch shape; made inside `step.weights()`, on which it always computes."""

    def __init__(self, engine: TrainStep, model: nn.Module, batch: Batch, *, logits: bool) -> None:
        self._static = {name: tensor.clone() for name, tensor in batch.items()}
        self._result: Tensor | dict[str, Tensor] | None = None
        self._run = engine.captured(lambda: self._compute(model, logits))

    def _compute(self, model: nn.Module, logits: bool) -> None:
        self._result = _pass(model, self._static, logits=logits)

    def __call__(self, batch: Batch) -> Any:
        for name, tensor in self._static.items():
            tensor.copy_(batch[name])
        self._run()
        return self._result
