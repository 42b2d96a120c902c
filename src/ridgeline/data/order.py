"""The order of samples as a function: sample number → window, so that a position in the data is one integer.

Sample n belongs to epoch n // count and is entry n % count of that epoch's permutation. The permutation is a
eight-round Feistel network over a × b ≥ count cells, with keys from Philox(seed, epoch); numbers past `count` walk on
until they fall inside. Nothing is stored, any slice of the sequence can be had alone (a lane, a rank, a resumed run),
and a batch's content does not depend on how the batches before it were cut.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

ROUNDS = 8  # with 4, which windows follow one another was visibly not random for small counts


class Order:
    """A shuffled, endless sequence over `count` windows.

    Args:
        count: windows in an epoch.
        seed: of the shuffle, below 2^63.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self.columns = math.isqrt(count - 1) + 1  # ceil(sqrt(count)): few cells lie past the count
        self.rows = -(-count // self.columns)

    def at(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Samples start … start + length − 1.

        Returns:
            index_B: int64[length], each sample's window, 0 … count − 1.
            word_B: uint64[length], 64 random bits of each sample's epoch.
        """
        epoch_B, cell_B = np.divmod(np.arange(start, start + length, dtype=np.int64), self.count)
        first = int(epoch_B[0])
        words_EK = np.stack([self._words(epoch) for epoch in range(first, int(epoch_B[-1]) + 1)])
        words_BK = words_EK[epoch_B - first]
        cell_B = self._permute(cell_B, words_BK)
        outside = np.flatnonzero(cell_B >= self.count)
        while len(outside):
            cell_B[outside] = self._permute(cell_B[outside], words_BK[outside])
            outside = outside[cell_B[outside] >= self.count]
        return cell_B, words_BK[:, ROUNDS]

    def _words(self, epoch: int) -> NDArray[np.uint64]:
        return Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(ROUNDS + 1)

    def _permute(self, cell_B: NDArray[np.int64], words_BK: NDArray[np.uint64]) -> NDArray[np.int64]:
        row_B, column_B = np.divmod(cell_B, self.columns)
        for r in range(0, ROUNDS, 2):
            row_B = (row_B + _hash(column_B, words_BK[:, r], self.rows)) % self.rows
            column_B = (column_B + _hash(row_B, words_BK[:, r + 1], self.columns)) % self.columns
        return row_B * self.columns + column_B


def _hash(value_B: NDArray[np.int64], key_B: NDArray[np.uint64], below: int) -> NDArray[np.int64]:
    """A keyed random number below `below` (SplitMix64's finaliser, Steele et al. 2014)."""
    z_B = value_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key_B
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z_B ^ (z_B >> np.uint64(31))) % np.uint64(below)).astype(np.int64)
