"""A study's folder: one process at work in it, and files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ridgeline import files
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.records import Record, write_record
from ridgeline.train.guards import writing

LOCK = ".lock"
RECORD = "record.json"
LOOK_SECONDS = 0.1


@contextmanager
def claimed(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Be the only process at work in `folder` inside the `with` block; the system frees it when the process ends.

    Args:
        folder: exists.
        patience: seconds to wait for another, such as what is left of a study that was just killed.

    Raises:
        ConfigError: another process is at work there.
        RidgelineError: the folder cannot be written.
    """
    deadline = time.monotonic() + patience
    with writing(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(f"another process is at work in {folder}; wait for it, or give --out") from error
            except OSError as error:
                raise RidgelineError(f"{folder} cannot be locked ({error.strerror}); give another --out") from error
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def is_foreign(folder: Path) -> bool:
    """Whether there is something of that name other than an empty folder."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def write_whole(file: Path, text: str) -> None:
    """Write a file whole, or leave what was there.

    Raises:
        RidgelineError: it cannot be written.
    """
    with writing(file.parent):
        files.replace(file, text)


def keep_record(record: Record, file: Path) -> Path:
    """Write a study's record.

    Raises:
        RidgelineError: it cannot be written.
    """
    with writing(file.parent):
        return write_record(record, file)


def check_place(file: Path) -> None:
    """Refuse a place where no file can be written, before there is something to lose.

    Raises:
        ConfigError: `file` is a folder.
        RidgelineError: its folder cannot be made or written.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the name of a file")
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
