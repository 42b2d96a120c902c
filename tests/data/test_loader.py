"""Batches go on where they stopped, to the bit, however they are cut."""

import json

import pytest
import torch

from data.helpers import make_games, make_text
from ridgeline.data.loader import Batches, Validation
from ridgeline.data.window import WindowSpec
from ridgeline.errors import CheckpointError, ConfigError, DataError

WINDOW = WindowSpec(context=8)


@pytest.fixture(scope="module", params=["text", "games"])
def data(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "x"
    return make_text(folder) if request.param == "text" else make_games(folder, [30, 5, 44, 21])


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_batches_have_the_promised_dtypes(data):
    for batch in (Batches(data, WINDOW, batch=4).next(), next(iter(Validation(data, WINDOW, batch=4)))):
        for name, tensor in batch.items():
            assert tensor.shape[:2] == (4, 8)
            assert tensor.dtype == (torch.float32 if name == "numbers" else torch.int64)


def test_a_resumed_sequence_is_the_same_to_the_bit(data):
    whole = Batches(data, WINDOW, batch=16, seed=9)
    expected = [whole.next() for _ in range(40)]  # several epochs
    first = Batches(data, WINDOW, batch=16, seed=9)
    for _ in range(23):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second = Batches(data, WINDOW, batch=16, seed=9)
    second.load_state_dict(state)
    assert all(equal(second.next(), batch) for batch in expected[23:])


def test_a_batch_is_the_same_whole_and_in_parts(data):
    whole, parts = Batches(data, WINDOW, batch=16, seed=2), Batches(data, WINDOW, batch=4, seed=2)
    for _ in range(10):
        assert equal(whole.next(), joined([parts.next() for _ in range(4)]))
    assert whole.state_dict() == parts.state_dict()


def test_a_validation_of_some_windows_looks_at_the_whole_held_out_part(data):
    every = list(Validation(data, WINDOW, batch=1))
    few = list(Validation(data, WINDOW, batch=1, windows=3))
    assert [next(i for i, whole in enumerate(every) if equal(whole, one)) for one in few] == [
        place * len(every) // 3 for place in range(3)
    ]
    (padded,) = Validation(data, WINDOW, batch=4, windows=3)
    assert equal({name: tensor[:3] for name, tensor in padded.items()}, joined(few))
    assert (padded["targets"][3:] == -100).all()
    assert len(list(Validation(data, WINDOW, batch=1, windows=10**6))) == len(every)


def joined(batches):
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_seeds_differ_and_iteration_is_next(data):
    one, two = Batches(data, WINDOW, batch=16, seed=0), Batches(data, WINDOW, batch=16, seed=1)
    assert not equal(one.next(), two.next())
    again = iter(Batches(data, WINDOW, batch=16, seed=1))
    next(again)
    assert equal(next(again), two.next())


def test_other_data_windows_or_seeds_are_not_resumed(data, tmp_path):
    state = Batches(data, WINDOW, batch=4).state_dict()
    with pytest.raises(DataError, match=r"seed: expected 0, got 1\); resume with the same"):
        Batches(data, WINDOW, batch=4, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="window: expected"):
        Batches(data, WindowSpec(context=7), batch=4).load_state_dict(state)
    with pytest.raises(DataError, match="fingerprint: expected"):
        Batches(make_text(tmp_path / "other", seed=5), WINDOW, batch=4).load_state_dict(state)


def test_preallocated_tensors_are_filled_in_any_dtype_that_holds_the_values(data):
    new = Batches(data, WINDOW, batch=6).next()
    batches = Batches(data, WINDOW, batch=6)
    out = {
        name: torch.empty_like(t, dtype=torch.int32 if t.dtype == torch.int64 else t.dtype) for name, t in new.items()
    }
    places = {name: tensor.data_ptr() for name, tensor in out.items()}
    result = batches.next(out)
    assert all(result[name] is out[name] and out[name].data_ptr() == places[name] for name in out)
    assert all((result[name] == new[name]).all() for name in out)
    with pytest.raises(ConfigError, match="out lacks targets of shape"):
        batches.next({name: tensor for name, tensor in out.items() if name != "targets"})
    with pytest.raises(ConfigError, match=r"out needs targets of shape .* in int16 or wider, got .* in uint8"):
        batches.next(out | {"targets": out["targets"].to(torch.uint8)})
    with pytest.raises(ConfigError, match=r"out needs targets of shape \[6, 8"):
        batches.next(out | {"targets": out["targets"][:3]})


@pytest.mark.parametrize(("batch", "seed"), [(0, 0), (4, -1), (4, 1 << 63)])
def test_impossible_settings_are_refused(data, batch, seed):
    with pytest.raises(ConfigError, match="must be"):
        Batches(data, WINDOW, batch=batch, seed=seed)
    with pytest.raises(ConfigError, match="must be at least 1"):
        Validation(data, WINDOW, batch=0)


@pytest.mark.parametrize(
    "damage",
    [
        *({"position": value} for value in ("x", -1, 1.5, True, None, 1 << 70)),
        {"more": 1},
    ],
)
def test_a_damaged_position_is_refused(data, damage):
    batches = Batches(data, WINDOW, batch=4)
    state = batches.state_dict()
    for name in state:
        with pytest.raises(CheckpointError, match="the position in the data is damaged; resume from another"):
            batches.load_state_dict({key: value for key, value in state.items() if key != name})
    for damaged in (state | damage, {}, 3, None, []):
        with pytest.raises(CheckpointError, match="the position in the data is damaged"):
            batches.load_state_dict(damaged)
    batches.load_state_dict(state)


def test_processes_share_every_batch_in_order(data):
    whole = Batches(data, WINDOW, batch=6, seed=3)
    shares = [Batches(data, WINDOW, batch=6, seed=3, rank=rank, world=3) for rank in range(3)]
    for _ in range(4):
        batch, parts = whole.next(), [share.next() for share in shares]
        assert all(torch.equal(batch[name], torch.cat([part[name] for part in parts])) for name in batch)
    assert {share.position for share in shares} == {whole.position}
    parts = [Validation(data, WINDOW, batch=6, rank=rank, world=3) for rank in range(3)]
    for batch, *pieces in zip(Validation(data, WINDOW, batch=6), *parts, strict=True):
        assert all(torch.equal(batch[name], torch.cat([piece[name] for piece in pieces])) for name in batch)
    with pytest.raises(ConfigError, match="4 processes cannot share a batch of 6"):
        Batches(data, WINDOW, batch=6, world=4)
