"""Demonstrations: recorded, kept small, replayed to the byte, never with an evaluation seed."""

import contextlib
import dataclasses
import json
import lzma
import resource

import numpy as np
import pytest

from ridgeline.errors import DataError
from ridgeline.games.boxing import archive
from ridgeline.games.boxing.actions import CONTROLLERS
from ridgeline.games.boxing.demos import Drift, demonstrate, from_json, replay, to_json
from ridgeline.games.boxing.experts import Scripted, Stance
from ridgeline.games.boxing.game import Boxing
from ridgeline.games.boxing.generate import generate, read_lines
from ridgeline.games.boxing.tables import table, tables
from ridgeline.games.env import FIRST_EVALUATION_SEED

PLAYER = Scripted(Stance(x=14, y=13))


@pytest.fixture(scope="module")
def games():
    return [demonstrate(seed, level, PLAYER, Drift(rate=0.05)) for seed, level in ((7, 3), (8, 0))]


def equal(one, other):
    assert one.provenance() == other.provenance()
    assert (one.executed == other.executed).all()
    assert (one.labels == other.labels).all()


def test_drift_bursts_differ_from_the_labels_that_stay_the_experts(games):
    for game in games:
        drifting = game.executed != game.labels
        assert 0.05 < drifting.mean() < 0.5
        assert drifting[1:][drifting[:-1]].mean() > 0.5  # it comes in bursts
        boxing, previous = Boxing(game.level), (0, 0)
        boxing.reset(game.seed)
        for label, executed in zip(game.labels, game.executed, strict=True):
            assert CONTROLLERS[label] == PLAYER.choose(boxing, previous)
            previous = CONTROLLERS[executed]
            boxing.step(previous)
        assert boxing.score == (game.dealt, game.taken)


def test_provenance_says_all(games):
    provenance = json.loads(json.dumps(games[0].provenance()))
    assert {
        "seed",
        "level",
        "expert",
        "settings",
        "privileged",
        "drift",
        "sticky",
        "ale_py",
        "rom_md5",
        "package",
    } < set(provenance)
    assert len(provenance["rom_md5"]) == 32


def test_a_replay_gives_the_recorded_states_or_an_error(games):
    states = replay(games[0])
    assert states.shape == (len(games[0].labels), 128)
    changed = games[0].executed.copy()
    changed[5] = (changed[5] + 4) % 18
    for wrong in ({"executed": changed}, {"checksum": "0" * 16}, {"seed": 9}, {"executed": games[0].executed[:-1]}):
        with pytest.raises(DataError, match="replays differently here"):
            replay(dataclasses.replace(games[0], **wrong))


def test_evaluation_seeds_are_refused(games):
    with pytest.raises(DataError, match="the rest is for evaluation"):
        demonstrate(FIRST_EVALUATION_SEED, 0, PLAYER, Drift())
    with pytest.raises(DataError, match="the rest is for evaluation"):
        dataclasses.replace(games[0], seed=FIRST_EVALUATION_SEED)


def test_the_archive_and_the_lines_give_the_games_back(games, tmp_path):
    path = archive.save(tmp_path / "games.xz", games[::-1])
    for one, other in zip(archive.load(path), games, strict=True):
        equal(one, other)
        equal(from_json(json.loads(json.dumps(to_json(other)))), other)
    assert path.stat().st_size < 3 * sum(len(game.labels) for game in games)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sticky": "often"}, "sticky must be a number, got 'often'"),
        ({"drift": {"rate": "x"}}, "drift.rate must be a number, got 'x'"),
        ({"drift": 3}, "drift must be a table, got 3"),
        ({"dealt": None}, "dealt must be a whole number, got None"),
        ({"seed": "1"}, "seed must be a whole number"),
        ({"settings": []}, "settings must be a table"),
        ({"luck": 1}, "unknown setting 'luck'"),
        ({"decisions": 3}, "not a demonstration"),
    ],
)
def test_a_line_that_was_edited_is_an_error(games, change, words):
    with pytest.raises(DataError, match=words):
        from_json(to_json(games[0]) | change)


