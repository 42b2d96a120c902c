"""A data set on disk: one folder of memory-mapped arrays and a meta.json that vouches for them.

    FOLDER/meta.json    format, schema, kind, package, name, source, and what the kind needs (vocabulary, games …);
                        for every array its file, shape, dtype and sha256
    FOLDER/NAME.npy     one array

The folder is written aside and renamed, so one that exists under its name is whole. Nothing is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ridgeline
from ridgeline.checkpoint import sha256
from ridgeline.errors import DataError

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
    if folder.exists():
        raise DataError(f"{folder} exists; delete it or choose another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}; choose another folder") from error
    try:
        entries = {name: _write_array(aside, name, array) for name, array in arrays.items()}
        head = {"format": FORMAT, "schema": SCHEMA, "kind": kind, "package": ridgeline.__version__}
        with (aside / META).open("w", encoding="utf-8") as stream:
            json.dump(head | dict(meta) | {"arrays": entries}, stream, indent=1, ensure_ascii=False)
            stream.flush()
            os.fsync(stream.fileno())
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError as error:
        if folder.exists():
            raise DataError(f"{folder} exists; delete it or choose another folder") from error
        raise DataError(f"cannot write {folder}: {error.strerror}; free space or choose another folder") from error
    finally:
        if aside.exists():
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def write_once(folder: Path, kind: str, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> Path:
    """Write a data set of the cache, whose name tells its content, unless it is there already."""
    if not folder.exists():
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
    arrays = {name: _read_array(folder, entry) for name, entry in meta["arrays"].items()}
    digests = "".join(entry["sha256"] for _, entry in sorted(meta["arrays"].items()))
    return Shards(folder, meta, arrays, hashlib.sha256(digests.encode()).hexdigest())


def is_data(folder: Path) -> bool:
    """Whether a folder claims to be a data set."""
    return (folder / META).is_file()


def _write_array(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    file = folder / f"{name}.npy"
    with file.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())
    return {"file": file.name, "shape": list(array.shape), "dtype": array.dtype.str, "sha256": sha256(file)}


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no data set ({META} is missing); prepare it with `ridgeline data`") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({error}); delete the folder and prepare it again") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not meta.keys() >= REQUIRED:
        raise DataError(f"{folder} is not a ridgeline data set; prepare one with `ridgeline data`")
    if meta["schema"] > SCHEMA:
        raise DataError(
            f"{folder} was written by ridgeline {meta['package']} (data schema {meta['schema']}, this version reads "
            f"{SCHEMA}); upgrade ridgeline or prepare it again"
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
        raise DataError(f"{file} cannot be read ({error}); {cure}") from error
