"""Replays, and what is prepared from them, for the tests of data."""

import shutil

import pytest

from data import melee_helpers as replays
from data.melee_helpers import variant
from ridgeline.data.api import load_dataset, prepare_melee


@pytest.fixture(scope="session")
def replay_folder(tmp_path_factory):
    """Five games, and three that are refused: the same game twice, one that is damaged, one that is too short."""
    made = tmp_path_factory.mktemp("replays")
    for file in (replays.SCRIPTED, replays.ROLLBACK, replays.FOX_DITTO, replays.CPU):
        shutil.copy(file, made / file.name)
    (made / "deeper").mkdir()
    shutil.copy(replays.SHORT, made / "deeper" / "a.SLP")
    (made / "deeper" / "b.slp").write_bytes(
        variant(replays.SHORT, start={replays.NAMES: b"MR SECRET", replays.CODES: b"SECR"})
    )
    shutil.copy(replays.TRUNCATED, made)
    shutil.copy(replays.TINY, made)
    (made / "notes.txt").write_text("no replay")
    return made


@pytest.fixture(scope="session")
def prepared(replay_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "melee"
    return prepare_melee(replay_folder, out, processes=2), load_dataset(out)
