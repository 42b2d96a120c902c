"""A folder of replays as a data set: complete, in order, resumable, and nothing in it of the players' names."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data import melee_helpers as replays
from data.melee_helpers import needs_replays, variant
from ridgeline.cli import main
from ridgeline.data import shards
from ridgeline.data.api import load_dataset, prepare_melee
from ridgeline.data.loader import Batches, Validation
from ridgeline.data.melee.replay import read_replay
from ridgeline.data.order import Order
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError
from ridgeline.games.melee.controls import Encoding
from ridgeline.games.melee.events import Recording
from ridgeline.games.melee.features import encoding_of
from ridgeline.games.melee.frames import STAGES
from ridgeline.presets import hal_5m, hal_20m
from ridgeline.train.resolve import fit_model

GAMES = 5
SEATS = 9  # one of the players is the computer's


@needs_replays
def test_what_is_in_it_and_what_is_refused(replay_folder, prepared):
    report, data = prepared
    lengths = [2935, 5023, 6552, 941, 308]
    assert report["games"] == GAMES
    assert report["frames"] == sum(lengths)
    seats = [length for length in lengths for _ in range(1 if length == 941 else 2)]
    assert report["windows"] == sum(length - 256 for length in seats)
    assert sorted(np.diff(data.offsets)) == sorted(length - 1 for length in seats)
    assert report["frames_per_s"] > 0
    refused = {Path(entry["file"]).name: entry["reason"] for entry in report["refused"]}
    assert refused == {
        "b.slp": f"the same game as {replay_folder / 'deeper' / 'a.SLP'}",
        replays.TRUNCATED.name: refused[replays.TRUNCATED.name],
        replays.TINY.name: "124 frames, too short for a window of 256 and its target",
    }
    assert "damaged" in refused[replays.TRUNCATED.name]
    summary = data.summary()
    assert (summary["games"], summary["held_out"], summary["frames"]) == (GAMES, 1, sum(seats) - SEATS)


@needs_replays
def test_both_sides_of_a_game_are_held_out_together(prepared):
    _, data = prepared
    held_out = {data.provenance[table]["replay"] for table in data.held_out}
    assert len(held_out) == 1
    assert set(data.held_out) == {i for i, origin in enumerate(data.provenance) if origin["replay"] in held_out}


@needs_replays
def test_the_presets_fit_as_they_are(prepared):
    _, data = prepared
    for config in (hal_20m(), hal_5m()):
        assert config.data == "melee"
        assert fit_model(config.model, data) == config.model


@needs_replays
def test_other_classes(replay_folder, tmp_path):
    prepare_melee(
        replay_folder, tmp_path / "x", buttons=5, shoulder=True, stage="yoshis_story", min_version="3.15", processes=1
    )
    data = load_dataset(tmp_path / "x")
    assert {origin["stage"] for origin in data.provenance} == {STAGES["YOSHIS_STORY"]}
    assert fit_model(hal_20m(shoulder=True).model, data) == hal_20m(shoulder=True).model
    assert encoding_of(data.features) == Encoding(5, True)


@needs_replays
@pytest.mark.parametrize(("stride", "delay"), [(1, 0), (2, 0), (1, 18), (2, 21)])
def test_windows_hold_what_the_replay_holds(replay_folder, prepared, stride, delay):
    """From the raw recording to the batch: own player first, target `delay` frames after the next one."""
    _, data = prepared
    raw = {}
    for file in replay_folder.rglob("*"):
        if file.suffix.lower() == ".slp" and file.name not in ("b.slp", replays.TRUNCATED.name, replays.TINY.name):
            replay = read_replay(file)
            raw[replay.digest] = replay
    # which seat a table shows is told by its order: the lower port first
    seat_of = {}
    for table, origin in enumerate(data.provenance):
        earlier = sum(1 for other in data.provenance[:table] if other["digest"] == origin["digest"])
        seat_of[table] = earlier
    window = WindowSpec(context=256, stride=stride, delay=delay)
    batches = Batches(data, window, batch=64, seed=1)
    index, word = Order(batches.windows.train_windows, seed=1).at(0, 64)
    starts, counts = batches.windows.train(index, word)
    batch = batches.next()
    for b in range(64):
        table = int(np.searchsorted(data.offsets, starts[b], side="right")) - 1
        replay = raw[data.provenance[table]["digest"]]
        players = replay.frames["players"][:, [seat_of[table], 1 - seat_of[table]]]
        frames = starts[b] - data.offsets[table] + stride * np.arange(counts[b])
        assert np.allclose(batch["numbers"][b, : counts[b], 7] * 55, players[frames, 0]["x"], atol=1e-4)
        assert np.allclose(batch["numbers"][b, : counts[b], 17] * 33 + 14, players[frames, 1]["y"], atol=1e-4)
        assert np.array_equal(batch["categories"][b, : counts[b], 3], players[frames, 0]["action"])
        classes = Encoding().encode(players[:, 0]["controller"])
        assert np.array_equal(batch["previous"][b, : counts[b]], classes[frames])
        assert np.array_equal(batch["targets"][b, : counts[b]], classes[frames + 1 + delay])
        assert (batch["targets"][b, counts[b] :] == -100).all()


@needs_replays
def test_the_first_label_of_a_window_does_not_depend_on_where_it_starts(prepared):
    _, data = prepared
    window = WindowSpec(context=32)
    batches = Batches(data, window, batch=2000, seed=0)
    starts, counts = batches.windows.train(*Order(batches.windows.train_windows, seed=0).at(0, 2000))
    targets = batches.next()["targets"].numpy()
    seen = {}
    for b in range(2000):
        for position in range(counts[b]):
            row, label = int(starts[b]) + position, tuple(targets[b, position])
            assert seen.setdefault(row, label) == label
    assert len(seen) < counts.sum() / 2  # many rows were seen from several starts


@needs_replays
def test_the_number_of_processes_does_not_matter(replay_folder, prepared, tmp_path):
    prepare_melee(replay_folder, tmp_path / "x", processes=1)
    assert load_dataset(tmp_path / "x").fingerprint == prepared[1].fingerprint


@needs_replays
def test_names_and_codes_are_not_kept(tmp_path):
    source, secret = tmp_path / "MR SECRET", b"SECRET"
    source.mkdir()
    for index, file in enumerate((replays.SHORT, replays.CPU)):
        named = variant(file, start={replays.NAMES: secret, replays.CODES: secret})
        assert secret in named
        (source / f"SECRET{index}.slp").write_bytes(named)
    (source / "SECRET2.slp").write_bytes(b"SECRET")
    prepare_melee(source, tmp_path / "out", processes=1)
    for file in (tmp_path / "out").iterdir():
        assert secret not in file.read_bytes()


@needs_replays
def test_a_data_set_of_another_schema_is_refused(prepared, tmp_path):
    shutil.copytree(prepared[1].path, tmp_path / "x")
    file = tmp_path / "x" / shards.META
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, "schema": shards.SCHEMA + 1}))
    with pytest.raises(DataError, match="upgrade ridgeline or prepare it again"):
        load_dataset(tmp_path / "x")
    file.write_text(json.dumps({**meta, "features": {**meta["features"], "version": 0}}))
    with pytest.raises(DataError, match=r"x cannot be trained on here: the features .* are not those of this version"):
        load_dataset(tmp_path / "x")


def refused(capsys, *arguments):
    assert main(["data", "melee", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@needs_replays
def test_nothing_is_left(tmp_path, capsys):
    (tmp_path / "few").mkdir()
    shutil.copy(replays.TRUNCATED, tmp_path / "few")
    shutil.copy(replays.TINY, tmp_path / "few")
    out = tmp_path / "out"
    assert "no game in" in refused(capsys, tmp_path / "few", "-o", out)
    shutil.copy(replays.CPU, tmp_path / "few")
    complaint = refused(capsys, tmp_path / "few", "-o", out)
    assert "one game in" in complaint
    assert "1 × 124 frames, too short" in complaint
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["few"]


@needs_replays
def test_what_is_refused_where_nothing_is_left_is_counted_and_listed(replay_folder, tmp_path, capsys):
    arguments = [replay_folder, "-o", tmp_path / "out", "--min-version", 99, "--processes", 1]
    complaint = refused(capsys, *arguments)
    assert main(["data", "melee", *map(str, arguments), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == complaint
    report = json.loads(captured.out)
    assert (report["games"], report["path"], len(report["refused"])) == (0, None, 8)
    counts = Counter(entry["reason"] for entry in report["refused"]).most_common()
    shown = "; ".join(f"{count} × {reason}" for reason, count in counts[:3])
    rest = sum(count for _, count in counts[3:])
    assert len(counts) > 4
    assert f"(8 refused: {shown}; {rest} for {len(counts) - 3} other reasons, which --json lists)" in complaint


@needs_replays
def test_command_line(replay_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "melee", str(replay_folder), "-o", str(out), "--character", "Fox", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) == {"games", "frames", "windows", "frames_per_s", "refused", "path"}
    assert report["games"] == 2
    assert {origin["character"] for origin in load_dataset(out).provenance} == {1}
    assert "exists; choose another folder" in refused(capsys, replay_folder, "-o", out)


def test_what_cannot_be_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    assert "needs the folder of the replays" in refused(capsys)
    assert "there are no replays (*.slp)" in refused(capsys, tmp_path / "empty")
    assert "is no folder" in refused(capsys, tmp_path / "missing")
    assert "did you mean FALCO" in refused(capsys, tmp_path / "empty", "--character", "falcon")
    assert "unknown stage" in refused(capsys, tmp_path / "empty", "--stage", "hyrule")
    assert "min_version must be 2.1.0 or later, got 1.0.0" in refused(capsys, tmp_path / "empty", "--min-version", "1")
    assert "must be a version such as 3.8" in refused(capsys, tmp_path / "empty", "--min-version", "new")
    assert "buttons must be 5, 6, 7, got 8" in refused(capsys, tmp_path / "empty", "--buttons", "8")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="do not ship with the package; prepare yours"):
        load_dataset("melee")
    with pytest.raises(ConfigError):
        prepare_melee(tmp_path, processes=0)


@needs_replays
def test_without_a_folder_of_ones_own_it_is_called_melee(replay_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    prepare_melee(replay_folder, processes=1, character="FOX")
    assert load_dataset("melee").path == tmp_path / "melee"
    assert len(Validation(load_dataset("melee"), WindowSpec(context=256), batch=4))


@needs_replays
def test_a_changed_seed_makes_another_game(tmp_path):
    for seed in range(3):
        (tmp_path / f"{seed}.slp").write_bytes(Recording.read(replays.SHORT).reseeded(seed))
    report = prepare_melee(tmp_path, tmp_path / "out", processes=1)
    assert (report["games"], report["refused"]) == (3, [])


@needs_replays
def test_names_that_are_no_text(tmp_path, capsys):
    for seed in range(2):
        (tmp_path / f"{seed}.slp").write_bytes(Recording.read(replays.SHORT).reseeded(seed))
    shutil.copy(replays.CPU, Path(os.fsdecode(os.fsencode(tmp_path / "x") + b"\xff.slp")))
    assert main(["data", "melee", str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    assert "x?.slp: its name is no UTF-8 text: rename it" in capsys.readouterr().err.replace("\n", "")
