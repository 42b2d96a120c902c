"""Data sets by name, file or folder."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ridgeline.data import api, sources
from ridgeline.data.loader import Validation
from ridgeline.data.window import WindowSpec
from ridgeline.errors import ConfigError, DataError

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 5


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shakespeare():
    folder = os.environ.get("RIDGELINE_TEST_DATA")
    if not folder:
        pytest.skip("RIDGELINE_TEST_DATA is not set")
    return Path(folder) / "tinyshakespeare.txt"


def test_a_file_is_prepared_once_and_found_again(tmp_path, cache):
    (tmp_path / "a.txt").write_text(TEXT)
    data = api.load_dataset(tmp_path / "a.txt")
    assert data.vocabulary.kind == "characters"
    assert data.vocabulary.decode(data.tokens.tolist()) == TEXT
    assert [entry.name for entry in tmp_path.iterdir() if entry != cache] == ["a.txt"]  # nothing beside the user's file
    stamp = data.path.stat().st_mtime_ns
    assert api.load_dataset(str(tmp_path / "a.txt")).path.stat().st_mtime_ns == stamp
    (tmp_path / "a.txt").write_text(TEXT.upper())
    assert api.load_dataset(tmp_path / "a.txt").fingerprint != data.fingerprint


def test_a_text_can_be_prepared_in_each_way(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    for kind, vocabulary in (("auto", len(set(TEXT))), ("characters", len(set(TEXT))), ("bytes", 256)):
        result = api.prepare_text(tmp_path / "a.txt", tmp_path / kind, kind)
        assert json.loads(json.dumps(result)) == result
        assert (result["vocabulary"], result["train"], result["held_out"]) == (vocabulary, 333, 37)
        assert api.load_dataset(tmp_path / kind).summary() == result
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    assert api.load_dataset(tmp_path / "train.bin").vocabulary.kind == "tokens"


def test_an_existing_folder_stays(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="out exists; choose another folder"):
        api.prepare_text(tmp_path / "a.txt", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinyshakespear", "unknown data set 'tinyshakespear'; did you mean tinyshakespeare"),
        ("boxng", "did you mean boxing"),
        ("data/missing.txt", "there is no file or folder data/missing.txt; give a data set's folder, a text file"),
        ("missing.bin", "there is no file or folder missing.bin"),
    ],
)
def test_mistyped_names_are_answered(name, message):
    with pytest.raises(DataError, match=message):
        api.load_dataset(name)


def test_mistyped_kinds_and_foreign_folders_are_answered(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(DataError, match="unknown kind of text 'byte'; did you mean bytes"):
        api.prepare_text(tmp_path / "a.txt", kind="byte")
    with pytest.raises(DataError, match="is no data set"):
        api.load_dataset(tmp_path)


def test_tinyshakespeare_is_checked_split_and_cached(shakespeare, monkeypatch, cache):
    monkeypatch.setattr(sources, "TINYSHAKESPEARE_URL", shakespeare.resolve().as_uri())
    result = api.prepare_tinyshakespeare()
    assert (result["vocabulary"], result["train"], result["held_out"]) == (65, 1_003_854, 111_540)
    monkeypatch.setattr(sources, "TINYSHAKESPEARE_URL", "file:///nowhere")
    data = api.load_dataset("tinyshakespeare")  # from the cache
    assert data.summary() == result
    assert Validation(data, WindowSpec(context=256), batch=32).positions == 111_540
    given = api.prepare_tinyshakespeare(cache / "given", shakespeare)
    assert given["fingerprint"] == result["fingerprint"]


def test_tinyshakespeare_out_of_reach_names_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "TINYSHAKESPEARE_URL", (tmp_path / "gone").as_uri())
    with pytest.raises(DataError, match=r"cannot fetch .*give the text as a file, or train on pystdlib"):
        api.load_dataset("tinyshakespeare")


def test_another_text_is_not_taken_for_tinyshakespeare(tmp_path, monkeypatch, cache):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(sources, "TINYSHAKESPEARE_URL", (tmp_path / "a.txt").as_uri())
    for source in (None, tmp_path / "a.txt"):
        with pytest.raises(DataError, match=r"is not tinyshakespeare \(sha256 .*, expected 86c4e6aa9db7c042…\)"):
            api.prepare_tinyshakespeare(source=source)
    assert not cache.exists()


def test_the_standard_library_is_a_text_of_bytes(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "json/notes.txt", "test/c.py", "site-packages/d.py", "unittest/test/e.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 10)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(library))
    data = api.load_dataset("pystdlib")
    content = data.vocabulary.decode(data.tokens.tolist())
    assert sorted(set(content.splitlines())) == ["# a.py", "# json/b.py"]
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"no library source in .*; give a text file instead"):
        api.load_dataset("pystdlib")


def test_the_own_standard_library_is_large_and_the_same_twice():
    first, second = sources.pystdlib(), sources.pystdlib()
    assert len(first) > 5_000_000
    assert (first == second).all()
    assert Path(os.__file__).read_bytes() in first.tobytes()
    assert sys.version.split()[0] in sources.pystdlib_source()


def test_no_name_and_impossible_ones_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    too_long = "x" * 300
    for call, words in (
        (lambda: api.load_dataset(""), "the name of the data is empty; give"),
        (lambda: api.prepare_text(""), "the name of the text is empty; give"),
        (lambda: api.load_dataset(too_long), "File name too long"),
        (lambda: api.prepare_text(too_long), "File name too long"),
        (lambda: api.prepare_text(tmp_path / "a.txt", tmp_path / too_long), "File name too long"),
        (lambda: api.prepare_text(tmp_path), "is a folder; give a text file"),
    ):
        with pytest.raises(DataError, match=words):
            call()


@pytest.mark.parametrize(
    "change", [{"vocabulary": 3}, {"vocabulary": {}}, {"train": "x"}, {"train": 0}, {"kind": "games"}, {"name": None}]
)
def test_a_damaged_description_is_refused(tmp_path, change):
    (tmp_path / "a.txt").write_text(TEXT)
    meta = Path(api.prepare_text(tmp_path / "a.txt", tmp_path / "out")["path"]) / "meta.json"
    content = json.loads(meta.read_text()) | change
    meta.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    with pytest.raises(DataError, match=r"meta.json is damaged .*; delete the folder and prepare it again"):
        api.load_dataset(tmp_path / "out")


def test_a_cache_that_cannot_be_names_its_variable_or_reason(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "file").write_text("")
    for folder in ("x" * 300, str(tmp_path / "file" / "in")):
        monkeypatch.setenv("RIDGELINE_CACHE", folder)
        with pytest.raises(DataError, match=r"; choose another f(older|ile or folder)$"):
            api.load_dataset(tmp_path / "a.txt")
    monkeypatch.setenv("RIDGELINE_CACHE", "x" * 300)
    with pytest.raises(DataError, match="File name too long"):
        api.load_dataset("tinyshakespeare")
    monkeypatch.delenv("RIDGELINE_CACHE")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    with pytest.raises(ConfigError, match=r"no home folder .* set RIDGELINE_CACHE to a folder"):
        api.load_dataset(tmp_path / "a.txt")
