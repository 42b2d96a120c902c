"""A preparation of replays that is interrupted, killed or runs out of disk: refused with a reason, or gone on with."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import melee_helpers as replays
from data.melee_helpers import needs_replays
from ridgeline.data.api import load_dataset, prepare_melee
from ridgeline.data.melee import store as store_module
from ridgeline.data.melee import take
from ridgeline.errors import DataError
from ridgeline.games.melee.events import Recording


def dying_read(task):
    """As if the parser died over the truncated file each time, and over another one the first time only."""
    file = Path(task[0])
    if file.name == replays.TRUNCATED.name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if file.name == replays.CPU.name and not (mark := file.with_suffix(".mark")).exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return take.read(task)


@needs_replays
def test_a_replay_that_kills_its_reader_is_refused(replay_folder, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.data.melee.prepare.read", dying_read)
    report = prepare_melee(replay_folder, tmp_path / "x", processes=2)
    reasons = {Path(entry["file"]).name: entry["reason"] for entry in report["refused"]}
    assert reasons.pop(replays.TRUNCATED.name) == "the process that read it died (exit code -11)"
    before = {Path(entry["file"]).name: entry["reason"] for entry in prepared[0]["refused"]}
    del before[replays.TRUNCATED.name]
    assert reasons == before
    assert load_dataset(tmp_path / "x").fingerprint == prepared[1].fingerprint
    (replay_folder / replays.CPU.name).with_suffix(".mark").unlink()


class StopError(Exception):
    """An interruption."""


def interrupt_after(count):
    def progress(done, total):
        if done >= count:
            raise StopError

    return progress


@needs_replays
@pytest.mark.parametrize("damage", ["nothing", "torn line", "rows of more"])
def test_an_interrupted_preparation_goes_on(replay_folder, prepared, tmp_path, damage, monkeypatch):
    out = tmp_path / "x"
    with pytest.raises(StopError):
        prepare_melee(replay_folder, out, processes=1, progress=interrupt_after(4))
    assert not out.exists()
    aside = tmp_path / ".x.partial"
    journal = aside / store_module.JOURNAL
    assert len(journal.read_text().splitlines()) == 1 + 4
    if damage == "torn line":
        journal.write_bytes(journal.read_bytes() + b'{"file": "ab')
    if damage == "rows of more":
        for name in ("categories", "numbers"):
            with (aside / f"{name}.npy").open("ab") as stream:
                stream.write(b"12345")
    read = []
    monkeypatch.setattr("ridgeline.data.melee.prepare._add", _noting(read))
    report = prepare_melee(replay_folder, out, processes=1)
    assert len(read) == 8 - 4  # the rest only
    assert not aside.exists()
    assert sorted(file.name for file in out.iterdir()) == sorted(
        [
            "meta.json",
            *(f"{name}.npy" for name in ("categories", "numbers", "controller", "target", "offsets", "held_out")),
        ]
    )
    assert load_dataset(out).fingerprint == prepared[1].fingerprint
    assert {**report, "frames_per_s": 0, "path": ""} == {**prepared[0], "frames_per_s": 0, "path": ""}


def touch(folder):
    file = folder / "1.slp"
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@needs_replays
@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda folder: (folder / "1.slp").unlink(), 1),
        (lambda folder: shutil.copyfile(folder / "4.slp", folder / "1.slp"), 1),  # then 4 is the same game as 1
        (lambda folder: shutil.copyfile(folder / "0.slp", folder / "00.slp"), 1),
        (lambda folder: (folder / "0.slp").rename(folder / "9.slp"), 0),
        (touch, 1),
        (lambda folder: (folder / "4.slp").unlink(), 3),  # which was not read yet
    ],
    ids=["deleted", "replaced", "new", "renamed", "touched", "later"],
)
def test_one_that_goes_on_gives_what_a_fresh_one_gives(tmp_path, monkeypatch, change, kept):
    source = tmp_path / "source"
    source.mkdir()
    for seed in range(5):
        (source / f"{seed}.slp").write_bytes(Recording.read(replays.SHORT).reseeded(seed))
    with pytest.raises(StopError):
        prepare_melee(source, tmp_path / "x", processes=1, progress=interrupt_after(3))
    change(source)
    read = []
    monkeypatch.setattr("ridgeline.data.melee.prepare._add", _noting(read))
    report = prepare_melee(source, tmp_path / "x", processes=1)
    files = len(list(source.iterdir()))
    assert len(read) == files - kept
    fresh = prepare_melee(source, tmp_path / "fresh", processes=1)
    assert {**report, "frames_per_s": 0, "path": ""} == {**fresh, "frames_per_s": 0, "path": ""}
    assert load_dataset(tmp_path / "x").fingerprint == load_dataset(tmp_path / "fresh").fingerprint


def _noting(read):
    from ridgeline.data.melee import prepare

    real = prepare._add

    def add(store, digests, key, result):
        read.append(key)
        real(store, digests, key, result)

    return add


@needs_replays
def test_a_killed_preparation_goes_on(prepared, replay_folder, tmp_path):
    """Ended from outside at an arbitrary moment, as often as it takes."""
    script = tmp_path / "x.py"
    script.write_text(
        "import sys\nfrom ridgeline.data.api import prepare_melee\n"
        "if __name__ == '__main__':\n    prepare_melee(sys.argv[1], sys.argv[2], processes=1)\n"
    )
    journal = tmp_path / ".out.partial" / store_module.JOURNAL
    process = subprocess.Popen([sys.executable, str(script), str(replay_folder), str(tmp_path / "out")])
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.01)
    process.kill()
    process.wait()
    prepare_melee(replay_folder, tmp_path / "out", processes=1)
    assert load_dataset(tmp_path / "out").fingerprint == prepared[1].fingerprint


@needs_replays
def test_an_unfinished_preparation_with_other_settings_is_not_gone_on_with(replay_folder, tmp_path):
    with pytest.raises(StopError):
        prepare_melee(replay_folder, tmp_path / "x", processes=1, progress=interrupt_after(2))
    with pytest.raises(DataError, match="unfinished preparation with other settings"):
        prepare_melee(replay_folder, tmp_path / "x", buttons=7, processes=1)


def test_one_process_prepares_at_a_time(tmp_path):
    widths = dict.fromkeys(("categories", "numbers", "controller", "target"), 1)
    store = store_module.Store(tmp_path / "y", {}, widths, [])
    try:
        with pytest.raises(DataError, match="another process is preparing"):
            store_module.Store(tmp_path / "y", {}, widths, [])
    finally:
        store.close()


@needs_replays
def test_a_full_disk_is_said_and_can_be_mended(replay_folder, prepared, tmp_path, monkeypatch):
    real, written = os.write, []

    def write(descriptor, content):
        written.append(len(content))
        if sum(written) > 500_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "write", write)
        with pytest.raises(DataError, match="No space left on device; once that is mended, the same command goes on"):
            prepare_melee(replay_folder, tmp_path / "x", processes=1)
    assert not (tmp_path / "x").exists()
    prepare_melee(replay_folder, tmp_path / "x", processes=1)
    assert load_dataset(tmp_path / "x").fingerprint == prepared[1].fingerprint


@needs_replays
def test_a_partial_folder_is_no_data_set(replay_folder, tmp_path):
    with pytest.raises(StopError):
        prepare_melee(replay_folder, tmp_path / "x", processes=1, progress=interrupt_after(2))
    with pytest.raises(DataError, match="no data set"):
        load_dataset(tmp_path / ".x.partial")
