"""The layout of the flat buffers: which parameter lies where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.ops.known import ROWS

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

    @property
    def padded(self) -> torch.Size:
        """The shape with the rows that a matrix is followed by, all zeros: up to a multiple of ROWS."""
        rows = self.shape[0] + -self.shape[0] % ROWS if len(self.shape) == 2 else None
        return self.shape if rows is None else torch.Size((rows, self.shape[1]))

    def of(self, flat: Tensor, start: int = 0) -> Tensor:
        """The parameter's view of a flat buffer, or of one that begins at element `start` of the layout."""
        return flat[self.offset - start : self.offset - start + self.size].view(self.shape)


class Layout(NamedTuple):
    """Where everything lies.

    Attributes:
        slots: in the buffer's order: Muon's weights, AdamW's with decay, AdamW's without.
        start: elements before the first weight of AdamW.
        boundary: elements before the first weight without decay.
        size: elements in all.
    """

    slots: list[Slot]
    start: int
    boundary: int
    size: int


def lay_out(named: Sequence[tuple[str, nn.Parameter]], decays: Decays, orthogonal: Collection[str] = ()) -> Layout:
    """The layout of parameters, of which Muon trains those called `orthogonal`."""
    groups: tuple[list[tuple[str, nn.Parameter]], ...] = ([], [], [])
    for name, parameter in named:
        groups[0 if name in orthogonal else 1 if decays(name, parameter) else 2].append((name, parameter))
    slots, ends = [], [0]
    for number, group in enumerate(groups):
        offset = ends[-1]
        for name, parameter in group:
            slots.append(Slot(name, offset, parameter.shape, number < 2))
            offset = -(-(offset + slots[-1].padded.numel()) // ALIGN) * ALIGN
        ends.append(offset)
    return Layout(slots, *ends[1:])
