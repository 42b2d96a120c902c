"""Batches at fixed addresses."""

from __future__ import annotations

import torch

from engine.helpers import LANGUAGE, language_batch
from engine.recorder import Recorder
from ridgeline.engine import TrainStep
from ridgeline.engine.feed import Feed, signature, tensors_of
from ridgeline.models import build


def test_a_nest_comes_back_as_it_went_in_at_the_same_addresses():
    batch = {"x": torch.arange(6.0).view(3, 2), "more": (torch.ones(3).long(), [torch.zeros(3, 1)])}
    leaves, spec = tensors_of(batch)
    feed = Feed(leaves, spec, torch.device("cpu"))
    addresses = [t.data_ptr() for t in feed.static]
    feed.load(leaves)
    found = feed.batch()
    assert found.keys() == batch.keys()
    assert torch.equal(found["x"], batch["x"])
    assert torch.equal(found["more"][1][0], batch["more"][1][0])
    other = {"x": -batch["x"], "more": batch["more"]}
    feed.load(tensors_of(other)[0])
    assert torch.equal(feed.batch()["x"], -batch["x"])
    assert [t.data_ptr() for t in feed.static] == addresses


def test_pieces_and_conversion():
    batch = (torch.arange(8.0).view(4, 2), torch.arange(4))
    leaves, spec = tensors_of(batch)
    feed = Feed(leaves, spec, torch.device("cpu"))
    feed.load(leaves)
    x, y = feed.batch(1, 2, torch.bfloat16)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x.float(), batch[0][2:])
    assert torch.equal(y, batch[1][2:])
    assert y.dtype == torch.int64


def test_a_signature_is_nest_shapes_and_dtypes():
    def of(batch):
        return signature(*tensors_of(batch))

    a = {"x": torch.zeros(2, 3)}
    assert of(a) == of({"x": torch.ones(2, 3)})
    assert hash(of(a)) == hash(of({"x": torch.ones(2, 3)}))
    for other in (
        {"x": torch.zeros(2, 4)},
        {"y": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 3).long()},
        torch.zeros(2, 3),
    ):
        assert of(a) != of(other)


class Counted:
    """Draws batches from the step's number, as a data set on the card does."""

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in language_batch().items()}
        self.table = {name: torch.stack([language_batch(i)[name] for i in range(6)]) for name in self.tensors}

    def draw(self, seed_step):
        for name, tensor in self.tensors.items():
            tensor.copy_(self.table[name].index_select(0, seed_step[1:] % 6)[0])


def test_batches_that_the_device_draws_are_those_that_the_host_would_bring():
    drawn, brought = (
        TrainStep(build(LANGUAGE, impl="reference", seed=3), precision="fp32", capture=capture)
        for capture in (Recorder(), False)
    )
    source = Counted()
    for i in range(14):
        drawn(source)
        brought(language_batch(i % 6))
    assert torch.equal(drawn.flat.masters, brought.flat.masters)
    assert [m.loss for m in drawn.metrics()] == [m.loss for m in brought.metrics()]
    assert drawn.memory()["batches"] == 2 * 4 * 8 * 8
