import dataclasses
import random

import pytest
import torch

from ridgeline.data.window import WindowSpec
from ridgeline.models import DecoderConfig, LanguageConfig
from ridgeline.optim import OptimizerConfig
from ridgeline.train import TrainConfig


@pytest.fixture(autouse=True)
def _own_cache_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


@pytest.fixture
def text(tmp_path):
    """A text of 4,000 characters in which the next one can partly be foreseen."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(6)]
    file = tmp_path / "words.txt"
    file.write_text(" ".join(draw.choices(words, k=1200))[:4000])
    return file


@pytest.fixture
def config(text):
    """A run of 12 steps that takes a moment, with dropout, so that random state matters."""
    decoder = DecoderConfig(layers=1, width=16, heads=2, context=16, dropout=0.1)
    return TrainConfig(
        preset="tiny",
        model=LanguageConfig(decoder=decoder, vocabulary=9),
        data=str(text),
        window=WindowSpec(context=16),
        batch=4,
        optimizer=OptimizerConfig(lr=2e-2, floor=2e-3, warmup=3),
        steps=12,
        eval_interval=5,
        checkpoint_interval=4,
        device="cpu",
        out="run",
    )


@pytest.fixture
def change():
    return dataclasses.replace
