"""What a contender's process does with its commands."""

from __future__ import annotations

import pytest
import torch

from ridgeline.bench import worker as module
from ridgeline.bench.worker import Worker


@pytest.fixture
def worker():
    made = Worker()
    made.answer(
        {
            "build": {
                "workload_args": {"name": "gpt2-c256", "batch": 1, "context": 8, "precision": "fp32"},
                "contender": "eager",
                "device": "cpu",
                "warm_s": 0.0,
                "alone": True,
            }
        }
    )
    return made


def test_a_turn_is_as_long_as_it_must_be(worker, monkeypatch):
    counts = []

    def times(step, count, device):
        counts.append(count)
        return [2.0] * count

    monkeypatch.setattr(module, "time_steps", times)
    assert len(worker.answer({"time": 3, "at_least_s": 0.0})["times_ms"]) == 3
    assert len(worker.answer({"time": 3, "at_least_s": 0.1})["times_ms"]) == 50
    assert counts == [1, module.SETTLE - 1, 3, 1, module.SETTLE - 1, 50]
    counts.clear()
    monkeypatch.setattr(module, "SHORT_MS", 1.0)  # a long step needs no others to settle
    worker.answer({"time": 3, "at_least_s": 0.0})
    assert counts == [1, 3]


def test_phases_are_those_of_the_step(worker):
    assert list(worker.answer({"phases": 1})["phases_ms"]) == ["forward", "backward", "optimizer"]


def test_steps_train(worker):
    before = [p.clone() for p in worker.train.model.parameters()]
    worker.answer({"time": 2, "at_least_s": 0.0})
    assert not all(torch.equal(a, b) for a, b in zip(before, worker.train.model.parameters(), strict=True))
