"""Batches gathered where the data lies are the batches of the host."""

import numpy as np
import pytest
import torch

from ridgeline.data import games
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Batches
from ridgeline.data.resident import ResidentBatches
from ridgeline.data.window import WindowSpec
from ridgeline.games.table import GameTable


@pytest.fixture(scope="module", params=[0, 2], ids=["no categories", "categories"])
def data(request, tmp_path_factory):
    rng, columns = np.random.default_rng(0), request.param

    def table(rows):
        return GameTable(
            categories=rng.integers(60_000, 65_000, (rows, columns)).astype(np.uint16),
            numbers=rng.normal(size=(rows, 5)).astype(np.float32),
            controller=rng.integers(0, 4, (rows, 2)).astype(np.uint8),
            target=rng.integers(0, 4, (rows, 2)).astype(np.uint8),
        )

    folder = games.write(
        tmp_path_factory.mktemp("games") / "set",
        [table(rows) for rows in (3, 40, 7, 25)],
        name="made",
        game="boxing",
        heads=(("a", 4), ("b", 4)),
        groups=(("c", 65_000, columns),) if columns else (),
        features={},
        provenance=[{}] * 4,
    )
    return load_dataset(folder)


@pytest.mark.parametrize(("stride", "delay"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_every_batch_is_the_same_one(data, stride, delay):
    window = WindowSpec(context=8, stride=stride, delay=delay)
    host = Batches(data, window, batch=6, seed=3)
    there = ResidentBatches(data, window, batch=6, seed=3, device="cpu")
    for _ in range(20):
        wanted, got = host.next(), there.next()
        assert wanted.keys() == got.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            assert (got[name] == tensor).all()
    assert there.state_dict() == host.state_dict()


@pytest.mark.gpu
def test_on_a_card_too(data):
    window = WindowSpec(context=8)
    host, there = Batches(data, window, batch=6), ResidentBatches(data, window, batch=6, device="cuda")
    for _ in range(3):
        wanted, got = host.next(), there.next()
        assert all(torch.equal(got[name].cpu(), tensor) for name, tensor in wanted.items())
