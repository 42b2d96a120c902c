"""Demonstrations: recorded, kept small, replayed to the byte, never with an evaluation seed."""

import dataclasses
import json

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


def test_a_damaged_archive_is_an_error(games, tmp_path):
    path = archive.save(tmp_path / "games.xz", games)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.xz").write_bytes(content)
    (tmp_path / "cut.xz").write_bytes(content[:50])
    for name in ("damaged.xz", "cut.xz"):
        with pytest.raises(DataError, match="is not a file of demonstrations"):
            archive.load(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        archive.load(tmp_path / "none.xz")
    with pytest.raises(DataError, match="a seed of its own"):
        archive.save(path, [games[0], games[0]])


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
    assert len(read_lines(path)) == 3
    with pytest.raises(DataError, match="another expert"):
        generate(path, range(4), Scripted(), processes=1)


def test_generation_takes_no_evaluation_seed_and_no_foreign_file(tmp_path):
    with pytest.raises(DataError, match="the rest is for evaluation"):
        generate(tmp_path / "a.jsonl", [FIRST_EVALUATION_SEED + 3], PLAYER, processes=1)
    (tmp_path / "b.jsonl").write_text("hello\n")
    with pytest.raises(DataError, match="not a file of demonstrations"):
        generate(tmp_path / "b.jsonl", [1], PLAYER, processes=1)
