"""Checkpoints: one folder of safetensors and JSON that is whole at every moment.

    FOLDER/checkpoint.json              format, schema, versions, the tensor file's name and sha256, `meta`
    FOLDER/tensors-<sha256>.safetensors every tensor: model, optimiser, generators

`save` writes the tensors under a new name, then replaces checkpoint.json in one rename: that rename is the moment at
which the new checkpoint takes the old one's place, so a process killed anywhere leaves the old or the new one whole.
Saving to the same folder again (a run keeps `last` and `best`) removes the tensor file that nothing names any more.

By convention `meta` holds, as far as a run has them:

    preset, config      name and resolved configuration, as nested dicts
    window              the WindowSpec of the data, as a dict
    vocabulary          the text's vocabulary, as a dict; or
    features            name and version of the game's features
    step, tokens, seconds, val_loss
    data                state of the batches (position in the data)

and the tensors are grouped by prefix: `model.…`, `optimizer.…`, `rng.…`; see `join` and `Checkpoint.group`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import ridgeline
from ridgeline import files
from ridgeline.errors import CheckpointError, reason

FORMAT = "ridgeline-checkpoint"
SCHEMA = 1
HEADER = "checkpoint.json"
ASIDE = "partial"
REQUIRED = {"schema", "package", "tensors", "meta"}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What `load` returns.

    Attributes:
        path: the folder it came from.
        tensors: name → tensor on the CPU, in the dtype in which it was saved.
        meta: the dict given to `save`, after a trip through JSON (tuples have become lists).
        package: version of ridgeline that wrote it.
    """

    path: Path
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    package: str

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors called `name.…`, without that prefix."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}


def join(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One dict of tensors from named groups: `join(model={"w": …})` gives `{"model.w": …}`."""
    return {f"{group}.{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def save(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write a checkpoint, replacing the one in `path` in a single step.

    Args:
        path: the checkpoint's folder; made when missing.
        tensors: name → tensor of any device, dtype and shape; shared storage is written once a name.
        meta: anything that JSON can hold.

    Raises:
        CheckpointError: the folder cannot be written or holds something else; what was there stays.
    """
    folder = Path(path)
    try:
        return _save(folder, tensors, meta)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {reason(error)}; free space or choose another folder"
        ) from error


def _save(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in folder.iterdir()]
    foreign = [name for name in names if name != ASIDE and not name.startswith("tensors-")]
    if foreign and not (folder / HEADER).exists():
        raise CheckpointError(f"{folder} holds other files ({min(foreign)}); choose an empty or new folder")
    aside = folder / ASIDE  # a folder, because the writer makes a temporary file of its own beside the one it writes
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    written = aside / "tensors.safetensors"
    # a copy of each tensor: safetensors refuses views that overlap (tied weights), and training may go on meanwhile
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(copies, written)
    _sync(written)
    digest = sha256(written)
    target = folder / f"tensors-{digest[:16]}.safetensors"
    os.replace(written, target)
    header = {
        "format": FORMAT,
        "schema": SCHEMA,
        "package": ridgeline.__version__,
        "torch": torch.__version__,
        "tensors": {"file": target.name, "sha256": digest, "bytes": target.stat().st_size},
        "meta": dict(meta),
    }
    partial = aside / HEADER
    partial.write_text(json.dumps(header, indent=1), encoding="utf-8")
    _sync(partial)
    _sync(folder)  # the tensor file's name must be on disk before the header that names it
    os.replace(partial, folder / HEADER)
    _sync(folder)
    aside.rmdir()
    for file in folder.glob("tensors-*.safetensors"):
        if file != target:
            file.unlink()
    return folder


