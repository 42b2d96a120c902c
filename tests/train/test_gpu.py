"""Training on a card: every engine trains, validates, and goes on from its own checkpoint."""

import io

import pytest
import torch
from rich.console import Console

from ridgeline import checkpoint
from ridgeline.train import resume, train
from ridgeline.train.config import ENGINES
from ridgeline.train.metrics import read_metrics
from ridgeline.train.settings import override
from ridgeline.train.validate import Evaluation

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_card(config):
    shape = {"layers": 2, "width": 128, "heads": 4, "context": 64, "dropout": 0.0}
    changes = {"model": {"decoder": shape}, "window": {"context": 64}, "batch": 8, "device": "cuda", "steps": 30}
    calm = {"lr": 2e-3, "floor": 2e-4}  # at ten times the rate a rounding in bf16 is a tenth of a nat 30 steps later
    return override(config, {**changes, "optimizer": calm, "eval_interval": 15, "precision": "bf16"})


def losses(folder):
    return torch.tensor([record["loss"] for record in read_metrics(folder) if "loss" in record])


ALL = [pytest.param(name, marks=pytest.mark.slow if engine.compile else ()) for name, engine in ENGINES.items()]


@pytest.mark.parametrize("engine", ALL)
def test_every_engine_learns_as_eager_does(on_card, engine):
    train(override(on_card, {"engine": "eager", "precision": "fp32", "out": "exact"}))
    result = train(override(on_card, {"engine": engine}))
    assert (losses("run") - losses("exact")).abs().max() < 0.02
    assert result.progress.val_loss < losses("run")[0] - 0.3
    assert checkpoint.load("run/last").meta["step"] == 30


@pytest.mark.parametrize("engine", ["eager", "graph", "best"])
def test_a_run_goes_on_from_its_checkpoint(on_card, engine):
    config = override(on_card, {"engine": engine})
    train(config)
    train(override(config, {"steps": 10, "out": "half"}))
    resume("half", override(config, {"out": "half"}))
    assert (losses("half")[10:].mean() - losses("run")[10:].mean()).abs() < 0.2


def test_auto_is_best_and_says_what_it_does(on_card):
    said = io.StringIO()
    result = train(on_card, console=Console(file=said, width=400))
    assert (result.config.engine, result.config.lanes) in (("best", 1), ("best", 2))
    assert "best (fused blocks, " in said.getvalue()
    assert " ms, 2 lanes " in said.getvalue()
    assert "MiB on the card: " in said.getvalue()
    again = train(override(on_card, {"out": "again"}))
    assert again.config.lanes == result.config.lanes


def test_batches_drawn_on_the_card_train_as_those_of_the_host(on_card, monkeypatch):
    said = io.StringIO()
    train(on_card, console=Console(file=said, width=400))
    assert "batches drawn on the card" in said.getvalue()
    monkeypatch.setattr("ridgeline.train.engines.fits", lambda batches, device: False)
    train(override(on_card, {"out": "host"}), console=Console(file=said, width=400))
    assert "batches from the host" in said.getvalue()
    assert torch.equal(losses("run"), losses("host"))


def test_stages_on_the_card_are_those_of_the_host(on_card, monkeypatch):
    """A graph a stage, each with windows of its own, the same that the host would bring."""
    staged = override(on_card, {"stages": [[0.3, 16, 16], [0.6, 4, 32]], "lanes": 1})
    result = train(staged)
    assert result.progress.tokens == 9 * 16 * 16 + 9 * 4 * 32 + 12 * 8 * 64
    with monkeypatch.context() as patched:
        patched.setattr("ridgeline.train.engines.fits", lambda batches, device: False)
        train(override(staged, {"out": "host"}))
    assert torch.equal(losses("run"), losses("host"))


@pytest.mark.parametrize("engine", ["best", "graph", "m3"])
def test_a_captured_validation_is_the_one_call_by_call(on_card, engine, monkeypatch):
    pairs, evaluate = [], Evaluation.__call__

    def twice(self, by_head=None):
        plain = Evaluation(self._step, self._validation, self._device, capture=False)
        pairs.append((evaluate(self), evaluate(plain)))
        return pairs[-1][0]

    monkeypatch.setattr(Evaluation, "__call__", twice)
    train(override(on_card, {"engine": engine, "eval_interval": 5}))
    assert len({captured for captured, _ in pairs}) == 6
    assert all(captured == plain for captured, plain in pairs)


def test_muon_trains_on_the_card(on_card):
    result = train(override(on_card, {"optimizer": {"algorithm": "muon"}}))
    assert result.progress.val_loss < losses("run")[0] - 0.3


def test_an_interval_without_steps_does_not_disturb_the_clock(on_card):
    result = train(override(on_card, {"minutes": 0.02, "eval_interval": 10**6, "engine": "graph"}))
    assert 1.2 <= result.progress.seconds < 20
