"""Batches at fixed addresses."""

from __future__ import annotations

import torch

from ridgeline.engine.feed import Feed, signature, tensors_of


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
