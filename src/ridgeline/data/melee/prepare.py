"""From a folder of replays to a data set, with a reason for every replay that is not in it."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.data import games, shards
from ridgeline.data.melee.store import Store
from ridgeline.data.melee.take import CONTEXT, Choice, Result, read
from ridgeline.errors import DataError, require
from ridgeline.games.melee.features import GROUPS, NUMBERS, describe
from ridgeline.games.parallel import LostError, run_parallel

SILENCE_SECONDS = 300.0  # that one replay may take
NAME = "melee"
NAMED = 3  # reasons in the sentence that says that too few games are left


class TooFewError(DataError):
    """Fewer games can be used than a data set needs.

    Attributes:
        report: what `prepare` would have returned, its path None.
    """

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


def prepare(
    source: Path,
    out: Path,
    choice: Choice,
    *,
    processes: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Read every replay below a folder and write them as a data set.

    A preparation that was interrupted goes on where it was, or at the first file that is new, gone or changed since.
    The result does not depend on that, nor on the number of processes.

    Args:
        source: the folder.
        out: the data set's folder, which must not exist.
        choice: which replays, and as what.
        processes: replays that are read at a time.
        progress: called with the number of replays that are done with, and of all.

    Returns:
        For JSON: path, games, frames, windows, frames_per_s, refused: a list of {file, reason}. A window is CONTEXT
        frames and the target of the last, from any start, as either player. frames_per_s counts from the moment the
        first replay is done, so from when the workers have started, to the end of writing.

    Raises:
        TooFewError: fewer than two games can be used.
        DataError: no replays, or a folder that cannot be written.
        MissingExtraError: the parser is not installed.
        WorkerError: a worker failed in a way that no replay is to blame for.
    """
    require("peppi_py", "melee")
    shards.check_new(out)
    files = _list(source)
    settings = {**dataclasses.asdict(choice), "features": describe(choice.encoding)}
    widths = {"categories": sum(columns for *_, columns in GROUPS), "numbers": NUMBERS}
    widths |= dict.fromkeys(("controller", "target"), len(choice.encoding.heads))
    store = Store(out, settings, widths, files)
    try:
        clock = _fill(store, files, choice, processes, progress or (lambda done, total: None))
        report = _report(store, files)
        if report["games"] < 2:
            store.discard()
            raise TooFewError(
                _too_few(source, report), {**report, "path": None, "frames_per_s": round(clock.rate(), 1)}
            )
        _seal(store, choice, source)
    finally:
        store.close()
    return {**report, "path": str(out), "frames_per_s": round(clock.rate(), 1)}


@dataclass
class _Clock:
    """Frames a second since the first replay was done."""

    started: float = field(default_factory=time.perf_counter)
    frames: int = 0
    first: bool = True

    def count(self, frames: int) -> None:
        if self.first:
            self.started, self.first = time.perf_counter(), False
        else:
            self.frames += frames

    def rate(self) -> float:
        return self.frames / (time.perf_counter() - self.started)


def _fill(
    store: Store, files: dict[str, Path], choice: Choice, processes: int, progress: Callable[[int, int], None]
) -> _Clock:
    """Read what the store does not know yet, and add it in the order of the files."""
    clock = _Clock()
    todo = list(files.items())[len(store.entries) :]  # those in the store are the first
    digests = {entry["digest"]: key for key, entry in store.entries.items() if entry["tables"]}
    tasks = [(str(file), choice) for _, file in todo]
    progress(len(files) - len(todo), len(files))
    results = _read_all(tasks, processes)
    waiting: dict[int, Result] = {}
    added = 0
    try:
        for index, result in results:
            clock.count(result.frames)
            waiting[index] = result
            while added in waiting:
                _add(store, digests, todo[added][0], waiting.pop(added))
                added += 1
            progress(len(files) - len(todo) + added, len(files))
    finally:
        results.close()
        store.commit()
    return clock


