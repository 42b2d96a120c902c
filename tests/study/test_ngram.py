"""n-gram lines: probabilities that sum to one, a hand count, known figures of a text."""

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ridgeline.errors import ConfigError
from ridgeline.study.ngram import _probabilities, ngram_losses

TEXT = np.frombuffer(b"the cat sat on the mat and the cat ate the rat that sat on the hat", np.uint8)
LETTERS, TOKENS = np.unique(TEXT, return_inverse=True)
V = len(LETTERS)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_of_every_continuation_sum_to_one(order: int) -> None:
    """Behind seen and unseen histories alike: a loss from unnormalised probabilities means nothing."""
    for history in (TOKENS[3 : 2 + order], np.arange(order - 1), TOKENS[7 : 6 + order]):
        total = sum(_probabilities(TOKENS, np.append(history, token), V, order)[-1] for token in range(V))
        assert total == pytest.approx(1, abs=1e-12)


def test_bigram_counted_by_hand() -> None:
    """p(w|h) = (c(hw) − D)/c(h) + D·kinds(h)/c(h)·p(w), p(w) by how many letters come before w."""
    pairs = Counter(pairwise(TOKENS))
    once, twice = (sum(1 for c in pairs.values() if c == n) for n in (1, 2))
    left = Counter(w for _, w in pairs)
    ones, twos = (sum(1 for c in left.values() if c == n) for n in (1, 2))
    first = ones / (ones + 2 * twos)
    h, w = TOKENS[0], TOKENS[1]
    lower = (left[w] - first) / len(pairs) + first * len(left) / len(pairs) / V
    discount = once / (once + 2 * twice)
    total = sum(c for (a, _), c in pairs.items() if a == h)
    kinds = sum(1 for a, _ in pairs if a == h)
    expected = (pairs[h, w] - discount) / total + discount * kinds / total * lower
    assert _probabilities(TOKENS, np.array([h, w]), V, 2)[0] == pytest.approx(expected, rel=1e-12)


def test_order_pays_only_while_counts_last() -> None:
    """A deterministic cycle is learned by the bigram; the unigram knows letters only."""
    cycle = np.tile(np.arange(7), 300)
    losses = ngram_losses(cycle[:1800], cycle[1800:], 7, (1, 2, 3))
    assert losses[1] == pytest.approx(np.log(7), abs=1e-3)
    assert losses[2] < 0.01
    assert losses[3] < 0.01


def test_orders_too_large_to_number_are_left_out() -> None:
    tokens = np.arange(1000) % 50_000
    assert set(ngram_losses(tokens[:900], tokens[900:], 50_257)) == {1, 2, 3}


def test_a_text_too_short() -> None:
    with pytest.raises(ConfigError, match="longer text"):
        ngram_losses(TOKENS[:3], TOKENS, V)


@pytest.mark.skipif("RIDGELINE_TEST_DATA" not in os.environ, reason="RIDGELINE_TEST_DATA names no folder with texts")
def test_tinyshakespeare() -> None:
    """The add-one bigram scores 2.4819, and this smoothing about the same; longer orders keep paying up to 5."""
    text = np.frombuffer((Path(os.environ["RIDGELINE_TEST_DATA"]) / "tinyshakespeare.txt").read_bytes(), np.uint8)
    letters, tokens = np.unique(text, return_inverse=True)
    cut = len(tokens) * 9 // 10
    losses = ngram_losses(tokens[:cut], tokens[cut:], len(letters))
    assert losses[1] == pytest.approx(3.33, abs=0.05)
    assert losses[2] == pytest.approx(_add_one_bigram(tokens[:cut], tokens[cut - 1 :], len(letters)), abs=0.005)
    assert losses[5] < losses[4] < losses[3] < losses[2]


def _add_one_bigram(train: np.ndarray, asked: np.ndarray, vocabulary: int) -> float:
    counts = np.ones((vocabulary, vocabulary))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    p = counts / counts.sum(1, keepdims=True)
    loss = -np.log(p[asked[:-1], asked[1:]]).mean()
    assert loss == pytest.approx(2.4819, abs=2e-4)
    return float(loss)
