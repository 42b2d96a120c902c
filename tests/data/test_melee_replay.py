"""Reading replays: every trap that a file can hold is excluded or refused with its reason."""

import numpy as np
import pytest

from data import melee_helpers as replays
from data.melee_helpers import needs_replays, variant
from ridgeline.data.melee.replay import RefusedError, parse, read_replay, to_frames
from ridgeline.data.melee.take import Choice, tables_of
from ridgeline.games.melee.controls import C_STICK, LABELS, MAIN, Encoding
from ridgeline.games.melee.features import game_table
from ridgeline.games.melee.frames import CHARACTERS, STAGES, A, B, X, Y, final_rows

JUMP, KNEE_BEND = 2, 24


def read(content, folder):
    file = folder / "x.slp"
    file.write_bytes(content)
    return read_replay(file)


def test_rows_that_were_taken_back_do_not_stand():
    assert final_rows(np.array([0, 1, 2, 3])).tolist() == [0, 1, 2, 3]
    assert final_rows(np.array([0, 1, 2, 1, 2, 3])).tolist() == [0, 3, 4, 5]
    assert final_rows(np.array([0, 1, 1, 1, 2])).tolist() == [0, 3, 4]
    # the recording ends in the middle of a correction: what was predicted beyond it never came true
    assert final_rows(np.array([0, 1, 2, 3, 1])).tolist() == [0, 4]


@needs_replays
def test_the_last_row_of_a_rolled_back_frame_is_kept():
    import peppi_py

    game = parse(replays.ROLLBACK)
    ids = game.frames.id.to_numpy()
    rows = final_rows(ids)
    assert (len(ids), len(rows)) == (6517, 5023)
    last = peppi_py.read_slippi(str(replays.ROLLBACK), rollback_mode=peppi_py.RollbackMode.LAST)
    assert np.array_equal(ids[rows], last.frames.id.to_numpy())
    first = np.array([np.flatnonzero(ids == frame)[0] for frame in ids[rows]])
    stands, predicted = to_frames(game, rows)["players"], to_frames(game, first)["players"]
    differs = (stands["controller"] != predicted["controller"]).mean(axis=0)
    # keeping the first row would make the remote player's inputs wrong, and never one's own
    assert sorted(differs > 0) == [False, True]
    assert differs.max() > 0.02


@needs_replays
def test_a_jump_is_not_seen_before_it_is_chosen():
    """The leak: a state paired with its own frame's input shows the answer."""
    seen = same = onsets = 0
    for file in replays.USABLE:
        replay = read_replay(file)
        for seat in range(2):
            table = game_table(replay.frames, seat, Encoding())
            target, before = table.target[:, 2], table.controller[:, 2]
            onset = (target == JUMP) & (before != JUMP)
            onsets += onset.sum()
            seen += (table.categories[onset, 3] == KNEE_BEND).sum()
            same += (replay.frames["players"][1:, seat]["action"][onset] == KNEE_BEND).sum()
    assert onsets > 500
    assert seen / onsets < 0.05
    assert same / onsets > 0.5  # what pairing within a frame would show


@needs_replays
def test_a_row_shows_the_past_and_its_target_is_the_next_input():
    replay = read_replay(replays.FOX_DITTO)
    table = game_table(replay.frames, 1, Encoding())
    classes = Encoding().encode(replay.frames["players"][:, 1]["controller"])
    assert len(table) == len(replay.frames) - 1
    assert np.array_equal(table.controller, classes[:-1])
    assert np.array_equal(table.target, classes[1:])


@needs_replays
def test_numberings_of_characters_and_stages():
    expected = {
        replays.FOX_DITTO: ("BATTLEFIELD", "FOX", "FOX"),
        replays.ONLINE: ("FINAL_DESTINATION", "FOX", "MARTH"),
        replays.ROLLBACK: ("YOSHIS_STORY", "FALCO", "FALCO"),
        replays.CPU: ("FOUNTAIN_OF_DREAMS", "MARTH", "CPTFALCON"),
        replays.TINY: ("POKEMON_STADIUM", "MARTH", "MARTH"),
    }
    for file, (stage, own, other) in expected.items():
        replay = read_replay(file)
        assert replay.stage == STAGES[stage]
        assert replay.characters == (CHARACTERS[own], CHARACTERS[other])


@needs_replays
def test_a_computer_player_is_never_imitated():
    replay = read_replay(replays.CPU)
    assert replay.human == (True, False)
    assert [seat["character"] for seat in tables_of(replay, Choice()).seats] == [CHARACTERS["MARTH"]]
    with pytest.raises(RefusedError, match="no human plays CPTFALCON"):
        tables_of(replay, Choice(character=CHARACTERS["CPTFALCON"]))


@needs_replays
def test_too_short_a_game_gives_no_window_and_says_so():
    with pytest.raises(RefusedError, match="124 frames, too short for a window of 256 and its target"):
        tables_of(read_replay(replays.TINY), Choice())


