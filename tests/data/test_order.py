"""The order is a permutation an epoch, another one each, and any slice of it can be had alone."""

import numpy as np
import pytest

from ridgeline.data.order import Order


@pytest.mark.parametrize("count", [*range(1, 18), 100, 1009, 4096])
def test_every_epoch_is_a_permutation(count):
    index, word = Order(count, seed=5).at(0, 4 * count)
    epochs = index.reshape(4, count)
    assert (np.sort(epochs, axis=1) == np.arange(count)).all()
    assert len(np.unique(word)) == 4  # one random word an epoch
    if count >= 17:
        assert len({tuple(epoch) for epoch in epochs}) == 4


def test_slices_do_not_depend_on_how_they_are_cut():
    order = Order(37, seed=1)
    whole = order.at(0, 200)
    for cut in (1, 7, 64):
        parts = [order.at(start, min(cut, 200 - start)) for start in range(0, 200, cut)]
        for side in (0, 1):
            assert (np.concatenate([part[side] for part in parts]) == whole[side]).all()


def test_seeds_give_other_orders():
    assert (Order(1000, 0).at(0, 1000)[0] != Order(1000, 1).at(0, 1000)[0]).any()


def test_it_is_as_even_as_chance_allows():
    """Where each window comes, and which follows which, over many seeds: χ² per degree of freedom near 1."""
    count, seeds = 12, 3000
    place, follow = np.zeros((2, count, count))
    for seed in range(seeds):
        index, _ = Order(count, seed).at(0, count)
        place[np.arange(count), index] += 1
        follow[index[:-1], index[1:]] += 1
    expected = seeds / count
    assert ((place - expected) ** 2 / expected).sum() / (count - 1) ** 2 < 1.5
    pairs = follow[~np.eye(count, dtype=bool)]
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).mean() < 1.5


def test_the_order_stays_the_same_between_versions():
    """A resumed run must find the position that an older version left."""
    assert Order(1000, seed=7).at(998, 4)[0].tolist() == [242, 909, 234, 898]
