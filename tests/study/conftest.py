"""Fixtures of the studies' tests."""

import pytest

from ridgeline.data import api
from ridgeline.games.boxing import archive


@pytest.fixture(scope="session")
def few_games(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    few = sorted(archive.load(), key=lambda game: len(game.labels))[:3]
    api.prepare_boxing(folder / "set", archive.save(folder / "few.xz", few), processes=1)
    return api.load_dataset(folder / "set")
