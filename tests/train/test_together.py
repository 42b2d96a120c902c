"""Two runs at one place at the same time: one trains, the other one says so and spoils nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline import checkpoint
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.train import resume, state, train
from ridgeline.train.guards import alone_in

OTHER = "another run is training in run; wait for its end, or start one in another --out"


def test_a_second_run_in_a_folder_is_refused_and_leaves_it_alone(config, change):
    train(config)
    before = {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()}
    with alone_in(Path("run")), pytest.raises(ConfigError, match=OTHER):
        resume("run", change(config, steps=20))
    with alone_in(Path("run")), pytest.raises(ConfigError, match=OTHER):
        train(config)
    assert {file: file.read_bytes() for file in Path("run").rglob("*") if file.is_file()} == before
    with pytest.raises(ConfigError, match="run exists; choose another --out, or go on with the run"):
        train(config)
    resume("run", change(config, steps=20))


def test_a_second_run_in_a_folder_that_was_just_made_is_refused(config):
    with state.open_folder(config) as folder:
        with pytest.raises(ConfigError, match=OTHER):
            train(config)
        assert folder.is_dir()
    train(config)


def test_a_run_that_another_one_has_taken_further_is_not_taken_back(config, change):
    train(config)
    saved = checkpoint.load("run/last")
    resume("run", change(config, steps=20))
    with (
        pytest.raises(CheckpointError, match="another run has just gone on in run; try --resume again"),
        state.go_on_in(saved),
    ):
        pass
    assert checkpoint.meta("run/last")["step"] == 20


def test_runs_that_begin_at_once_have_folders_of_their_own(config, change):
    config = change(config, out="auto")

    def open_one(_: int) -> str:
        with state.open_folder(config) as folder:
            (folder / "used").touch()
            return str(folder)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(open_one, range(16)))
    assert len(set(folders)) == 16


def test_folders_that_cannot_be(config, change, tmp_path):
    (tmp_path / "runs").touch()
    for out in ("auto", "runs/deeper"):
        with pytest.raises(ConfigError, match=r"cannot make the run's folder runs.*; choose another --out"):
            train(change(config, out=out))
    with (
        pytest.raises(ConfigError, match=r"cannot enter the run's folder missing \(No such file or directory\)"),
        alone_in(Path("missing")),
    ):
        pass


def test_where_a_file_system_has_no_locks_a_run_goes_on(config, monkeypatch):
    def lockless(handle, how):
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("ridgeline.train.guards.fcntl.flock", lockless)
    assert train(config).progress.step == 12
