"""A data set's folder is whole or absent, verified when read, and never overwritten."""

import json
import resource

import numpy as np
import pytest

from ridgeline.data import shards
from ridgeline.errors import DataError

ARRAYS = {"tokens": np.arange(100, dtype=np.uint16), "categories": np.empty((7, 0), dtype=np.uint16)}


def make(folder):
    return shards.write(folder, "text", ARRAYS, {"name": "x", "vocabulary": {"characters": "äß"}})


def test_arrays_and_meta_come_back(tmp_path):
    data = shards.read(make(tmp_path / "new" / "x"))
    assert data.meta["kind"] == "text"
    assert data.meta["vocabulary"]["characters"] == "äß"
    for name, array in ARRAYS.items():
        assert data.arrays[name].dtype == array.dtype
        assert data.arrays[name].shape == array.shape
        assert (data.arrays[name] == array).all()
    assert isinstance(data.arrays["tokens"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        data.arrays["tokens"][0] = 1


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    first, second = shards.read(make(tmp_path / "a")), shards.read(make(tmp_path / "b"))
    assert first.fingerprint == second.fingerprint
    shards.write(tmp_path / "c", "text", {**ARRAYS, "tokens": ARRAYS["tokens"] + 1}, {})
    assert shards.read(tmp_path / "c").fingerprint != first.fingerprint


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="exists; choose another folder"):
        make(tmp_path / "x")
    assert (tmp_path / "x" / "mine.txt").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.json, "dump", full)  # the arrays are written by then
    with pytest.raises(DataError, match="No space left on device; free space or choose another folder"):
        make(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_two_who_write_the_same_to_the_cache_do_not_collide(tmp_path, monkeypatch):
    folder, real = tmp_path / "x", shards.write

    def overtaken(*arguments):
        real(*arguments)
        return real(*arguments)

    monkeypatch.setattr(shards, "write", overtaken)
    shards.write_once(folder, "text", ARRAYS, {})
    assert shards.write_once(folder, "text", ARRAYS, {}) == folder
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def edit_meta(folder, **changes):
    file = folder / shards.META
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def flip_a_byte(folder):
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[-1] ^= 1
    (folder / "tokens.npy").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "tokens.npy is corrupt .*delete the folder and prepare it again"),
        (lambda folder: (folder / "tokens.npy").write_bytes(b""), "is corrupt .*prepare it again"),
        (lambda folder: (folder / "tokens.npy").unlink(), "cannot be read .*prepare it again"),
        (lambda folder: (folder / shards.META).write_text("{"), "cannot be read .*prepare it again"),
        (lambda folder: (folder / shards.META).unlink(), r"is no data set \(meta.json is missing\); prepare it"),
        (lambda folder: (folder / shards.META).write_text('{"vocab_size": 65}'), "not a ridgeline data set"),
        (lambda folder: edit_meta(folder, schema="x"), "not a ridgeline data set"),
        (lambda folder: edit_meta(folder, arrays=3), "meta.json is damaged .*prepare it again"),
        (lambda folder: edit_meta(folder, arrays={"tokens": {}}), "meta.json is damaged .*prepare it again"),
        (lambda folder: edit_meta(folder, schema=99, package="9.9"), "written by ridgeline 9.9 .*; upgrade"),
        (lambda folder: edit_meta(folder, schema=0), r"\(data schema 0, this version reads 1\); prepare it again"),
        (lambda folder: edit_meta(folder, schema=-1), r"\(data schema -1, this version reads 1\); prepare it again"),
    ],
)
def test_a_damaged_or_foreign_one_is_refused_with_its_cure(tmp_path, damage, message):
    folder = make(tmp_path / "x")
    damage(folder)
    with pytest.raises(DataError, match=message):
        shards.read(folder)


def test_the_files_are_those_that_numpy_writes(tmp_path):
    folder = make(tmp_path / "x")
    for name, array in ARRAYS.items():
        np.save(tmp_path / "own.npy", array)
        assert (folder / f"{name}.npy").read_bytes() == (tmp_path / "own.npy").read_bytes()


def test_a_full_disk_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*x: File too large; free space or choose another folder"):
            shards.write(tmp_path / "x", "text", {"tokens": np.zeros(100_000, np.uint8)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
