"""A file is replaced whole or not at all; the cache's folder."""

import errno
import json
import os
import threading
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from ridgeline import files
from ridgeline.errors import ConfigError


def test_what_cannot_be_read_is_one_kind_of_error() -> None:
    assert files.parsed(b'{"a": [1]}') == {"a": [1]}
    assert files.parsed("a = [1]", tomllib.loads) == {"a": [1]}
    for text, loads in (("{", json.loads), ("[" * 100_000, json.loads), (f"a = {'[' * 10_000}", tomllib.loads)):
        with pytest.raises(ValueError, match=r"."):
            files.parsed(text, loads)


def test_replace_writes_text_and_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert files.replace(file, "ü\n") == file
    assert file.read_bytes() == "ü\n".encode()
    files.replace(file, b"\xff\x00")
    assert file.read_bytes() == b"\xff\x00"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("interruption", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["write", "rename"])
def test_an_interrupted_replacement_keeps_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException, place: str
) -> None:
    file = tmp_path / "a.json"
    files.replace(file, "old")

    def write_a_part(path: Path, data: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(data[:1])
        raise interruption

    def refuse(source: Path, target: Path) -> None:
        raise interruption

    if place == "write":
        monkeypatch.setattr(Path, "write_bytes", write_a_part)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(type(interruption)):
        files.replace(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_threads_that_replace_one_file_never_show_a_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "a"
    contents = [f"{digit}" * 100_000 for digit in range(4)]
    files.replace(file, contents[0])
    done, faults = threading.Event(), []

    def write(content: str) -> None:
        try:
            while not done.is_set():
                files.replace(file, content)
        except OSError as fault:
            faults.append(fault)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    seen = {file.read_text() for _ in range(200)}
    done.set()
    for writer in writers:
        writer.join()
    assert seen <= set(contents)
    assert faults == []
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(("module", "number"), [(os, "getpid"), (threading, "get_ident")])
def test_a_replacement_in_the_middle_of_another_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, number: str
) -> None:
    file, write = tmp_path / "a", Path.write_bytes

    def write_while_another_does(path: Path, data: bytes) -> int:
        count = write(path, data)
        monkeypatch.setattr(Path, "write_bytes", write)
        with monkeypatch.context() as another:
            another.setattr(module, number, lambda: 7)
            files.replace(file, "theirs")
        return count

    monkeypatch.setattr(Path, "write_bytes", write_while_another_does)
    files.replace(file, "ours")
    assert file.read_text() == "ours"
    assert os.listdir(tmp_path) == ["a"]


def test_the_cache_is_where_the_variable_says_or_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "kept"))
    assert files.cache() == tmp_path / "kept"
    monkeypatch.setenv("RIDGELINE_CACHE", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert files.cache() == tmp_path / ".cache" / "ridgeline"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set RIDGELINE_CACHE to a folder"):
        files.cache()
