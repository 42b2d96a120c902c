"""What the verb `ridgeline data` does: prepare data sets, and find one by name, file or folder.

A prepared data set is a folder. Without a folder of the user's choice it goes to the cache (see `files.cache`), in a
folder whose name holds a checksum of its content, so that preparing the same thing again finds it there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline import files
from ridgeline.data import games, shards, sources, text
from ridgeline.data.games import GameData
from ridgeline.data.text import TextData
from ridgeline.errors import DataError, nearest
from ridgeline.games.parallel import count_processes

NAMES = ("tinyshakespeare", "pystdlib", "boxing", "boxing-visible", "melee")


def prepare_text(source: str | Path, out: str | Path | None = None, kind: str = "auto") -> dict[str, Any]:
    """Prepare any text file.

    Args:
        source: the file.
        out: folder of the data set; None for the cache.
        kind: "bytes"; "characters" (UTF-8, the vocabulary is the text's own); "tokens" (uint16 numbers, nanoGPT's
            .bin); or "auto": tokens for *.bin, characters for UTF-8 of at most 256 different ones, else bytes.

    Returns:
        For JSON: name, path, kind, vocabulary, tokens, train, held_out, fingerprint.

    Raises:
        DataError: the file cannot be used so, or `out` exists.
    """
    if not str(source):
        raise DataError("the name of the text is empty; give a text file")
    file = Path(source)
    content = text.read_file(file)
    if kind == "auto":
        kind = text.guess_kind(file, content)
    if kind not in text.KINDS:
        raise DataError(nearest(kind, ("auto", *text.KINDS), "kind of text"))
    return _prepare(content, kind, name=file.name, source=str(file), out=out)  # type: ignore[arg-type]


def prepare_tinyshakespeare(out: str | Path | None = None, source: str | Path | None = None) -> dict[str, Any]:
    """Prepare tinyshakespeare by characters, fetched or from a file; see `prepare_text` for what it returns."""
    cached = _cached("tinyshakespeare", "characters", sources.TINYSHAKESPEARE_SHA256)
    if out is None and source is None and shards.exists(cached):
        return load_dataset(cached).summary()
    file = Path(source) if source else None
    return _prepare(
        sources.tinyshakespeare(file),
        "characters",
        name="tinyshakespeare",
        source=str(file or sources.TINYSHAKESPEARE_URL),
        out=out,
    )


def prepare_pystdlib(out: str | Path | None = None) -> dict[str, Any]:
    """Prepare the Python standard library by bytes; see `prepare_text` for what it returns."""
    return _prepare(sources.pystdlib(), "bytes", name="pystdlib", source=sources.pystdlib_source(), out=out)


def prepare_boxing(
    out: str | Path | None = None,
    source: str | Path | None = None,
    *,
    visible: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Prepare Boxing demonstrations; see `ridgeline.data.boxing.write` for the arguments and errors.

    Returns:
        For JSON: name, path, kind, game, games, held_out, frames, features, fingerprint.
    """
    from ridgeline.data import boxing

    folder = boxing.write(
        Path(out) if out else None,
        Path(source) if source else None,
        visible=visible,
        processes=processes,
        progress=progress,
    )
    return load_dataset(folder).summary()


def prepare_melee(
    source: str | Path,
    out: str | Path | None = None,
    *,
    buttons: int = 6,
    shoulder: bool = False,
    character: str | None = None,
    stage: str | None = None,
    min_version: str | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Prepare the Melee replays (.slp) of a folder and of those in it.

    Args:
        source: the folder.
        out: folder of the data set; None for `melee` in the cache, where `load_dataset("melee")` finds it.
        buttons: classes of the buttons: 5 (without L and R), 6, or 7 (with A and L together).
        shoulder: whether the analog shoulder is predicted too.
        character: name of the character whose players are imitated; None for all.
        stage: name of the only stage; None for all that tournaments allow.
        min_version: the lowest version of the replay format; None for the oldest that can be used.
        processes: replays that are read at a time; None for as many as there are processors.
        progress: called with the number of replays that are done with, and of all.

    Returns:
        For JSON: see `ridgeline.data.melee.prepare.prepare`.
    """
    from ridgeline.data.melee import prepare, take

    choice = take.choose(buttons=buttons, shoulder=shoulder, character=character, stage=stage, min_version=min_version)
    folder = Path(out) if out else files.cache() / prepare.NAME
    return prepare.prepare(Path(source), folder, choice, processes=count_processes(processes), progress=progress)


def load_dataset(name: str | Path) -> TextData | GameData:
    """Find a data set, and prepare it in the cache where that has to be done first.

    Args:
        name: one of NAMES, the folder of a data set, or a text file.

    Raises:
        DataError: there is none, or it cannot be used.
    """
    prepare: dict[str, Callable[[], dict[str, Any]]] = {
        "tinyshakespeare": prepare_tinyshakespeare,
        "pystdlib": prepare_pystdlib,
        "boxing": prepare_boxing,
        "boxing-visible": partial(prepare_boxing, visible=True),
    }
    if not str(name):
        raise DataError("the name of the data is empty; give a data set's name or folder, or a text file")
    path = Path(name)
    if str(name) == "melee" and not path.exists():
        path = files.cache() / "melee"
        if not shards.exists(path):
            raise DataError(
                "replays of Melee do not ship with the package; prepare yours with `ridgeline data melee FOLDER`"
            )
    elif str(name) in prepare:
        path = Path(prepare[str(name)]()["path"])
    elif shards.exists(path) and not path.is_dir():
        path = Path(prepare_text(path)["path"])
    elif not path.exists():
        if len(path.parts) > 1 or path.suffix:
            raise DataError(f"there is no file or folder {name}; give a data set's folder, a text file or a name")
        raise DataError(nearest(str(name), NAMES, "data set"))
    return _open(shards.read(path))


def _open(data: shards.Shards) -> TextData | GameData:
    match data.meta["kind"]:
        case "text":
            with shards.vouched(data.path):
                return text.open_text(data)
        case "games":
            with shards.vouched(data.path):
                return games.open_games(data)
        case kind:
            raise DataError(f"{data.path} holds data of an unknown kind, {kind!r}; upgrade ridgeline")


def _prepare(
    content: NDArray[np.uint8], kind: text.Kind, *, name: str, source: str, out: str | Path | None
) -> dict[str, Any]:
    folder = _cached(name, kind, hashlib.sha256(content.data).hexdigest()) if out is None else Path(out)
    if out is not None or not shards.exists(folder):
        text.write(folder, content, kind, name=name, source=source, once=out is None)
    return _open(shards.read(folder)).summary()


def _cached(name: str, kind: str, checksum: str) -> Path:
    return files.cache() / f"{name}-{kind}-{checksum[:16]}"
