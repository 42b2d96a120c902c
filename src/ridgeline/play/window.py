"""What a policy sees of a running game."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.games.env import Controller, Row


class Window:
    """The newest states that a policy sees, filled from the left.

    Attributes:
        rows: name → [T, …], of which the first `len(window)` hold states.
        rolled: whether states have left it.
    """

    def __init__(self, context: int, row: Row, heads: int) -> None:
        categories, numbers = row
        self.rows: dict[str, NDArray[Any]] = {
            "categories": np.zeros((context, len(categories)), np.int64),
            "numbers": np.zeros((context, len(numbers)), np.float32),
            "previous": np.zeros((context, heads), np.int64),
        }
        self._context = context
        self._filled = 0
        self.rolled = False

    def __len__(self) -> int:
        return self._filled

    def append(self, row: Row, previous: Controller) -> None:
        """Add the newest state and the controller that led to it; the oldest leaves a full window."""
        if self._filled == self._context:
            for array in self.rows.values():
                array[:-1] = array[1:].copy()
            self.rolled = True
        else:
            self._filled += 1
        newest = self._filled - 1
        self.rows["categories"][newest], self.rows["numbers"][newest] = row
        self.rows["previous"][newest] = previous
