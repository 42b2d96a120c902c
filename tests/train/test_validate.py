"""Held-out losses: captured or not, over all windows or some, with weights that change between validations."""

import pytest
import torch

from ridgeline.data.api import load_dataset
from ridgeline.data.loader import Batches, Validation
from ridgeline.engine import TrainStep
from ridgeline.errors import UnsupportedError
from ridgeline.train.engines import build_model
from ridgeline.train.resolve import resolve
from ridgeline.train.validate import Evaluation

CPU = torch.device("cpu")


class Recorder:
    """A capture that runs its programs, and counts them."""

    def __init__(self):
        self.programs = self.replays = 0

    def __call__(self, program):
        self.programs += 1

        def replay():
            self.replays += 1
            program()

        return replay


@pytest.fixture
def made(config):
    data = load_dataset(config.data)
    config = resolve(config, data)
    model, capture = build_model(config), Recorder()
    step = TrainStep(model, optimizer=config.optimizer, steps=12, precision="bf16", capture=capture)
    batches = Batches(data, config.window, batch=config.batch)
    return step, batches, Validation(data, config.window, batch=config.batch), capture


def test_a_captured_validation_is_the_one_call_by_call(made):
    step, batches, validation, capture = made
    captured, plain = Evaluation(step, validation, CPU), Evaluation(step, validation, CPU, capture=False)
    step(batches.next())
    before, replays = captured(), capture.replays
    assert before == plain()
    assert capture.programs == 2  # the step's, and one for all batches of the validation
    step(batches.next())
    replays = capture.replays
    assert captured() == plain() != before
    assert capture.programs == 2
    assert capture.replays == replays + len(validation)
    assert step.model.training


def test_some_windows_are_the_same_whatever_the_batch(made, config):
    step, _, validation, capture = made
    found = []
    for batch in (1, 4, 9):
        some = Validation(load_dataset(config.data), config.window, batch=batch, windows=8)
        found.append(Evaluation(step, some, CPU)())
    assert found[1:] == pytest.approx(found[:2], rel=1e-5)
    assert found[0] != pytest.approx(Evaluation(step, validation, CPU)(), rel=1e-4)
    assert capture.replays == 8 + 2 + 1 + len(validation)


def test_a_step_that_is_not_captured_captures_nothing(made, config):
    step, *_ = made
    plain = TrainStep(step.model, optimizer=config.optimizer, steps=12, precision="fp32", capture=False)
    with pytest.raises(UnsupportedError, match="this step is not captured"):
        plain.captured(lambda: None)
