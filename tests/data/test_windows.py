"""Each window shows what a player would see, next to the controller to choose there."""

import numpy as np
import pytest

from data.helpers import GROUPS, HEADS, make_games, make_table, make_text
from ridgeline.data import games
from ridgeline.data.loader import Batches, Validation, windows_of
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError

LENGTHS = [40, 3, 25, 1, 60, 12, 33, 8]
WINDOWS = [
    WindowSpec(context=8),
    WindowSpec(context=8, stride=2),
    WindowSpec(context=5, stride=3, delay=2),
    WindowSpec(context=16, delay=18),
    WindowSpec(context=1),
    WindowSpec(context=100),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_games(tmp_path_factory.mktemp("games") / "g", LENGTHS)


def check_batch(batch, window):
    """Compare every position with its game's table; returns (game, frame) of each position that counts."""
    seen = []
    numbers = batch["numbers"].numpy()
    for b in range(len(numbers)):
        game, first = int(numbers[b, 0, 0]), int(numbers[b, 0, 1])
        table = make_table(game, LENGTHS[game])
        for i in range(window.context):
            frame = first + i * window.stride
            if frame + window.delay >= len(table):
                assert (batch["targets"][b, i] == -100).all()
                continue
            if (batch["targets"][b, i] == -100).all():
                assert (batch["targets"][b] == -100).all()  # only whole rows that fill up the last batch
                continue
            assert (numbers[b, i] == table.numbers[frame]).all()
            assert (batch["categories"][b, i].numpy() == table.categories[frame]).all()
            assert (batch["previous"][b, i].numpy() == table.controller[frame]).all()
            assert (batch["targets"][b, i].numpy() == table.target[frame + window.delay]).all()
            seen.append((game, frame))
    return seen


@pytest.mark.parametrize("window", WINDOWS)
def test_training_windows_hold_the_right_frames_of_one_game(data, window):
    batches = Batches(data, window, batch=windows_of(data, window).train_windows, seed=3)
    seen = check_batch(batches.next(), window)
    expected = {
        (game, frame)
        for game in set(range(len(LENGTHS))) - set(data.held_out.tolist())
        for frame in range(LENGTHS[game] - window.delay)
    }
    assert set(seen) == expected  # one epoch teaches every frame that has a target, those of short games too


@pytest.mark.parametrize("window", WINDOWS)
def test_validation_counts_every_held_out_frame_once(data, window):
    if max(LENGTHS[game] for game in data.held_out) <= window.delay:
        with pytest.raises(DataError, match="no game longer than the delay"):
            Validation(data, window, batch=3)
        return
    validation = Validation(data, window, batch=3)
    seen = [place for batch in validation for place in check_batch(batch, window)]
    expected = [(game, frame) for game in data.held_out for frame in range(LENGTHS[game] - window.delay)]
    assert sorted(seen) == sorted(expected)
    assert validation.positions == len(expected)
    assert len(list(validation)) == len(validation)


def test_early_frames_are_taught_as_often_as_others(tmp_path):
    """Positions 0 … T − 1 at the game's start are what a player sees first; plain random windows starve them."""
    lengths = [200, 200]
    data = make_games(tmp_path / "g", lengths)
    window = WindowSpec(context=16)
    numbers = Batches(data, window, batch=200).next()["numbers"].numpy()
    counts = np.bincount(numbers[..., 1].astype(int).ravel(), minlength=200)
    assert counts[:16].min() >= 16
    assert counts[16:180].tolist() == [16] * 164
    from_start = (numbers[:, 0, 1] == 0).sum()
    assert from_start == 16  # and these windows are filled from the left, as at play


def test_stride_two_predicts_the_controller_of_the_very_next_frame(data):
    window = WindowSpec(context=4, stride=2)
    batch = Batches(data, window, batch=64).next()
    frames = batch["numbers"][..., 1]
    counts = (batch["targets"] != -100).all(-1)
    assert (frames[:, 1] - frames[:, 0])[counts[:, 1]].eq(2).all()
    # in a recorded game the controller that led to frame t + 1 is the target of frame t
    assert torch_equal(batch["targets"][..., 0][counts], (frames % 251)[counts])
    assert torch_equal(batch["previous"][..., 0][counts], ((frames - 1) % 251)[counts] * (frames[counts] > 0))


def torch_equal(a, b):
    return (a.double() == b.double()).all()


def test_games_are_split_whole_and_by_seed(tmp_path):
    lengths = [10] * 50
    first = make_games(tmp_path / "a", lengths, seed=1)
    again = make_games(tmp_path / "b", lengths, seed=1)
    other = make_games(tmp_path / "c", lengths, seed=2)
    assert len(first.held_out) == 5
    assert first.held_out.tolist() == again.held_out.tolist() != other.held_out.tolist()
    assert first.fingerprint == again.fingerprint != other.fingerprint
    trained = Batches(first, WindowSpec(context=4), batch=450).next()["numbers"][..., 0].unique().tolist()
    assert sorted(trained + first.held_out.tolist()) == list(range(50))


def test_games_without_categories_have_batches_without_them(data):
    bare = type(data)(**{**vars(data), "categories": data.categories[:, :0]})
    assert set(Batches(bare, WindowSpec(context=4), batch=2).next()) == {"numbers", "previous", "targets"}


def test_unusable_games_name_the_cure(tmp_path):
    with pytest.raises(DataError, match="1 game cannot be split"):
        make_games(tmp_path / "one", [50])
    data = make_games(tmp_path / "short", [5, 5, 5])
    with pytest.raises(DataError, match=r"no game longer than the delay of 5 frames .*or a shorter delay"):
        Batches(data, WindowSpec(context=4, delay=5), batch=1)


def test_tables_that_do_not_fit_together_are_refused(tmp_path):
    table = make_table(0, 10)
    wrong = type(table)(**{**vars(table), "numbers": table.numbers.astype(np.float64)})
    fine = {"name": "", "game": "", "heads": HEADS, "groups": GROUPS, "features": {}, "provenance": [{}, {}]}
    for tables, changed, message in (
        ([table, wrong], {}, r"numbers must be float32\[frames, 3\] in every game, got float64\[10, 3\]"),
        ([table, table], {"provenance": [{}]}, "2 games have 1 records of their origin"),
        ([table, table], {"heads": HEADS[:2]}, "controller has 3 columns, 2 are declared"),
        ([table, table], {"groups": ()}, "categories has 2 columns, 0 are declared"),
        ([table, table], {"heads": (("low", 9), *HEADS[1:])}, r"target holds classes that do not exist \(9 of 9\)"),
        ([table, table], {"groups": (GROUPS[0], ("frame", 5, 1))}, r"categories holds classes .* \(9 of 5\)"),
    ):
        with pytest.raises(DataError, match=message):
            games.write(tmp_path / "g", tables, **{**fine, **changed})
        assert not (tmp_path / "g").exists()


def test_text_windows_cover_an_epoch_once_and_move_between_epochs(tmp_path):
    data = make_text(tmp_path / "t", 1000)
    window = WindowSpec(context=32)
    windows = windows_of(data, window)
    assert windows.train_windows == 27  # (900 − 1) // 32 − 1
    batches = Batches(data, window, batch=windows.train_windows, seed=1)
    offsets = set()
    for _ in range(8):
        order, word = batches.order.at(batches.position, batches.batch)
        start, count = windows.train(order, word)
        batch = batches.next()
        assert (np.sort(start) - start.min()).tolist() == list(range(0, 27 * 32, 32))
        assert count.tolist() == [32] * 27
        for row in range(27):
            assert batch["tokens"][row].tolist() == data.tokens[start[row] : start[row] + 32].tolist()
            assert batch["targets"][row].tolist() == data.tokens[start[row] + 1 : start[row] + 33].tolist()
        assert start.max() + 32 < data.train  # no held-out token is a target
        offsets.add(start.min())
    assert len(offsets) > 4


@pytest.mark.parametrize(("length", "context"), [(1000, 32), (1000, 100), (1000, 899), (20, 1), (40, 35)])
def test_text_validation_predicts_every_held_out_token_once(tmp_path, length, context):
    data = make_text(tmp_path / "t", length)
    validation = Validation(data, WindowSpec(context=context), batch=3)
    batches = list(validation)
    counted = np.concatenate([batch["targets"][batch["targets"] != -100].numpy() for batch in batches])
    assert counted.tolist() == data.tokens[data.train :].tolist()
    assert validation.positions == data.held_out
    inputs = np.concatenate([batch["tokens"][batch["targets"] != -100].numpy() for batch in batches])
    assert inputs.tolist() == data.tokens[data.train - 1 : -1].tolist()
    assert all(batch["tokens"].shape == (3, context) for batch in batches)


def test_impossible_text_windows_name_the_cure(tmp_path):
    data = make_text(tmp_path / "t", 100)
    with pytest.raises(DataError, match="90 tokens to train on, a context of 90 needs 91; give a longer text or a sho"):
        Batches(data, WindowSpec(context=90), batch=1)
    assert Batches(data, WindowSpec(context=89), batch=4).next()["tokens"].shape == (4, 89)
    with pytest.raises(ConfigError, match="text has stride 1 and delay 0, got 2 and 0"):
        Batches(data, WindowSpec(context=8, stride=2), batch=1)


@pytest.mark.parametrize("beyond", [1, 2, 12, 23, 24, 25, 26, 48, 49, 60])
def test_windows_of_a_short_text_end_before_what_is_held_out(tmp_path, beyond):
    T = 24
    text = make_text(tmp_path / "t", length=-(-(T + beyond) * 10 // 9))
    windows = windows_of(text, WindowSpec(context=T))
    words = np.arange(1000, dtype=np.uint64)  # as many epochs
    ends = set()
    for index in range(windows.train_windows):
        start_B, count_B = windows.train(np.full(len(words), index), words)
        assert (count_B == T).all()
        ends |= set((start_B + T + 1).tolist())  # behind the last target
    assert max(ends) == min(text.train, T * (windows.train_windows + 1))