def load(path: str | Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: missing, corrupt, foreign, or written by a newer version.
    """
    folder = Path(path)
    header = _read_header(folder)
    entry = header["tensors"]
    file = folder / entry["file"]
    try:
        intact = file.stat().st_size == entry["bytes"] and sha256(file) == entry["sha256"]
        tensors = safetensors.torch.load_file(file) if intact else {}
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({reason(error)}); use another checkpoint of the run") from error
    if not intact:
        raise CheckpointError(f"{file} is corrupt (its checksum differs); use another checkpoint of the run")
    return Checkpoint(path=folder, tensors=tensors, meta=header["meta"], package=header["package"])


def find(path: str | Path, prefer: str = "best") -> Path:
    """The checkpoint folder that `path` means: itself, or `best` or `last` inside a run's folder.

    Args:
        path: a checkpoint's folder or a run's folder.
        prefer: which of a run's two is wanted; the other is taken where the run has not written that one yet.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    for candidate in (folder, folder / prefer, folder / "best", folder / "last"):
        if (candidate / HEADER).is_file():
            return candidate
    state = "holds no checkpoint" if folder.exists() else "does not exist"
    raise CheckpointError(f"{folder} {state}; give the folder of a run or of a checkpoint (it holds {HEADER})")


def digest(path: str | Path) -> str:
    """The checksum of a checkpoint's tensors, as its header gives it: other tensors have another.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it holds none, or one that is damaged or foreign.
    """
    return str(_read_header(Path(path))["tensors"]["sha256"])


def meta(path: str | Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, which are not read.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: it holds none, or one that is damaged or foreign.
    """
    return dict(_read_header(Path(path))["meta"])


def check_config(saved: object, wanted: object, what: str = "config") -> None:
    """Compare a checkpoint's configuration with the one asked for.

    Args:
        saved: from the checkpoint's meta, a dict.
        wanted: a dict or a dataclass.
        what: the name of the thing in the message.

    Raises:
        CheckpointError: they differ; says in which field, what was expected and what the checkpoint has.
    """
    shown = differences(saved, wanted)
    if shown:
        raise CheckpointError(f"the checkpoint is of another {what}: {shown}; change these or use another checkpoint")


def differences(saved: object, wanted: object) -> str:
    """In which fields two configurations differ, in words that name three of them at most; "" where they do not."""
    found = _differences(_plain(saved), _plain(wanted), "")
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def sha256(file: Path) -> str:
    """The checksum of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_header(folder: Path) -> dict[str, Any]:
    file = folder / HEADER
    try:
        header = files.parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no checkpoint ({HEADER} is missing); give another folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({reason(error)}); use another checkpoint of the run") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or not header.keys() >= REQUIRED:
        raise CheckpointError(f"{folder} is not a ridgeline checkpoint; give the folder of one")
    if not _well_formed(header):
        raise CheckpointError(f"{file} is damaged; use another checkpoint of the run")
    if header["schema"] > SCHEMA:
        raise CheckpointError(
            f"{folder} was written by ridgeline {header['package']} (checkpoint schema {header['schema']}, this "
            f"version reads {SCHEMA}); upgrade ridgeline"
        )
    return header


def _well_formed(header: Mapping[str, Any]) -> bool:
    """Whether a header's fields are of their kinds and the tensors lie in the checkpoint's own folder."""
    schema, entry = header["schema"], header["tensors"]
    if type(schema) is not int or not isinstance(header["package"], str) or not isinstance(header["meta"], dict):
        return False
    if schema < 1:
        return False
    if schema > SCHEMA:
        return True  # of a later form, which is for a later version to judge
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        return False
    file, digest = entry.get("file"), entry.get("sha256")
    return isinstance(file, str) and isinstance(digest, str) and Path(file).name == file and file not in ("", "..")


def _plain(value: object) -> Any:
    """The value after a trip through JSON, so that tuples equal lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value))


def _differences(saved: Any, wanted: Any, path: str) -> list[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        keys = sorted(saved.keys() | wanted.keys())
        pairs = [(f"{path}.{key}" if path else key, saved.get(key), wanted.get(key)) for key in keys]
    elif isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(saved, wanted, strict=True))]
    else:
        return [] if saved == wanted else [f"{path} expected {wanted!r}, got {saved!r}"]
    return [line for name, a, b in pairs for line in _differences(a, b, name)]