@pytest.mark.parametrize(
    ("schema", "words"), [(0, "is not an archive of demonstrations"), (archive.SCHEMA + 1, "upgrade ridgeline")]
)
def test_an_archive_of_another_schema_is_refused(games, tmp_path, monkeypatch, schema, words):
    with monkeypatch.context() as patch:
        patch.setattr(archive, "SCHEMA", schema)
        path = archive.save(tmp_path / "games.xz", games)
    with pytest.raises(DataError, match=words):
        archive.load(path)


def test_a_damaged_archive_is_an_error(games, tmp_path):
    path = archive.save(tmp_path / "games.xz", games)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.xz").write_bytes(content)
    (tmp_path / "cut.xz").write_bytes(content[:50])
    for name in ("damaged.xz", "cut.xz"):
        with pytest.raises(DataError, match="is not an archive of demonstrations"):
            archive.load(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        archive.load(tmp_path / "none.xz")
    with pytest.raises(DataError, match="a seed of its own"):
        archive.save(path, [games[0], games[0]])


@pytest.mark.parametrize("row", [[], [7, 3, 5, 0, 0, 0], [7, 3, 0, 10**30, 0, 0], [7, 3, 0, "x", 0, 0], 3])
def test_an_archive_with_a_damaged_header_is_an_error(games, tmp_path, row):
    path = archive.save(tmp_path / "games.xz", games[:1])
    content = lzma.decompress(path.read_bytes())
    size = int.from_bytes(content[:4], "little")
    header = json.dumps(json.loads(content[4 : 4 + size]) | {"games": [row]}).encode()
    path.write_bytes(lzma.compress(len(header).to_bytes(4, "little") + header + content[4 + size :]))
    with pytest.raises(DataError, match="is not an archive of demonstrations"):
        archive.load(path)


def test_an_archive_that_does_not_fit_the_disk_leaves_nothing(games, tmp_path):
    with files_of_at_most(50), pytest.raises(DataError, match="File too large; free space or choose another file"):
        archive.save(tmp_path / "games.xz", games)
    assert list(tmp_path.iterdir()) == []


def test_a_table_pairs_a_state_with_what_led_to_it_and_what_to_do(games):
    game = games[0]
    rows = table(game, replay(game))
    assert (len(rows), rows.categories.shape[1]) == (len(game.labels), 0)
    assert (rows.numbers.dtype, rows.controller.dtype, rows.target.dtype) == (np.float32, np.uint8, np.uint8)
    assert tuple(rows.controller[0]) == (0, 0)
    for step in (0, 17, len(rows) - 1):
        assert tuple(rows.target[step]) == CONTROLLERS[game.labels[step]]
    for step in (1, 18, len(rows) - 1):
        assert tuple(rows.controller[step]) == CONTROLLERS[game.executed[step - 1]]


def test_tables_come_in_order_from_processes(games):
    seen = []
    found = tables(games, processes=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    for rows, game in zip(found, games, strict=True):
        assert (rows.numbers == table(game, replay(game)).numbers).all()


def test_generation_restarts_where_it_was_interrupted(tmp_path):
    path, seen = tmp_path / "games.jsonl", []
    first = generate(path, range(2), PLAYER, processes=2, progress=seen.append)
    assert [state.done for state in seen] == [0, 1, 2]
    with path.open("a") as stream:
        stream.write('{"seed": 2, "level"')
    again = generate(path, range(3), PLAYER, processes=1)
    assert [game.seed for game in again] == [0, 1, 2]
    assert [game.level for game in again] == [0, 1, 0]
    for one, other in zip(first, again, strict=False):
        equal(one, other)
    assert path.read_bytes().count(b"\n") == len(read_lines(path)) == 3
    with pytest.raises(DataError, match="another expert"):
        generate(path, range(4), Scripted(), processes=1)


def test_generation_takes_no_evaluation_seed_and_no_foreign_file(tmp_path):
    with pytest.raises(DataError, match="the rest is for evaluation"):
        generate(tmp_path / "a.jsonl", [FIRST_EVALUATION_SEED + 3], PLAYER, processes=1)
    (tmp_path / "b.jsonl").write_text("hello\n")
    with pytest.raises(DataError, match="not a file of demonstrations"):
        generate(tmp_path / "b.jsonl", [1], PLAYER, processes=1)


@pytest.mark.parametrize(
    "content",
    [
        b"a user's text, first line\nand a last one without an end",
        b"dear diary",
        b'{"a": 1}',
        b"3\n",
        b'"ab"\n',
        b'{"a": 1}\n{"a": ',
        b'{"a": ',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("after", ["nothing", "games"])
def test_a_foreign_file_stays_as_it_is(games, tmp_path, content, after):
    path = tmp_path / "mine.jsonl"
    before = b"" if after == "nothing" else json.dumps(to_json(games[0])).encode() + b"\n"
    path.write_bytes(before + content)
    with pytest.raises(DataError, match=r"mine.jsonl is not a file of demonstrations \(line .*choose another file"):
        read_lines(path)
    with pytest.raises(DataError, match="is not a file of demonstrations"):
        generate(path, [1, 2], PLAYER, processes=1)
    assert path.read_bytes() == before + content


def test_reading_keeps_a_last_line_that_is_cut_off_or_has_no_end(games, tmp_path):
    path, line = tmp_path / "games.jsonl", json.dumps(to_json(games[0])).encode()
    for content, count in ((line, 1), (line + b"\n" + line, 2), (line + b"\n" + line[:-9], 1), (b"", 0)):
        path.write_bytes(content)
        assert len(read_lines(path)) == count
        assert path.read_bytes() == content
    assert generate(path, [], PLAYER, processes=1) == []
    assert path.read_bytes() == b""
    path.write_bytes(line[:-9])  # no whole game vouches for what this file is
    with pytest.raises(DataError, match="is not a file of demonstrations"):
        generate(path, [1], PLAYER, processes=1)
    assert path.read_bytes() == line[:-9]


def test_a_last_line_without_an_end_gets_one_before_the_next_game(games, tmp_path):
    path, line = tmp_path / "games.jsonl", json.dumps(to_json(games[0])).encode()
    path.write_bytes(line)
    assert [game.seed for game in generate(path, [1], PLAYER, processes=1)] == [1, 7]
    assert path.read_bytes().startswith(line + b"\n{")
    assert len(read_lines(path)) == 2


def test_the_file_is_refused_before_anything_is_played(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "text").write_text("dear diary")
    for path, words in (
        (tmp_path / "text", "let its name end in .jsonl"),
        (tmp_path / "text" / "in.jsonl", "cannot write .*choose another file"),
        (tmp_path / "folder.jsonl", "is not a file; choose another one"),
        (tmp_path / ("x" * 300 + ".jsonl"), "File name too long; choose another file"),
    ):
        with pytest.raises(DataError, match=words):
            generate(path, [1], PLAYER, processes=1)
    assert (tmp_path / "text").read_text() == "dear diary"


@contextlib.contextmanager
def files_of_at_most(size):
    """A disk that is full beyond so many bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_whole_games(games, tmp_path):
    path, line = tmp_path / "games.jsonl", json.dumps(to_json(games[0])).encode() + b"\n"
    path.write_bytes(line)
    with files_of_at_most(len(line) + 100), pytest.raises(DataError, match=r"cannot write .*free space and call"):
        generate(path, [1], PLAYER, processes=1)
    assert path.read_bytes() == line


def test_an_action_that_does_not_exist_is_damage(games):
    labels = games[0].labels.copy()
    labels[3] = len(CONTROLLERS)
    with pytest.raises(DataError, match="seed 7 is damaged"):
        dataclasses.replace(games[0], labels=labels)
