"""The layout of the flat buffers: which parameter lies where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGN = 128  # elements; 512 bytes of fp32 and 256 of bf16, enough for every vector load and tensor map

Decays = Callable[[str, nn.Parameter], bool]


def matrices_decay(name: str, parameter: nn.Parameter) -> bool:
    """The usual rule: tensors of two or more dimensions decay, biases and norm scales do not."""
    return parameter.dim() >= 2


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffers, in elements."""

    name: str
    offset: int
    shape: torch.Size
    decays: bool

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's view of a flat buffer."""
        return flat[self.offset : self.offset + self.size].view(self.shape)


def lay_out(named: Sequence[tuple[str, nn.Parameter]], decays: Decays) -> tuple[list[Slot], int, int]:
    """Slots in buffer order, elements before the first weight without decay, elements in all."""
    slots, offset, boundary = [], 0, 0
    for group in (True, False):
        for name, parameter in named:
            if decays(name, parameter) is group:
                slots.append(Slot(name, offset, parameter.shape, group))
                offset = -(-(offset + parameter.numel()) // ALIGN) * ALIGN
        if group:
            boundary = offset
    return slots, boundary, offset
