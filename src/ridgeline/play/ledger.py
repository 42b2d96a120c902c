"""Finished games on disk, one JSON line each, so that none is played twice and none is lost with its process."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ridgeline import files
from ridgeline.errors import RidgelineError
from ridgeline.models.reader import read
from ridgeline.play.rollout import GameResult

Key = Mapping[str, Any]
_RESULT = {field.name for field in fields(GameResult)}


class Ledger:
    """A file of games. What is in it is read once, at the start; lines are appended and flushed at once.

    Several processes may keep games in one file; each knows those that were there when it last read or wrote.

    Args:
        file: made where there is none. A last line that an interruption cut off does not count.

    Raises:
        RidgelineError: the file holds something else, or cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._games: dict[tuple[str, int, int], GameResult] = {}
        self._length = 0  # of its whole lines, in bytes
        self._lines = 0
        try:
            there = file.exists()
            content = file.read_bytes() if there else b""
        except OSError as error:
            raise RidgelineError(f"{file} cannot be read ({error.strerror}); choose another file of games") from error
        try:  # before a game is played that could not be kept
            file.open("r+b" if there else "wb").close()
        except OSError as error:
            raise _cannot_write(file, error) from error
        self._take(content)

    def _take(self, content: bytes) -> None:
        """Note the games of what follows the lines that are known."""
        for line in content.splitlines(keepends=True):
            whole = line.endswith(b"\n")
            if not whole and _cut_off(line):
                break
            try:
                values = files.parsed(line)
                result = read(GameResult, {name: values.pop(name) for name in _RESULT & values.keys()})
            except (ValueError, TypeError, AttributeError) as error:
                where = f"line {self._lines + 1} of {self.file}"
                raise RidgelineError(f"{where} is no game ({error}); choose another file") from error
            if not whole:
                break
            self._games[_word(values), result.level, result.seed] = result
            self._length += len(line)
            self._lines += 1

    def find(self, key: Key, level: int, seeds: Iterable[int]) -> dict[int, GameResult]:
        """Those of the games of these seeds at a level that are there, by seed."""
        word = _word(key)
        return {seed: self._games[word, level, seed] for seed in seeds if (word, level, seed) in self._games}

    def add(self, key: Key, result: GameResult) -> None:
        """Keep a game.

        Args:
            key: what it depends on beside seed and level, as JSON can hold it.
            result: how it ended.

        Raises:
            RidgelineError: the file cannot be written.
        """
        line = json.dumps({**key, **asdict(result)}).encode() + b"\n"
        try:
            with self.file.open("r+b" if self.file.exists() else "wb+") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)  # until it is closed
                if stream.seek(0, os.SEEK_END) < self._length:  # somebody emptied or deleted it
                    self._length = self._lines = 0
                stream.seek(self._length)
                self._take(stream.read())  # what another process has added
                stream.seek(self._length)  # over what was left of a line
                stream.write(line)
                stream.truncate()
        except OSError as error:
            raise _cannot_write(self.file, error) from error
        self._length += len(line)
        self._lines += 1
        self._games[_word(key), result.level, result.seed] = result


def _cut_off(line: bytes) -> bool:
    """Whether a line without an end is the beginning of a game, and not of a file that is somebody else's."""
    if not line.startswith(b'{"'):
        return False
    try:
        files.parsed(line)
    except ValueError:
        return True
    return False


def _cannot_write(file: Path, error: OSError) -> RidgelineError:
    return RidgelineError(f"cannot write {file}: {error.strerror}; choose another file of games")


def _word(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
