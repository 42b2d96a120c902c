"""A data set while it grows: arrays that are appended to, and a journal of the replays that are in them.

    .NAME.partial/journal.jsonl   a head line with the settings; then a line for every replay that is done with
    .NAME.partial/COLUMN.npy      rows of the tables, one replay after another, behind room for the header

The arrays reach the disk before the journal says so. A preparation that was killed goes on from the journal's last
whole line up to which it names the files that are there now, in their order: what the journal and the arrays hold
beyond it is cut off, so that the result is that of a preparation which was never interrupted. At the end the arrays get
their headers, and the folder is renamed to the data set's name. Files are named in the journal by a hash, of their
state too: their names may be those of people.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline import files
from ridgeline.data import shards
from ridgeline.data.games import COLUMNS
from ridgeline.errors import DataError
from ridgeline.games.table import GameTable

FORMAT = "ridgeline-melee-partial"
JOURNAL = "journal.jsonl"
HEADER = 128  # bytes before an array's rows
LOCK_SECONDS = 2.0
COMMIT = 1 << 26  # bytes of rows after which the journal is brought up to date

Entry = dict[str, Any]


class Store:
    """The folder of an unfinished preparation, made or taken up again.

    Args:
        folder: of the data set that it will be.
        settings: all that decides what a replay becomes.
        widths: columns of each array.
        files: what names each state of each file, in the order in which they will be added.

    Attributes:
        entries: of the first of these files, what the journal says of each: "reason" it was refused, or "tables", its
            tables' lengths, and whatever else was given to `add`.

    Raises:
        DataError: it cannot be written, another process is at it, or it was begun with other settings.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], widths: Mapping[str, int], files: Iterable[str]
    ) -> None:
        self.folder = folder
        self.aside = folder.parent / f".{folder.name}.partial"
        self.widths = widths
        self.entries: dict[str, Entry] = {}
        self._waiting: list[str] = []
        self._bytes = 0
        self._files: dict[str, int] = {}
        try:
            self.aside.mkdir(parents=True, exist_ok=True)
            for name, file in {JOURNAL: JOURNAL, **{name: f"{name}.npy" for name in COLUMNS}}.items():
                self._files[name] = os.open(self.aside / file, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock()
            self._take_up({"format": FORMAT, "schema": shards.SCHEMA, "settings": dict(settings)}, files)
        except OSError as error:
            self.close()
            raise self._cannot(error) from error
        except DataError:
            self.close()
            raise

    def add(self, file: str, entry: Entry, tables: Sequence[GameTable] = ()) -> None:
        """Append a replay's tables and note its entry; on the disk after some more, or after `commit`.

        Raises:
            DataError: the disk is full; the preparation can go on once it is not.
        """
        entry = {**entry, "tables": [len(table) for table in tables]}
        try:
            for name in COLUMNS:
                for table in tables:
                    self._bytes += _write(self._files[name], getattr(table, name))
            self.entries[file] = entry
            self._waiting.append(json.dumps({"file": file, **entry}) + "\n")
            if self._bytes > COMMIT:
                self.commit()
        except OSError as error:
            raise self._cannot(error) from error

    def commit(self) -> None:
        """Bring the arrays to the disk, then the journal.

        Raises:
            DataError: the disk is full.
        """
        try:
            for name in COLUMNS:
                os.fsync(self._files[name])
            self._note("".join(self._waiting))
            os.fsync(self._files[JOURNAL])
        except OSError as error:
            raise self._cannot(error) from error
        self._waiting, self._bytes = [], 0

    def rows(self) -> list[int]:
        """Lengths of all tables, in the order in which they lie in the arrays."""
        return [length for entry in self.entries.values() for length in entry["tables"]]

    def seal(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> Path:
        """Turn it into the data set.

        Args:
            arrays: those that are not appended to.
            meta: of the data set.

        Raises:
            DataError: it cannot be written; it can be tried again.
        """
        rows = sum(self.rows())
        try:
            self.commit()
            described = {name: shards.write_array(self.aside, name, array) for name, array in arrays.items()}
            for name, dtype in COLUMNS.items():
                shape = (rows, self.widths[name])
                os.pwrite(self._files[name], _header(shape, np.dtype(dtype)), 0)
                os.fsync(self._files[name])
                described[name] = shards.entry(self._file(name), shape, np.dtype(dtype))
            shards.check_new(self.folder)
            shards.seal(self.aside, self.folder, "games", described, meta)
            (self.folder / JOURNAL).unlink()
        except OSError as error:
            raise self._cannot(error) from error
        return self.folder

    def discard(self) -> None:
        """Remove the folder, in which there is nothing to go on with."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, name: str) -> Path:
        return self.aside / f"{name}.npy"

    def _take_up(self, head: Mapping[str, Any], files: Iterable[str]) -> None:
        """Read the journal as far as it is whole and names the files, and cut everything back to it."""
        journal = self._files[JOURNAL]
        lines = _whole_lines(journal)
        first = json.dumps(head)
        if lines and lines[0][0] != json.loads(first):
            raise DataError(
                f"{self.aside} holds an unfinished preparation with other settings; finish it with those, or delete it"
            )
        length = lines[0][1] if lines else 0
        for file, (line, end) in zip(files, lines[1:], strict=False):
            if line.pop("file") != file:  # new, gone or changed; what was made of later files may depend on it
                break
            self.entries[file], length = line, end
        os.ftruncate(journal, length)
        os.lseek(journal, 0, os.SEEK_END)
        if not lines:
            self._note(first + "\n")
        rows = sum(self.rows())
        for name, dtype in COLUMNS.items():
            size = HEADER + rows * self.widths[name] * np.dtype(dtype).itemsize
            if rows and os.fstat(self._files[name]).st_size < size:
                raise DataError(f"{self._file(name)} is shorter than its journal says; delete {self.aside}")
            os.ftruncate(self._files[name], size)
            os.lseek(self._files[name], size, os.SEEK_SET)

    def _lock(self) -> None:
        """Be the only one; what is left of a preparation that was just killed may hold on for a moment."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(self._files[JOURNAL], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process is preparing {self.folder}; wait for it or choose another folder"
                    ) from error
            time.sleep(0.02)

    def _note(self, lines: str) -> None:
        _write(self._files[JOURNAL], np.frombuffer(lines.encode(), np.uint8))

    def _cannot(self, error: OSError) -> DataError:
        where = error.filename or self.folder
        return DataError(
            f"cannot write {where}: {error.strerror}; once that is mended, the same command goes on where it stopped"
        )


def _write(descriptor: int, array: NDArray[Any]) -> int:
    """Write all of an array; how many bytes."""
    if not array.size:
        return 0
    left = np.ascontiguousarray(array).data.cast("B")
    size = len(left)
    while left:
        left = left[os.write(descriptor, left) :]
    return size


def _whole_lines(descriptor: int) -> list[tuple[Entry, int]]:
    """The lines that were written to their ends, and the byte at which each ends."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    return list(zip(_parsed(lines), accumulate(map(len, lines)), strict=True))


def _parsed(lines: Iterable[bytes]) -> Iterable[Entry]:
    for line in lines:
        try:
            yield files.parsed(line)
        except ValueError as error:
            raise DataError(
                f"the journal of an unfinished preparation is damaged ({error}); delete its folder"
            ) from error


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of an .npy file, filled up to HEADER bytes."""
    magic = np.lib.format.magic(1, 0)
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": shape})
    room = HEADER - len(magic) - 2
    return magic + room.to_bytes(2, "little") + text.ljust(room - 1).encode("latin1") + b"\n"
