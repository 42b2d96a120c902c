"""Both ends of a controller policy: the input layer, and heads with their losses and gradients in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ridgeline.models.config import PolicyConfig
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.policy_heads import HeadWeights, policy_heads
from ridgeline.ops.policy_input import InputColumns, policy_input

if TYPE_CHECKING:
    from ridgeline.models.policy import ControllerPolicy


def input_columns(config: PolicyConfig) -> InputColumns:
    """The parts of the policy's input vector."""
    names = [head.name for head in config.heads]
    return InputColumns(
        tuple((category.rows, category.width, category.columns) for category in config.categories),
        config.numbers,
        tuple((names.index(name), config.classes(name)) for name in config.previous),
    )


def _rows(batch: dict[str, Tensor], name: str) -> Tensor | None:
    return batch[name].flatten(0, 1) if name in batch else None


def policy_state(model: ControllerPolicy, batch: dict[str, Tensor], dropout: DropoutState | None) -> Tensor:
    """`ControllerPolicy.trunk` (B, T, C) by fused kernels."""
    B, T = next(iter(batch.values())).shape[:2]
    tables = [model.tables[category.name].weight for category in model.config.categories]
    x_NC = policy_input(
        input_columns(model.config), _rows(batch, "categories"), _rows(batch, "numbers"), _rows(batch, "previous"),
        tables, model.input.weight, model.input.bias, impl="triton",
    )  # fmt: skip
    return model.decoder(x_NC.view(B, T, -1), dropout)


def policy_losses(model: ControllerPolicy, batch: dict[str, Tensor], dropout: DropoutState | None) -> dict[str, Tensor]:
    """The losses of `ControllerPolicy.losses` where heads hear logits, by fused kernels."""
    heads = []
    for head in model.config.heads:
        m = model.heads[head.name]
        heads.append(HeadWeights(m.norm.weight, m.norm.bias, m.up.weight, m.up.bias, m.down.weight, m.down.bias))
    state_NC = policy_state(model, batch, dropout).flatten(0, 1)
    losses_K = policy_heads(state_NC, heads, batch["targets"].flatten(0, 1), impl="triton")
    return {head.name: loss for head, loss in zip(model.config.heads, losses_K.unbind(), strict=True)}