@needs_replays
def test_damaged_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(RefusedError, match="cut off, damaged or no Slippi replay"):
        read_replay(replays.TRUNCATED)
    with pytest.raises(RefusedError, match=r"cannot be read \(No such file or directory\)"):
        read_replay(tmp_path / "gone.slp")
    whole = replays.SHORT.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-1000], b"\x7fELF" + whole):
        with pytest.raises(RefusedError):
            read(content, tmp_path)


@needs_replays
def test_versions_before_the_inputs_exist_are_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"version 1\.0\.0 of the format, older than 2\.1\.0"):
        read_replay(replays.REPLAYS / "buttons_abxy_v1.0.0.slp")
    with pytest.raises(RefusedError, match=r"version 3\.12\.0 of the format, older than 3\.13\.0"):
        read_replay(replays.FOX_DITTO, (3, 13, 0))


@needs_replays
def test_a_panic_of_the_parser_is_a_refusal(tmp_path, capfd):
    content = bytearray(replays.SHORT.read_bytes())
    content[15 + 0x1E] = 0  # the size of an event
    with pytest.raises(RefusedError, match="cut off, damaged"):
        read(bytes(content), tmp_path)
    assert capfd.readouterr().err == ""


@needs_replays
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": {replays.TEAMS: b"\1"}}, "a team game"),
        ({"start": {replays.STAGE: (11).to_bytes(2, "big")}}, "stage number 11 is none of FOUNTAIN"),
        ({"start": {replays.player_type(2): b"\0"}}, "3 players instead of 2"),
        ({"events": replays.without_end}, "no Game End: it was cut off"),
        ({"events": replays.shifted_frames}, "begins at frame 69877 instead of -123: training"),
        ({"events": replays.changed_character}, "changes character"),
        ({"events": replays.without_frame}, "frames are missing in between"),
        ({"events": replays.damaged(0x0A, np.float32(4e18))}, r"damaged: x goes from .* to 4e\+18"),
        ({"events": replays.damaged(0x0E, np.float32("nan"))}, "a value is no number"),
        ({"events": replays.damaged(0x16, np.float32("inf"))}, "a value is no number"),
        ({"events": replays.damaged(0x1A, np.float32(-1e9))}, "damaged: shield goes from -1e"),
        ({"events": replays.damaged(0x21, np.uint8(132))}, "damaged: stocks goes from 4 to 132"),
        ({"events": replays.damaged(0x32, np.uint8(130))}, "damaged: jumps goes from . to 130"),
        ({"events": replays.damaged(0x19, np.float32("nan"), event=replays.PRE)}, "a value is no number"),
        ({"events": lambda part: part[:7] + b"\x1d" + part[8:] if part[0] == 0x38 else part}, "damaged: character"),
    ],
)
def test_games_of_another_kind_are_refused(tmp_path, change, reason):
    content = variant(replays.SHORT, **change)
    with pytest.raises(RefusedError, match=reason):
        read(content, tmp_path)


@needs_replays
def test_two_recordings_of_one_game_are_known(tmp_path):
    """Names, codes and what is around the game differ; how it was seeded and what happened do not."""
    renamed = variant(replays.SHORT, start={replays.NAMES: b"SOMEONE", replays.CODES: b"ABCD"})
    whole = read_replay(replays.SHORT)
    assert read(renamed, tmp_path).digest == whole.digest
    assert read(replays.Recording.read(replays.SHORT).reseeded(1), tmp_path).digest != whole.digest


def old(name):
    """Whole frames of a fixture whose version is too old to be learned from."""
    game = parse(replays.REPLAYS / f"{name}_v1.0.0.slp")
    frames = to_frames(game, final_rows(game.frames.id.to_numpy()))
    return frames["players"][:, 0]["controller"]


def changes(values):
    """The values as they follow one another, repetitions left out."""
    return [value for value, before in zip(values, [None, *values], strict=False) if value != before]


@needs_replays
def test_old_fixtures_decode_to_what_their_names_say():
    pressed = [mask for mask in changes(old("buttons_abxy")["buttons"].tolist()) if mask]
    assert pressed == [A, B, X, Y]
    labels = Encoding().encode(old("buttons_abxy"))[:, 2]
    said = [LABELS[6][label] for label in changes(labels.tolist())]
    assert [label for label in said if label != "NONE"] == ["A", "B", "JUMP", "JUMP"]

    up, down, left, right = (0, 80), (0, -80), (-80, 0), (80, 0)
    for name, head, table in (("cstick_udlr", 0, C_STICK), ("joystick_udlr", 1, MAIN)):
        controllers = old(name)
        points = [table[label] for label in Encoding().encode(controllers)[:, head]]
        assert [point for point in changes(points) if point in (up, down, left, right)] == [up, down, left, right]

    # named after UCF's fix for the shield drop, which is on: a dash dance
    assert parse(replays.REPLAYS / "shield_drop_v1.0.0.slp").start.players[0].ucf.shield_drop.name == "UCF"
    points = [MAIN[label] for label in Encoding().encode(old("shield_drop"))[:, 1]]
    dashes = "".join({left: "L", right: "R"}.get(point, "") for point in changes(points))
    assert dashes == "LRLRLRLRLRLLRLRLRL"
