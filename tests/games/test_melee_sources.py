"""One schema, three sources: whatever a frame was read from, the model's inputs are the same numbers."""

import numpy as np
import pytest

from data import melee_helpers as replays
from data.melee_helpers import as_the_protocol_has_it, needs_replays
from ridgeline.data.melee.replay import read_replay
from ridgeline.games.melee import libmelee, umi
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.features import GROUPS, MeleeEyes, features, game_table
from ridgeline.games.melee.frames import CHARACTERS, FRAME, STAGES


def same_inputs(first, second):
    assert len(first) == len(second)
    for ego in (0, 1):
        for one, other in zip(features(first, ego), features(second, ego), strict=True):
            assert np.array_equal(one, other)
        for encoding in (Encoding(7, True), Encoding(6)):
            one, two = game_table(first, ego, encoding), game_table(second, ego, encoding)
            assert np.array_equal(one.controller, two.controller)
            assert np.array_equal(one.target, two.target)


@needs_replays
@pytest.mark.parametrize("file", [replays.ROLLBACK, replays.SCRIPTED, replays.SHORT, replays.CPU])
def test_libmelee_gives_what_the_parser_gives(file):
    same_inputs(read_replay(file).frames, libmelee.read_replay(file))


@needs_replays
@pytest.mark.slow
@pytest.mark.parametrize("file", [replays.FOX_DITTO, replays.ONLINE])
def test_libmelee_gives_what_the_parser_gives_in_long_games(file):
    same_inputs(read_replay(file).frames, libmelee.read_replay(file))


@needs_replays
@pytest.mark.parametrize("file", replays.USABLE)
def test_the_protocol_gives_what_the_parser_gives(file):
    same_inputs(read_replay(file).frames, umi.frames_of(as_the_protocol_has_it(file)))


@needs_replays
def test_one_frame_at_a_time_gives_what_the_whole_game_gives():
    frames = read_replay(replays.SHORT).frames
    eyes, encoding = MeleeEyes(), Encoding(6)
    table = game_table(frames, 0, encoding)
    held = encoding.released()
    for t, frame in enumerate(frames[:-1]):
        categories, numbers = eyes(frame)
        classes, held = encoding.encode_next(frames["players"][t : t + 1, 0]["controller"], held)
        assert np.array_equal(categories, table.categories[t])
        assert np.array_equal(numbers, table.numbers[t])
        assert np.array_equal(classes[0], table.controller[t])


def test_the_numberings_are_those_of_the_libraries():
    """Three numberings of characters exist; this is the one of frames, of libmelee's enum and of the protocol."""
    import melee
    import umi as protocol

    assert {name: melee.Character[name].value for name in CHARACTERS} == CHARACTERS
    assert {name: melee.Stage[name].value for name in STAGES} == STAGES
    assert protocol.CHARACTERS.items() <= CHARACTERS.items()
    assert protocol.STAGES == STAGES


def test_the_championships_own_frames_are_understood():
    from umi.conform.arena import load_fixtures

    frames = load_fixtures()["frames"]
    for game in frames:
        for seat in range(2):
            made = umi.frames_of(game[:, seat])
            categories, numbers = features(made)
            assert (categories[:, 0] > 0).all()
            assert (categories < [rows for _, rows, columns in GROUPS for _ in range(columns)]).all()
            assert np.isfinite(numbers).all()
            assert np.abs(numbers).max() < 9
            held = game[:, seat]["players"][:, 0]["controller"]
            assert np.array_equal(made["players"][:, 0]["controller"]["main"][:, 0], np.rint(160 * held["main_x"] - 80))


def test_a_chosen_controller_in_the_protocols_words():
    from umi.frame import CTRL_FIELDS, NEUTRAL_CTRL

    for encoding in (Encoding(6), Encoding(7, True)):
        (row,) = umi.controller_rows(encoding.decode(np.array([encoding.neutral])))
        assert np.array_equal(row, NEUTRAL_CTRL)
    (row,) = umi.controller_rows(Encoding(6).decode(np.array([(3, 2, 4)])))
    assert dict(zip(CTRL_FIELDS, row.tolist(), strict=True)) == {
        **dict.fromkeys(CTRL_FIELDS, 0.0),
        **{"main_x": pytest.approx(0.5 - 28 / 160), "main_y": 0.5, "c_x": 0.5, "c_y": 1.0, "shoulder": 1.0, "L": 1.0},
    }


def test_what_is_out_of_the_ordinary_stays_within_the_tables():
    frames = np.zeros(3, FRAME)
    frames["stage"] = 7
    frames["players"]["character"] = 255
    frames["players"]["action"] = 65_535
    frames["players"]["percent"] = 999
    categories, numbers = features(frames)
    assert categories.tolist() == [[0, 32, 32, 399, 399]] * 3
    assert (numbers[:, [0, 9]] == 1).all()