def _read_all(tasks: Sequence[tuple[str, Choice]], processes: int) -> Generator[tuple[int, Result], None, None]:
    """(index, result) of every task.

    A replay over which a process dies or hangs is tried again alone, since the machine may just have lacked memory, and
    refused if that happens again.
    """
    left = dict.fromkeys(range(len(tasks)))
    suspect: int | None = None
    while left:
        chosen = list(left) if suspect is None else [suspect]
        these, names = [tasks[index] for index in chosen], [tasks[index][0] for index in chosen]
        results = run_parallel(read, these, processes=processes, timeout=SILENCE_SECONDS, names=names)
        try:
            for place, result in results:
                del left[chosen[place]]
                yield chosen[place], result
            suspect = None
        except LostError as error:
            lost = chosen[error.task]
            if suspect is None:
                suspect = lost
            else:
                suspect = None
                del left[lost]
                yield lost, Result(f"the process that read it {error.how}")
        finally:
            results.close()


def _add(store: Store, digests: dict[str, str], key: str, result: Result) -> None:
    if result.reason is None and result.digest in digests:
        store.add(key, {"reason": "the same game as", "of": digests[result.digest]})
    elif result.reason is not None:
        store.add(key, {"reason": result.reason})
    else:
        digests[result.digest] = key
        entry = {"digest": result.digest, "frames": result.frames, "seats": list(result.seats)}
        store.add(key, entry, result.tables)


def _report(store: Store, files: dict[str, Path]) -> dict[str, Any]:
    refused = []
    for key, file in files.items():
        entry = store.entries[key]
        if "reason" in entry:
            twin = f" {_printable(files[entry['of']])}" if entry.get("of") in files else ""
            refused.append({"file": _printable(file), "reason": entry["reason"] + twin})
    taken = [entry for entry in store.entries.values() if entry["tables"]]
    return {
        "games": len(taken),
        "frames": sum(entry["frames"] for entry in taken),
        "windows": sum(rows + 1 - CONTEXT for rows in store.rows()),
        "refused": refused,
    }


def _seal(store: Store, choice: Choice, source: Path) -> None:
    taken = [entry for entry in store.entries.values() if entry["tables"]]
    provenance = [{"replay": replay, **seat} for replay, entry in enumerate(taken) for seat in entry["seats"]]
    held_out = set(games.split(len(taken), seed=0).tolist())
    tables = [index for index, origin in enumerate(provenance) if origin["replay"] in held_out]
    offsets = np.cumsum([0, *store.rows()], dtype=np.int64)
    meta = games.describe(
        name=NAME,
        game=NAME,
        heads=choice.encoding.heads,
        groups=GROUPS,
        features=describe(choice.encoding),
        provenance=provenance,
        offsets=offsets,
    )
    store.seal({"offsets": offsets, "held_out": np.array(tables, np.int64)}, meta)


def _list(source: Path) -> dict[str, Path]:
    """Every replay below a folder, in the order of their names, by what tells one state of a file from another.

    Raises:
        DataError: there are none.
    """
    try:
        if not source.is_dir():
            raise DataError(f"{source} is no folder; give the folder of the replays")
        found = sorted(file for file in source.rglob("*") if file.suffix.lower() == ".slp" and file.is_file())
        stats = [file.stat() for file in found]
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror}); give the folder of the replays") from error
    if not found:
        raise DataError(f"there are no replays (*.slp) in {source}; give the folder of the replays")
    names = [
        f"{file.relative_to(source)}\0{stat.st_size}\0{stat.st_mtime_ns}"
        for file, stat in zip(found, stats, strict=True)
    ]
    keys = [hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest() for name in names]
    return dict(zip(keys, found, strict=True))


def _printable(file: Path) -> str:
    """A file's name as it can be shown, also if it is no text."""
    return str(file).encode(errors="replace").decode()


def _too_few(source: Path, report: dict[str, Any]) -> str:
    reasons = Counter(entry["reason"] for entry in report["refused"]).most_common()
    named, others = reasons[:NAMED], reasons[NAMED:]
    why = [f"{count} × {reason}" for reason, count in named]
    if others:
        kinds = "another reason" if len(others) == 1 else f"{len(others)} other reasons"
        why.append(f"{sum(count for _, count in others)} for {kinds}, which --json lists")
    left = "one game" if report["games"] else "no game"
    refused = f" ({len(report['refused'])} refused: {'; '.join(why)})" if why else ""
    return (
        f"{left} in {source} can be learned from, two are needed to train and to hold one out{refused}; "
        "give other replays or change the choice"
    )
