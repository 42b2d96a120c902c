"""Boxing demonstrations become a data set once, and are found again without the emulator."""

import json
import sys

import numpy as np
import pytest

from ridgeline.data import api, boxing
from ridgeline.data.loader import Batches
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError
from ridgeline.games.boxing import archive
from ridgeline.games.boxing.actions import CONTROLLERS
from ridgeline.games.boxing.adapter import GAME


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    file = tmp_path_factory.mktemp("games") / "scripted.jsonl"
    seen = []
    games = boxing.demonstrate(
        file, count=2, first_seed=5, player="scripted", levels=[0, 3], processes=2, progress=seen.append
    )
    assert [state.done for state in seen] == [0, 1, 2]
    return file, games


def test_demonstrations_become_a_data_set_that_batches_read(played, tmp_path):
    file, games = played
    result = api.prepare_boxing(tmp_path / "out", file, processes=2)
    assert json.loads(json.dumps(result)) == result
    assert (result["games"], result["held_out"], result["game"]) == (2, 1, "boxing")
    assert result["frames"] == sum(len(game.labels) for game in games)
    data = api.load_dataset(tmp_path / "out")
    assert [origin["seed"] for origin in data.provenance] == [5, 6]
    assert data.features == GAME.features(visible=False)
    controllers = np.array(CONTROLLERS)
    for index, game in enumerate(games):
        rows = slice(data.offsets[index], data.offsets[index + 1])
        assert (data.target[rows] == controllers[game.labels]).all()  # what the expert wanted
        assert (data.controller[rows][1:] == controllers[game.executed[:-1]]).all()  # what was done before
    batch = Batches(data, WindowSpec(context=8), batch=16).next()
    assert set(batch) == {"numbers", "previous", "targets"}


def test_the_shipped_games_are_replayed_once_and_then_found(played, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(archive, "SHIPPED", archive.save(tmp_path / "demos.xz", played[1]))
    data = api.load_dataset("boxing")
    with monkeypatch.context() as without_emulator:
        without_emulator.setitem(sys.modules, "ale_py", None)
        assert api.load_dataset("boxing").fingerprint == data.fingerprint
    visible = api.load_dataset("boxing-visible")
    assert visible.features["visible"] is True
    assert visible.numbers.shape[1] < data.numbers.shape[1]


def test_what_cannot_be_prepared_names_the_cure(played, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="out exists; choose another folder"):
        api.prepare_boxing(tmp_path / "out", played[0])
    with pytest.raises(DataError, match=r"9999, got 9996 to 10000; change .*larger seeds are for evaluation"):
        boxing.demonstrate(tmp_path / "a.jsonl", count=5, first_seed=9996)
    (tmp_path / "other.xz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"is not an archive of demonstrations .*give one, or a file of JSON lines"):
        api.prepare_boxing(tmp_path / "new", tmp_path / "other.xz")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 1}, "at least 2 games, one to train on and one to hold out, got 1"),
        ({"first_seed": -5}, "must be 0 to 9999, got -5 to -4"),
        ({"first_seed": 10**30}, "must be 0 to 9999"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
        ({"processes": -1}, "processes must be at least 1, got -1"),
        ({"levels": [0, 9]}, "has the levels 0, 1, 2, 3, got 9"),
        ({"player": "nobody"}, "unknown"),
    ],
)
def test_games_that_cannot_be_demonstrated_leave_no_file(tmp_path, settings, words):
    with pytest.raises((ConfigError, DataError), match=words):
        boxing.demonstrate(tmp_path / "a.jsonl", **{"count": 2, "player": "scripted"} | settings)
    assert list(tmp_path.iterdir()) == []


def test_a_process_at_least_replays(played, tmp_path):
    with pytest.raises(ConfigError, match="processes must be at least 1, got 0"):
        api.prepare_boxing(tmp_path / "out", played[0], processes=0)
