"""Batches of windows: shuffled ones to train on, resumable to the bit, and all held-out ones in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.data.games import GameData
from ridgeline.data.order import Order
from ridgeline.data.text import TextData
from ridgeline.data.window import WindowSpec
from ridgeline.data.windows import GameWindows, TextWindows, Windows
from ridgeline.errors import CheckpointError, ConfigError, DataError


def windows_of(data: TextData | GameData, window: WindowSpec) -> Windows:
    """The windows that `window` makes of a data set."""
    return TextWindows(data, window) if isinstance(data, TextData) else GameWindows(data, window)


class Batches:
    """An endless, seeded sequence of training batches.

    Sample n of the sequence depends on the seed and n alone. So the batch of a step is the same whether it is taken
    whole, as two lanes or in parts for gradient accumulation, and the position in the data is one number.

    Args:
        data: a text or games.
        window: what a window is.
        batch: windows a step learns from, in all processes together.
        seed: of the shuffle.
        rank: number of this process, which takes its equal share of every batch (B).
        world: processes.
    """

    def __init__(
        self,
        data: TextData | GameData,
        window: WindowSpec,
        *,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed must be 0 to 2^63 − 1, got {seed}")
        self.windows = windows_of(data, window)
        self.batch, self.rank, self.share = batch, rank, _share(batch, world)
        self.position = 0
        self.order = Order(self.windows.train_windows, seed)

    def next(self, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The next batch, or this process' share of it.

        Args:
            out: CPU tensors to write to (pinned ones, say), of the batch's names and shapes and of any dtype that
                holds the values; without them new ones are made: int64, numbers float32.

        Returns:
            For text {"tokens": [B, T], "targets": [B, T]}; for games {"categories": [B, T, columns],
            "numbers": [B, T, N], "previous": [B, T, heads], "targets": [B, T, heads]}, without categories or numbers
            where the game has none. Targets of −100 do not count.
        """
        index_B, word_B = self.order.at(self.position + self.rank * self.share, self.share)
        batch = _gather(self.windows, *self.windows.train(index_B, word_B), out)
        self.position += self.batch
        return batch

    def peek(self) -> dict[str, Tensor]:
        """The next batch, or this process' share of it, which is not used up."""
        position = self.position
        batch = self.next()
        self.position = position
        return batch

    def skip(self) -> None:
        """Passes over the next batch, which has been drawn elsewhere."""
        self.position += self.batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self.next()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for JSON."""
        return {
            "position": self.position,
            "seed": self.order.seed,
            "window": dataclasses.asdict(self.windows.window),
            "fingerprint": self.windows.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: it is damaged.
            DataError: it was taken from other data, windows or another seed.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() != own.keys() or not _is_position(state["position"]):
            raise CheckpointError("the position in the data is damaged; resume from another checkpoint")
        for field in ("fingerprint", "window", "seed"):
            if state[field] != own[field]:
                raise DataError(
                    f"the run was on other data or windows ({field}: expected {state[field]}, got {own[field]}); "
                    "resume with the same or start anew from the weights"
                )
        self.position = state["position"]


class Validation:
    """Windows of the held-out part, each token or frame counted once, in the same order every time.

    Args:
        data: a text or games.
        window: what a window is.
        batch: windows a batch, in all processes together; the last one is filled up with windows that do not count, so
            that every batch has the same shape.
        windows: so many of them, spread evenly over the held-out part, the same ones whatever the batch; 0 for all.
        rank: number of this process, which takes its equal share of every batch (B).
        world: processes.
    """

    def __init__(
        self,
        data: TextData | GameData,
        window: WindowSpec,
        *,
        batch: int,
        windows: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.windows = windows_of(data, window)
        self.batch, self.rank, self.share = batch, rank, _share(batch, world)
        start_N, count_N = self.windows.validation()
        total = len(start_N)
        wanted = min(total, windows) if windows else total
        chosen_N = np.arange(wanted) * total // wanted
        self._start_N, self._count_N = start_N[chosen_N], count_N[chosen_N]

    @property
    def positions(self) -> int:
        """Positions that count, in the windows looked at: tokens, or frames that have a target."""
        return int(self._count_N.sum())

    def __len__(self) -> int:
        return -(-len(self._start_N) // self.batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        missing = len(self) * self.batch - len(self._start_N)
        start_N = np.pad(self._start_N, (0, missing), mode="edge")
        count_N = np.pad(self._count_N, (0, missing))
        for first in range(self.rank * self.share, len(start_N), self.batch):
            part = slice(first, first + self.share)
            yield _gather(self.windows, start_N[part], count_N[part], None)


def _share(batch: int, world: int) -> int:
    """A process' part of a batch."""
    if batch < 1:
        raise ConfigError(f"batch must be at least 1, got {batch}")
    if batch % world:
        raise ConfigError(f"{world} processes cannot share a batch of {batch}; use a multiple of {world}")
    return batch // world


def _is_position(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _gather(
    windows: Windows, start_B: NDArray[np.int64], count_B: NDArray[np.int64], out: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    shape = (len(start_B), windows.window.context)
    if out is None:
        out = {
            name: torch.from_numpy(np.empty(shape + field.inner, dtype=field.dtype))
            for name, field in windows.fields.items()
        }
    arrays = {name: out[name].numpy() for name in windows.fields if name in out}
    for name, field in windows.fields.items():
        wanted = f"{name} of shape {list(shape + field.inner)} in {field.least} or wider"
        if name not in arrays:
            raise ConfigError(f"out lacks {wanted}")
        array = arrays[name]
        if array.shape != shape + field.inner or not np.can_cast(field.least, array.dtype):
            raise ConfigError(f"out needs {wanted}, got {list(array.shape)} in {array.dtype}")
    windows.gather(start_B, count_B, arrays)
    return out
