"""Data that lies on the card: a step draws its batches there, inside its CUDA graph, and the host prepares none."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.data.loader import Batches

LIMIT = 8 * 2**30  # bytes of a data set that may lie on a card
SHARE = 4  # at most one in so many of the bytes that are free there


def fits(batches: Batches, device: torch.device) -> bool:
    """Whether the data set is small enough to lie on the card beside a step."""
    size = batches.windows.resident().nbytes
    return size <= LIMIT and SHARE * size <= torch.cuda.mem_get_info(device)[0]


class ResidentBatches:
    """The batches of `Batches`, the same samples in the same order, drawn on the device.

    Args:
        batches: at the position step · batch, where the step is the device's own count.
        device: of the step.

    Attributes:
        tensors: the batch, at fixed addresses: the names, shapes and dtypes of `Batches.next`.
    """

    def __init__(self, batches: Batches, device: torch.device) -> None:
        from ridgeline.ops.windows.triton import Drawn, place_buffers  # imports Triton

        windows, order, B = batches.windows, batches.order, batches.share
        resident = windows.resident()
        kept = {id(array): _on(array, device) for array in resident.arrays.values()}
        self._data = {name: kept[id(array)] for name, array in resident.arrays.items()}
        self._shifts = resident.shifts
        games = [None] * 3 if resident.games is None else _on(resident.games, device).unbind()
        self._drawn = Drawn(
            seed=order.seed,
            windows=order.count,
            rows=order.rows,
            columns=order.columns,
            batch=batches.batch,
            offset=batches.rank * B,
            context=windows.window.context,
            stride=windows.window.stride,
            offsets=resident.offsets,
            ends_G=games[0],
            frames_G=games[1],
            first_G=games[2],
        )
        self._start_B, self._count_B = place_buffers(B, device)
        shape = (B, windows.window.context)
        self.tensors = {
            name: torch.zeros(shape + field.inner, dtype=_torch(field.dtype), device=device)
            for name, field in windows.fields.items()
        }

    def draw(self, seed_step: Tensor) -> None:
        """Fills `tensors` with the batch of a step: int64[2] on the device, whose second number is the step's."""
        from ridgeline.ops.windows.triton import gather_raw, place_raw

        place_raw(self._drawn, seed_step, self._start_B, self._count_B)
        for name, out in self.tensors.items():
            gather_raw(
                self._data[name],
                out.view(*out.shape[:2], -1),
                self._start_B,
                self._count_B,
                stride=self._drawn.stride,
                shift=self._shifts[name],
                targets=name == "targets",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the data on the device."""
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in self._data.values()}.values())


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device, through memory of the host's own: the array may be mapped from a file."""
    return torch.from_numpy(np.array(array)).to(device)


def _torch(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
