"""Windows over texts and games: which there are, and how they are gathered into a batch.

Which windows train:
    text    each epoch cuts the training part into adjoining windows, from an offset that differs by epoch, so that
            every token is trained on once an epoch (but for some at the ends).
    games   a window for every frame e that has a target: the one a player would hold at play when e is its newest
            frame, so positions e, e − stride, … back to T of them or to the game's start, whichever comes first. One
            that begins at the start is filled from the left, as at play, and goes on past e to T positions where the
            game has them (attention is causal, so more frames learn at no cost). So early frames are seen as often
            as others, and games shorter than a window teach as well. What a game lacks is padded on the right.

Which windows validate: adjoining ones over the whole held-out part, so that every held-out token, or frame that has a
target, counts exactly once (with stride 2, the even and the odd frames of a game make two rows of windows).

Padding has the target −100, which does not count; its inputs repeat a row of the data.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.games import GameData
from ridgeline.data.text import TextData
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError
from ridgeline.models.language import IGNORE

Starts = NDArray[np.int64]
Counts = NDArray[np.int64]
Batch = dict[str, NDArray[Any]]


class Field(NamedTuple):
    """One tensor of a batch.

    Attributes:
        inner: its shape beyond (B, T).
        dtype: what it is delivered in unless asked otherwise.
        least: the smallest dtype that holds every value, padding included.
    """

    inner: tuple[int, ...]
    dtype: np.dtype[Any]
    least: np.dtype[Any]


class Resident(NamedTuple):
    """The rows of a data set as they can lie on a card, and what its training windows are made of.

    Attributes:
        arrays: name of each tensor of a batch → its rows [N, …].
        shifts: name → rows by which its values lie later than the window's positions.
        offsets: positions among which a text's epoch chooses where its windows begin; 0 for games.
        games: int64 [3, G], of each training game: windows up to its end, frames that have a target, and its first row;
            None for a text.
    """

    arrays: dict[str, NDArray[Any]]
    shifts: dict[str, int]
    offsets: int
    games: NDArray[np.int64] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; one that has two names counts once."""
        return sum({id(array): array.nbytes for array in self.arrays.values()}.values())


class Windows(Protocol):
    """What the batches need of a kind of data.

    A window is a pair (start, count): the row of its first position, and how many positions from there have targets.

    Attributes:
        window: the specification.
        fingerprint: checksum of the data.
        train_windows: windows in an epoch of training.
        fields: name of each tensor → what it is.
    """

    window: WindowSpec
    fingerprint: str
    train_windows: int
    fields: dict[str, Field]

    def train(self, index_B: NDArray[np.int64], word_B: NDArray[np.uint64]) -> tuple[Starts, Counts]:
        """The training windows of the given numbers, with 64 random bits of each one's epoch."""

    def validation(self) -> tuple[Starts, Counts]:
        """All validation windows, in order."""

    def gather(self, start_B: Starts, count_B: Counts, out: Batch) -> None:
        """Write the windows into arrays of shape (B, T, …)."""

    def resident(self) -> Resident:
        """What a card needs to draw the training windows itself."""


