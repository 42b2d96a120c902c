"""Stages: batch and context change on the way, the samples are those of the step's number, and a run can go on."""

import pytest
import torch

from ridgeline import checkpoint
from ridgeline.data.api import load_dataset
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.train import resume, state, train
from ridgeline.train.metrics import read_metrics
from ridgeline.train.settings import from_dict, override, to_dict
from ridgeline.train.stages import Course, Stage, stages_of, tokens_until

STAGES = ((0.25, 8, 4), (0.5, 2, 8))  # of 12 steps: 3 of 8 windows of 4, 3 of 2 windows of 8, 6 of 4 windows of 16


def test_counted(config, change):
    config = change(config, stages=STAGES)
    assert stages_of(config) == (Stage(3, 8, 4), Stage(6, 2, 8), Stage(12, 4, 16))
    assert [tokens_until(config, steps) for steps in (0, 2, 3, 4, 6, 12)] == [0, 64, 96, 112, 144, 528]
    assert from_dict(to_dict(config)) == config
    assert override(config, {"stages": [[0.5, 1, 2]]}).stages == ((0.5, 1, 2),)


def test_each_stage_has_its_windows(config, change):
    """Step 4 learns from samples 8 and 9 of the shuffle of windows of 8, step 6 from 24 to 27 of those of 16."""
    config = change(config, stages=STAGES)
    data = load_dataset(config.data)
    course, shapes = Course(config, data), []
    for step in range(12):
        course.enter(step)
        assert course.batches.position == step * course.stage.batch
        shapes.append(tuple(course.batches.next()["tokens"].shape))
    assert shapes == [(8, 4)] * 3 + [(2, 8)] * 3 + [(4, 16)] * 6
    plain = Course(change(config, stages=()), data)
    plain.batches.position = course.batches.position
    assert torch.equal(plain.batches.next()["tokens"], course.batches.next()["tokens"])


def _stopped(monkeypatch, config, step):
    """A run that was cut off when the checkpoint of a step was written."""
    write = state.Content.write

    def stopping(self, folder):
        write(self, folder)
        if self.meta["step"] == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(state.Content, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def test_run_counts_tokens_and_goes_on_from_any_checkpoint(config, change, monkeypatch):
    """Checkpoints before, at and behind the ends of stages give the weights of the run that never stopped."""
    config = change(config, stages=STAGES)
    whole = train(config)
    assert whole.progress.tokens == 528
    assert [record["tokens"] for record in read_metrics("run") if "loss" in record][2:5] == [96, 112, 128]
    expected = checkpoint.load("run/last").tensors
    for stop in (3, 4, 6):
        _stopped(monkeypatch, change(config, out=f"part-{stop}", checkpoint_interval=stop), stop)
        resume(f"part-{stop}")
        found = checkpoint.load(f"part-{stop}/last").tensors
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_length_is_fixed(config, change):
    train(change(config, stages=STAGES, steps=6))
    with pytest.raises(CheckpointError, match="6 steps, which cannot change"):
        resume("run", change(config, stages=STAGES, out="run"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stages": ((0.5, 4, 8),), "steps": None, "tokens": 64}, "set steps"),
        ({"stages": ((0.5, 4, 8), (0.5, 4, 8))}, "must rise"),
        ({"stages": ((1.0, 4, 8),)}, "must rise"),
        ({"stages": tuple((n / 9, 4, 8) for n in range(1, 9))}, "at most 7 stages"),
        ({"stages": ((0.5, 4, 32),)}, "context from 1 to 16"),
        ({"stages": ((0.5, 0, 8),)}, "needs a batch"),
        ({"stages": ((0.5, 3, 8),), "accumulation": 2}, "accumulation=2 divides"),
    ],
)
def test_bad_stages(config, change, settings, words):
    with pytest.raises(ConfigError, match=words):
        change(config, **settings)
