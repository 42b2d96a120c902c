"""What a validation says of each head."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ridgeline.data import games
from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Validation
from ridgeline.engine import Replicas, TrainStep
from ridgeline.games import game, stick_points
from ridgeline.games.melee.controls import C_STICK, MAIN, Encoding
from ridgeline.games.melee.features import GROUPS, describe, game_table
from ridgeline.games.melee.frames import FRAME
from ridgeline.models import Head
from ridgeline.presets import preset
from ridgeline.train import train
from ridgeline.train.by_head import HeadScores
from ridgeline.train.engines import build_model
from ridgeline.train.metrics import read_metrics
from ridgeline.train.resolve import resolve
from ridgeline.train.settings import override
from ridgeline.train.validate import Evaluation


def test_sums_over_batches_are_means_over_what_counts():
    heads = (Head(name="main", classes=4), Head(name="fire", classes=2))
    points = {"main": np.array([(0, 0), (1, 0), (0, 1), (-1, 0)], np.float32)}
    scores = HeadScores(heads, points, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    seen, total = [], []
    for size in (3, 5):
        logits = {head.name: torch.randn(size, 7, head.classes, generator=generator) for head in heads}
        targets = torch.stack([torch.randint(head.classes, (size, 7), generator=generator) for head in heads], -1)
        targets[0, 2:] = -100
        loss = scores.take(logits, targets)
        expected = sum(
            F.cross_entropy(logits[head.name].flatten(0, 1), targets[..., index].flatten(), ignore_index=-100)
            for index, head in enumerate(heads)
        )
        assert loss.item() == pytest.approx(expected.item())
        seen.append((logits, targets))
    for logits, targets in seen:
        for b in range(len(targets)):
            for t in range(7):
                if targets[b, t, 0] < 0:
                    continue
                row = []
                for index, head in enumerate(heads):
                    p = logits[head.name][b, t].double().softmax(-1)
                    row += [-p[targets[b, t, index]].log().item(), float(p.argmax() == targets[b, t, index])]
                best = int(logits["main"][b, t].argmax())
                row.append(float(np.linalg.norm(points["main"][best] - points["main"][targets[b, t, 0]])))
                total.append(row)
    means = np.mean(total, axis=0)
    names = ["val_loss.main", "val_accuracy.main", "val_loss.fire", "val_accuracy.fire", "val_stick_error.main"]
    values = scores.values(Replicas())
    assert set(values) == set(names)
    assert [values[name] for name in names] == pytest.approx(means.tolist())


def test_positions_of_sticks():
    assert game("boxing").points["direction"].shape == (9, 2)
    melee = stick_points("melee")
    assert melee["main"].shape == (len(MAIN), 2)
    assert melee["c"].shape == (len(C_STICK), 2)
    assert np.abs(melee["main"]).max() == 1
    assert stick_points("a game of one's own") == {}


@pytest.fixture
def melee(tmp_path):
    """Three games in which somebody presses at random."""
    draw, encoding, tables = np.random.default_rng(0), Encoding(), []
    for _ in range(3):
        frames = np.zeros(60, FRAME)
        frames["players"]["controller"]["buttons"] = draw.integers(0, 3, (60, 2))
        frames["players"]["controller"]["main"] = draw.integers(-80, 81, (60, 2, 2))
        tables.append(game_table(frames, 0, encoding))
    games.write(
        tmp_path / "melee",
        tables,
        name="melee",
        game="melee",
        heads=encoding.heads,
        groups=GROUPS,
        features=describe(encoding),
        provenance=[{}] * 3,
    )
    return tmp_path / "melee"


@pytest.fixture
def config(melee):
    tiny = {"layers": 1, "width": 16, "heads": 2, "context": 8, "position_table": 8}
    values = {
        "model": {"decoder": tiny},
        "window": {"context": 8},
        "batch": 4,
        "steps": 3,
        "data": str(melee),
        "device": "cpu",
        "out": "run",
    }
    return override(preset("hal-20m"), values)


def test_captured_they_are_those_call_by_call(config):
    data = load_dataset(config.data)
    config = resolve(config, data)
    step = TrainStep(
        build_model(config), optimizer=config.optimizer, steps=3, precision="bf16", capture=lambda run: run
    )
    validation, found = Validation(data, config.window, batch=4), []
    for capture in (True, False):
        scores = HeadScores(config.model.heads, stick_points("melee"), torch.device("cpu"))
        loss = Evaluation(step, validation, torch.device("cpu"), capture=capture)(scores)
        found.append((loss, scores.values(Replicas())))
    assert len(validation) > 1
    assert found[0] == found[1]


def test_a_run_keeps_them(config):
    train(config)
    validation = [record for record in read_metrics("run") if "val_loss" in record][-1]
    parts = [validation[f"val_loss.{name}"] for name in ("c", "main", "buttons")]
    assert sum(parts) == pytest.approx(validation["val_loss"], rel=1e-5)
    assert 0 <= validation["val_accuracy.buttons"] <= 1
    assert 0 < validation["val_stick_error.main"] <= 2
    assert "val_stick_error.buttons" not in validation
