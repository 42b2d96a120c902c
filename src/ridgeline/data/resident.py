"""Batches of games gathered on the device, where the whole data set lies: for data too small to be worth a copy a step.

A batch of 512 windows of 256 states with a hundred numbers each is 50 MB, which a core gathers in 30 ms or more; a card
does it in a tenth of a millisecond, and the host only says where the windows begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.data.games import GameData
from ridgeline.data.loader import Batches
from ridgeline.data.window import WindowSpec
from ridgeline.models.language import IGNORE


class ResidentBatches(Batches):
    """`Batches` of games whose tensors are on a device, equal to those of `Batches` in every bit.

    Args:
        data: games.
        window: what a window is.
        batch: windows a batch (B).
        seed: of the shuffle.
        device: where the data lies and the batches are made.
    """

    def __init__(
        self, data: GameData, window: WindowSpec, *, batch: int, seed: int = 0, device: torch.device | str
    ) -> None:
        super().__init__(data, window, batch=batch, seed=seed)
        arrays: dict[str, NDArray[Any]] = {
            "categories": data.categories.astype(np.int32),  # PyTorch gathers no uint16
            "numbers": data.numbers,
            "previous": data.controller,
            "targets": data.target,
        }
        self._rows = {
            name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items() if array.shape[1]
        }
        self._position_T = torch.arange(window.context, device=device)

    def next(self, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The next batch, see Batches; `out` is for batches on the host and is not taken."""
        assert out is None
        index_B, word_B = self._order.at(self.position, self.batch)
        self.position += self.batch
        both_2B = torch.from_numpy(np.stack(self.windows.train(index_B, word_B)))
        if self._position_T.is_cuda:
            both_2B = both_2B.pin_memory()
        start_B, count_B = both_2B.to(self._position_T.device, non_blocking=True)
        return self._gather(start_B[:, None], count_B[:, None])

    def _gather(self, start_B1: Tensor, count_B1: Tensor) -> dict[str, Tensor]:
        window, position_T = self.windows.window, self._position_T
        last_B1 = (count_B1 - 1).clamp(min=0)
        rows_BT = start_B1 + window.stride * torch.minimum(position_T, last_B1)
        batch = {}
        for name, rows in self._rows.items():
            part = rows[rows_BT + window.delay if name == "targets" else rows_BT]
            batch[name] = part if part.is_floating_point() else part.long()
        batch["targets"].masked_fill_((position_T >= count_B1)[..., None], IGNORE)
        return batch
