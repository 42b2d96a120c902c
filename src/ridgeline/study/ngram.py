"""What counting alone achieves on a text: n-gram models with interpolated Kneser-Ney smoothing.

A network whose loss lies above these lines has learned less than a table of counts: the lines belong into every figure
of losses. Formulas: Chen and Goodman 1998, "An empirical study of smoothing techniques for language modeling", §2.7
and §4.1.6 (one absolute discount an order, n₁ / (n₁ + 2 n₂)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import ConfigError

ORDERS = (1, 2, 3, 4, 5)
_CODES = 2**62  # n-grams are numbers in base V and must fit a signed 64-bit integer

Codes = NDArray[np.int64]


def ngram_losses(
    train: NDArray[np.integer], held_out: NDArray[np.integer], vocabulary: int, orders: tuple[int, ...] = ORDERS
) -> dict[int, float]:
    """Mean held-out loss in nats a token of n-gram models fitted on the training part.

    Every held-out token is predicted from the tokens before it, the first ones from the end of the training part, as
    in a text that goes on.

    Args:
        train: tokens [n] that are counted.
        held_out: tokens [m] that are predicted.
        vocabulary: number of tokens (V).
        orders: n of each model; those whose n-grams are too many to number (V^n ≥ 2^62) are left out.

    Raises:
        ConfigError: a part is shorter than the longest n-gram.
    """
    longest = max(orders)
    if min(len(train), len(held_out)) < longest:
        raise ConfigError(f"{longest}-grams need {longest} tokens in either part; take a longer text or lower orders")
    seen = train.astype(np.int64)
    asked = np.concatenate([seen[len(seen) - longest + 1 :], held_out.astype(np.int64)])
    losses = {}
    for order in orders:
        if vocabulary**order < _CODES:
            p = _probabilities(seen, asked[longest - order :], vocabulary, order)
            losses[order] = float(-np.log(p).mean())
    return losses


def _probabilities(train: Codes, asked: Codes, vocabulary: int, order: int) -> NDArray[np.float64]:
    """Of every token of `asked` behind its first `order` - 1, by the model of that order."""
    p: NDArray[np.float64] | float = 1.0 / vocabulary
    positions = len(asked) - order + 1
    for n in range(1, order + 1):
        grams, counts = _counts(train, vocabulary, n, raw=n == order)
        level = _Level.of(grams, counts, vocabulary)
        p = level.interpolate(_codes(asked, vocabulary, n)[-positions:], vocabulary, p)
    assert isinstance(p, np.ndarray)
    return p


def _codes(tokens: Codes, vocabulary: int, n: int) -> Codes:
    """The n-gram at every position that has one, as a number in base V."""
    length = len(tokens) - n + 1
    codes = np.zeros(length, np.int64)
    for offset in range(n):
        codes = codes * vocabulary + tokens[offset : offset + length]
    return codes


def _counts(train: Codes, vocabulary: int, n: int, *, raw: bool) -> tuple[Codes, Codes]:
    """The distinct n-grams, and how often each occurs or, below the highest order, behind how many tokens."""
    if raw:
        return np.unique(_codes(train, vocabulary, n), return_counts=True)
    longer = np.unique(_codes(train, vocabulary, n + 1))
    return np.unique(longer % vocabulary**n, return_counts=True)


@dataclass(frozen=True, eq=False)
class _Level:
    """Counts of one order: by n-gram, and by history how many tokens follow and how many different ones."""

    grams: Codes
    counts: Codes
    histories: Codes
    totals: Codes
    kinds: Codes
    discount: float

    @classmethod
    def of(cls, grams: Codes, counts: Codes, vocabulary: int) -> _Level:
        histories, first = np.unique(grams // vocabulary, return_index=True)  # grams are sorted, so histories are
        kinds = np.diff(np.append(first, len(grams)))
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # where nothing occurs once, there is nothing to learn the discount from; any share of a count will do
        discount = once / (once + 2 * twice) if once else 0.5
        return cls(grams, counts, histories, np.add.reduceat(counts, first), kinds, discount)

    def interpolate(self, asked: Codes, vocabulary: int, lower: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Probabilities of the last token of every n-gram in `asked`; `lower` are those of the order below."""
        seen = _find(self.grams, asked)
        known = _find(self.histories, asked // vocabulary)
        count = np.where(seen >= 0, self.counts[seen], 0)
        total = np.where(known >= 0, self.totals[known], 1)
        kept = np.where(known >= 0, self.kinds[known] * self.discount / total, 1.0)  # mass for what was never seen
        return np.maximum(count - self.discount, 0) / total + kept * lower


def _find(values: Codes, wanted: Codes) -> Codes:
    """Where each of `wanted` lies in sorted `values`; -1 where it does not."""
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[at] == wanted, at, -1)
