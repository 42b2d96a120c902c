"""Initial weights, as GPT-2 and the first article's model have them."""

from __future__ import annotations

import math

import torch
from torch import nn

STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module, layers: int, seed: int | None) -> None:
    """Draw all weights in the order of `named_parameters`, so that a seed gives one model.

    Matrices and tables N(0, 0.02); the two projections of a block that write to the residual stream
    N(0, 0.02 / √(2 · layers)); relative tables N(0, 1); biases 0; norm scales 1.
    """
    generator = torch.Generator()
    generator.manual_seed(torch.initial_seed() if seed is None else seed)
    for name, parameter in model.named_parameters():
        owner, leaf = name.rsplit(".", 1) if "." in name else ("", name)
        if leaf == "bias":
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        elif leaf == "relative":
            _normal(parameter, 1.0, generator)
        elif ".blocks." in f".{owner}." and owner.endswith(("attention.out", "mlp.down")):
            _normal(parameter, STD / math.sqrt(2 * layers), generator)
        else:
            _normal(parameter, STD, generator)


def _normal(parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    if parameter.is_meta:
        return
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
