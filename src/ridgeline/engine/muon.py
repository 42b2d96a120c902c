"""Muon over the flat buffers: the part of an update that belongs to the matrices of the blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ridgeline.engine.flat import FlatParameters
from ridgeline.errors import ConfigError
from ridgeline.ops.optimizer.muon import MuonState, muon_after, muon_before
from ridgeline.optim import OptimizerConfig, hidden_matrices, orthogonalise


def muon_names(model: nn.Module, config: OptimizerConfig, names: Iterable[str] | None) -> frozenset[str]:
    """The names of the matrices that Muon trains: those given, or the hidden ones of the model.

    Raises:
        ConfigError: some are given, and the algorithm is not Muon; or they are no collection of names.
    """
    if isinstance(names, str):
        raise ConfigError(f"orthogonal is a list of names, got the one name {names!r}")
    given = frozenset(names or ())
    if config.algorithm == "adamw" and given:
        raise ConfigError("orthogonal names matrices for Muon, but the optimizer's algorithm is adamw; choose muon")
    return hidden_matrices(model) if names is None and config.algorithm == "muon" else given


class MuonUpdate:
    """Moves the weights before `flat.start`, with no number from the host.

    Args:
        flat: the buffers.
        config: momentum and weight decay.
        first: fp32[N], whose part before `flat.start` is the momentum.
        impl: "triton" or "torch", for the passes over the buffers; the products are the vendor's in both.
    """

    def __init__(self, flat: FlatParameters, config: OptimizerConfig, first: Tensor, impl: str) -> None:
        self.flat, self.config, self.impl = flat, config, impl
        end = flat.start
        self._momentum = first[:end]
        self.direction = torch.zeros(end, dtype=torch.bfloat16, device=flat.device)
        beside = 2 if flat.device.type == "cuda" else 0  # a Transformer's blocks have matrices of three shapes
        self._streams = [torch.cuda.Stream(flat.device) for _ in range(beside)]
        self._matrices = [slot.of(self.direction) for slot in flat.slots if slot.offset < end]

    @torch.no_grad()
    def __call__(self, coefficient: Tensor, rate: Tensor, counts: Tensor) -> None:
        """One update.

        Args:
            coefficient: fp32[1], what the gradient is multiplied by.
            rate: fp32[1], the learning rate.
            counts: fp32[1], 1 where the step counts, else 0.
        """
        end, flat = self.flat.start, self.flat
        state = MuonState(
            weights=flat.masters[:end],
            gradient=flat.grad[:end],
            momentum=self._momentum,
            direction=self.direction,
            copy=None if flat.copies is flat.masters else flat.copies[:end],
            coefficient=coefficient,
            rate=rate,
            counts=counts,
        )
        before, after = muon_before, muon_after
        if self.impl == "triton":
            from ridgeline.ops.optimizer.triton_muon import muon_after_raw, muon_before_raw

            before, after = muon_before_raw, muon_after_raw
        before(state, self.config.momentum)
        torch._foreach_copy_(self._matrices, orthogonalise(self._matrices, self._streams))
        after(state, self.config.weight_decay)
