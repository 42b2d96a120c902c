"""A data set on disk: one folder of memory-mapped arrays and a meta.json that vouches for them.

    FOLDER/meta.json    format, schema, kind, package, name, source, and what the kind needs (vocabulary, games …);
                        for every array its file, shape, dtype and sha256
    FOLDER/NAME.npy     one array

The folder is written aside and renamed, so one that exists under its name is whole. Nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ridgeline
from ridgeline import files
from ridgeline.checkpoint import sha256
from ridgeline.errors import DataError, reason

FORMAT = "ridgeline-data"
SCHEMA = 1
META = "meta.json"
REQUIRED = {"schema", "kind", "package", "arrays"}


@dataclass(frozen=True, eq=False)
class Shards:
    """A data set as read from its folder.

    Attributes:
        path: the folder.
        meta: the content of meta.json.
        arrays: name → read-only array mapped from the disk.
        fingerprint: checksum over all arrays: two data sets with the same one hold the same data.
    """

    path: Path
    meta: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    fingerprint: str


def write(folder: str | Path, kind: str, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> Path:
    """Write a data set aside and rename it to `folder`.

    Args:
        folder: must not exist.
        kind: what the arrays are ("text", "games").
        arrays: name → array; each becomes NAME.npy.
        meta: what else the kind needs, as far as JSON can hold it.

    Raises:
        DataError: the folder exists or cannot be written; nothing is changed.
    """
    folder = Path(folder)
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}; choose another folder") from error
    try:
        entries = {name: write_array(aside, name, array) for name, array in arrays.items()}
        seal(aside, folder, kind, entries, meta)
    except OSError as error:
        check_new(folder)
        raise DataError(f"cannot write {folder}: {error.strerror}; free space or choose another folder") from error
    finally:
        if aside.exists():
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def seal(aside: Path, folder: Path, kind: str, entries: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Vouch for a folder of arrays with its meta.json and rename it to `folder`.

    Args:
        aside: a folder in the same one as `folder`, which holds the arrays.
        folder: must not exist.
        kind: see `write`.
        entries: name → what `write_array` or `entry` says of the array.
        meta: see `write`.

    Raises:
        OSError: it cannot be written or renamed.
    """
    head = {"format": FORMAT, "schema": SCHEMA, "kind": kind, "package": ridgeline.__version__}
    with (aside / META).open("w", encoding="utf-8") as stream:
        json.dump(head | dict(meta) | {"arrays": dict(entries)}, stream, indent=1, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    aside.chmod(0o755)
    aside.rename(folder)


def write_array(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Write an array to NAME.npy and say for meta.json what is there."""
    file = folder / f"{name}.npy"
    with file.open("wb") as stream:
        # not np.save, which loses the reason why the disk takes no more
        array = np.ascontiguousarray(array)
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.data)
        stream.flush()
        os.fsync(stream.fileno())
    return entry(file, array.shape, array.dtype)


def entry(file: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    """What meta.json says of an array's file."""
    return {"file": file.name, "shape": list(shape), "dtype": dtype.str, "sha256": sha256(file)}


def check_new(folder: Path) -> None:
    """Refuse a folder that exists, whatever it holds.

    Raises:
        DataError: it exists, or cannot.
    """
    if exists(folder):
        raise DataError(f"{folder} exists; choose another folder")


def exists(path: Path) -> bool:
    """Whether there is a file or folder of this name.

    Raises:
        DataError: there can be none, or nobody may know.
    """
    try:
        return path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be used ({error.strerror}); choose another file or folder") from error


def write_once(folder: Path, kind: str, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> Path:
    """Write a data set of the cache, whose name tells its content, unless it is there already."""
    if not exists(folder):
        try:
            write(folder, kind, arrays, meta)
        except DataError:
            if not folder.exists():  # else another process wrote the same one first
                raise
    return folder


def read(folder: str | Path) -> Shards:
    """Map a data set and verify it.

    Raises:
        DataError: missing, partial, corrupt or foreign, or of a newer schema.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    with vouched(folder):
        arrays = {name: _read_array(folder, entry) for name, entry in meta["arrays"].items()}
        digests = "".join(entry["sha256"] for _, entry in sorted(meta["arrays"].items()))
        return Shards(folder, meta, arrays, hashlib.sha256(digests.encode()).hexdigest())


@contextlib.contextmanager
def vouched(folder: Path) -> Iterator[None]:
    """Where a data set's meta.json is relied on: what it lacks or has wrong becomes an error.

    Raises:
        DataError: it lacks something.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder / META} is damaged ({reason(error)}); delete the folder and prepare it again"
        ) from error


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    try:
        meta = files.parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no data set ({META} is missing); prepare it with `ridgeline data`") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({reason(error)}); delete the folder and prepare it again") from error
    ours = isinstance(meta, dict) and meta.get("format") == FORMAT
    if not ours or not meta.keys() >= REQUIRED or type(meta["schema"]) is not int:
        raise DataError(f"{folder} is not a ridgeline data set; prepare one with `ridgeline data`")
    if meta["schema"] != SCHEMA:  # there was none before the first
        cure = "upgrade ridgeline or prepare it again" if meta["schema"] > SCHEMA else "prepare it again"
        raise DataError(
            f"{folder} was written by ridgeline {meta['package']} (data schema {meta['schema']}, this version reads "
            f"{SCHEMA}); {cure}"
        )
    return meta


def _read_array(folder: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    file = folder / entry["file"]
    cure = "delete the folder and prepare it again"
    try:
        if sha256(file) != entry["sha256"]:
            raise DataError(f"{file} is corrupt (its checksum differs); {cure}")
        empty = 0 in entry["shape"]  # which cannot be mapped
        return np.load(file, mmap_mode=None if empty else "r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({reason(error)}); {cure}") from error