class TextWindows:
    """Windows over a text: {"tokens": [B, T], "targets": [B, T]}, the targets one token later.

    Raises:
        ConfigError: a stride or delay, which a text does not have.
        DataError: the training part is shorter than a window.
    """

    def __init__(self, data: TextData, window: WindowSpec) -> None:
        if window.stride != 1 or window.delay != 0:
            raise ConfigError(f"text has stride 1 and delay 0, got {window.stride} and {window.delay}")
        if data.train < window.context + 1:
            raise DataError(
                f"{data.name} has {data.train} tokens to train on, a context of {window.context} needs "
                f"{window.context + 1}; give a longer text or a shorter context"
            )
        self.window = window
        self.fingerprint = data.fingerprint
        self.fields = {name: _field(name, data.tokens, ()) for name in ("tokens", "targets")}
        # one window fewer than fit leaves room for the epoch's offset, as far as there are two
        self.train_windows = max(1, (data.train - 1) // window.context - 1)
        self._offsets = min(window.context, data.train - self.train_windows * window.context)
        self._data = data

    def train(self, index_B: NDArray[np.int64], word_B: NDArray[np.uint64]) -> tuple[Starts, Counts]:
        """See Windows."""
        offset_B = (word_B % np.uint64(self._offsets)).astype(np.int64)
        return index_B * self.window.context + offset_B, np.full(len(index_B), self.window.context)

    def validation(self) -> tuple[Starts, Counts]:
        """See Windows; the first held-out token is predicted from the last one of the training part."""
        start_N = np.arange(self._data.train - 1, len(self._data.tokens) - 1, self.window.context)
        return start_N, np.minimum(self.window.context, len(self._data.tokens) - 1 - start_N)

    def gather(self, start_B: Starts, count_B: Counts, out: Batch) -> None:
        """See Windows."""
        tokens, T = self._data.tokens, self.window.context
        if (count_B == T).all():  # always so in training: whole rows are copied at memory speed
            rows_BT = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[start_B]
        else:
            rows_BT = tokens[np.minimum(start_B[:, None] + np.arange(T + 1), len(tokens) - 1)]
        out["tokens"][...] = rows_BT[:, :-1]
        out["targets"][...] = rows_BT[:, 1:]
        out["targets"][np.arange(T) >= count_B[:, None]] = IGNORE

    def resident(self) -> Resident:
        """See Windows."""
        tokens = self._data.tokens
        return Resident({"tokens": tokens, "targets": tokens}, {"tokens": 0, "targets": 1}, self._offsets, None)


class GameWindows:
    """Windows over games.

    {"categories": [B, T, columns], "numbers": float32[B, T, N], "previous": [B, T, heads], "targets": [B, T, heads]};
    categories or numbers are absent where the game has none.

    Raises:
        DataError: no game is longer than the delay.
    """

    def __init__(self, data: GameData, window: WindowSpec) -> None:
        self.window = window
        self.fingerprint = data.fingerprint
        arrays: dict[str, NDArray[Any]] = {
            "categories": data.categories,
            "numbers": data.numbers,
            "previous": data.controller,
            "targets": data.target,
        }
        self._arrays = {name: array for name, array in arrays.items() if array.shape[1]}
        self.fields = {name: _field(name, array, array.shape[1:]) for name, array in self._arrays.items()}
        frames_G = np.maximum(np.diff(data.offsets) - window.delay, 0)  # frames that have a target
        held_out_G = np.zeros(len(frames_G), dtype=bool)
        held_out_G[data.held_out] = True
        self._first = {side: data.offsets[:-1][held_out_G == side] for side in (False, True)}
        self._frames = {side: frames_G[held_out_G == side] for side in (False, True)}
        self._ends = np.cumsum(self._frames[False])
        self.train_windows = int(self._ends[-1])
        if self.train_windows == 0 or not self._frames[True].any():
            raise DataError(
                f"{data.name} has no game longer than the delay of {window.delay} frames to train on and to hold out; "
                "give longer games or a shorter delay"
            )

    def train(self, index_B: NDArray[np.int64], word_B: NDArray[np.uint64]) -> tuple[Starts, Counts]:
        """See Windows; window e of a game is the one whose newest frame at play is e."""
        game_B = np.searchsorted(self._ends, index_B, side="right")
        frames_B = self._frames[False][game_B]
        newest_B = index_B - (self._ends[game_B] - frames_B)
        start_B = newest_B - (self.window.span - 1)
        start_B = np.where(start_B < 0, newest_B % self.window.stride, start_B)
        return self._first[False][game_B] + start_B, self._positions(frames_B - start_B)

    def validation(self) -> tuple[Starts, Counts]:
        """See Windows."""
        starts, counts = [], []
        stride, block = self.window.stride, self.window.stride * self.window.context
        for first, frames in zip(self._first[True], self._frames[True], strict=True):
            for phase in range(min(stride, frames)):
                start_W = np.arange(phase, frames, block)
                starts.append(first + start_W)
                counts.append(self._positions(frames - start_W))
        return np.concatenate(starts), np.concatenate(counts)

    def gather(self, start_B: Starts, count_B: Counts, out: Batch) -> None:
        """See Windows."""
        position_T = np.arange(self.window.context)
        rows_BT = start_B[:, None] + self.window.stride * np.minimum(position_T, np.maximum(count_B - 1, 0)[:, None])
        for name, array in self._arrays.items():
            rows = rows_BT + self.window.delay if name == "targets" else rows_BT
            if array.dtype == out[name].dtype and out[name].flags.c_contiguous:
                np.take(array, rows, axis=0, out=out[name], mode="clip")  # no row is clipped; "raise" would copy twice
            else:
                out[name][...] = array.take(rows, axis=0)
        out["targets"][position_T >= count_B[:, None]] = IGNORE

    def resident(self) -> Resident:
        """See Windows."""
        shifts = {name: self.window.delay if name == "targets" else 0 for name in self._arrays}
        games = np.stack([self._ends, self._frames[False], self._first[False]])
        return Resident(self._arrays, shifts, 0, games)

    def _positions(self, frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions that fit into so many frames, at most T."""
        return np.minimum(-(-frames // self.window.stride), self.window.context)


def _field(name: str, array: NDArray[Any], inner: tuple[int, ...]) -> Field:
    whole = np.dtype(np.int64) if array.dtype.kind == "u" else array.dtype
    return Field(inner, whole, np.promote_types(array.dtype, np.int8) if name == "targets" else array.dtype)
