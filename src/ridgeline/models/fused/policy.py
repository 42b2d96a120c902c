"""Both ends of a controller policy: the input layer, and the heads with their losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.models.config import PolicyConfig
from ridgeline.ops import heads as sequential
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.inputs import InputColumns, input_layer
from ridgeline.ops.policy_heads import HeadWeights, available, policy_heads, unsupported

if TYPE_CHECKING:
    from ridgeline.models.policy import ControllerPolicy


def input_columns(config: PolicyConfig) -> InputColumns:
    """What stands in the policy's input vector."""
    names = [head.name for head in config.heads]
    tables = tuple(index for index, category in enumerate(config.categories) for _ in range(category.columns))
    one_hots = tuple((names.index(name), config.classes(name)) for name in config.previous)
    return InputColumns(tables=tables, numbers=config.numbers, one_hots=one_hots)


def _rows(batch: dict[str, Tensor], name: str, wanted: bool) -> Tensor | None:
    """The batch's part over (B · T) rows, or None where the vector has none of it."""
    return batch[name].flatten(0, 1).contiguous() if wanted else None


def heads_impl(heads: Sequence[HeadWeights], device: torch.device, dtype: torch.dtype) -> str | None:
    """The fastest implementation that takes these heads together, by measurement on an H200; None where none does."""
    width = heads[0].up_HS.shape[1]
    shapes = [(head.up_HS.shape[0], head.down_VH.shape[0]) for head in heads]

    def takes(impl: str) -> bool:
        return available(impl, device) is None and unsupported(impl, width, shapes, dtype) is None

    return next(filter(takes, ("cuda", "triton")), None)


def policy_losses(
    model: ControllerPolicy, batch: dict[str, Tensor], dropout: DropoutState | None, eps: float
) -> dict[str, Tensor]:
    """The losses of `ControllerPolicy.losses`, by fused kernels.

    Heads that hear logits run as one product and a kernel a head (`policy_heads`); those that hear classes, or are of
    sizes which that does not take, padded and one after the other (`heads_losses`).
    """
    config = model.config
    x_NC = input_layer(
        _rows(batch, "categories", bool(config.categories)), _rows(batch, "numbers", config.numbers > 0),
        _rows(batch, "previous", bool(config.previous)), input_columns(config),
        list(model.tables.parameters()), model.input.weight, model.input.bias,
        impl="triton",
    )  # fmt: skip
    state_NC = model.decoder(x_NC.view(*batch["targets"].shape[:2], -1), dropout).flatten(0, 1)
    heads = [HeadWeights(*model.heads[head.name].parameters()) for head in config.heads]  # in the order of the fields
    targets_NK = batch["targets"].flatten(0, 1)
    impl = heads_impl(heads, state_NC.device, state_NC.dtype) if config.conditioning == "logits" else None
    if impl is not None:
        losses_K = policy_heads(state_NC, heads, targets_NK, eps=eps, impl=impl)
    else:
        losses_K = sequential.heads_losses(
            state_NC, [sequential.HeadWeights(*head) for head in heads], targets_NK,
            eps=eps, conditioning=config.conditioning, impl="triton",
        )  # fmt: skip
    return {head.name: loss for head, loss in zip(config.heads, losses_K.unbind(), strict=True)}
