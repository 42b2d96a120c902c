"""One game as a table, whatever the game: what the loader reads and every game's adapter writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class GameTable:
    """The rows of one whole game, one a decision frame.

    Attributes:
        categories: uint16[T, columns], categorical inputs of the state, in the order of PolicyConfig.categories.
        numbers: float32[T, N], real-valued inputs of the state.
        controller: uint8[T, heads], the classes of the input that led to the state.
        target: uint8[T, heads], the classes to choose at the state.
    """

    categories: NDArray[np.uint16]
    numbers: NDArray[np.float32]
    controller: NDArray[np.uint8]
    target: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.numbers)
