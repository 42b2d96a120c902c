import numpy as np
import pytest
import torch

from ridgeline import checkpoint
from ridgeline.data import games
from ridgeline.data.api import load_dataset
from ridgeline.data.text import Vocabulary
from ridgeline.errors import UnsupportedError
from ridgeline.games.table import GameTable
from ridgeline.models import Category, Head, LanguageConfig, PolicyConfig
from ridgeline.presets import preset
from ridgeline.train import train
from ridgeline.train.engines import build_model, find_engine, fused_missing, fused_slower, make_step, settle_engine
from ridgeline.train.metrics import read_metrics
from ridgeline.train.resolve import fit_model
from ridgeline.train.settings import override

HEADS = (("direction", 9), ("fire", 2))


@pytest.fixture
def bouts(tmp_path):
    """Eight games whose target follows from what is seen."""
    draw = np.random.default_rng(0)
    tables = []
    for length in range(30, 38):
        numbers = draw.normal(size=(length, 3)).astype(np.float32)
        target = np.stack([(numbers[:, 0] > 0) * 4, numbers[:, 1] > 0], 1).astype(np.uint8)
        controller = np.concatenate([np.zeros((1, 2), np.uint8), target[:-1]])
        categories = draw.integers(5, size=(length, 2)).astype(np.uint16)
        tables.append(GameTable(categories=categories, numbers=numbers, controller=controller, target=target))
    features = {"game": "toy", "version": 1}
    return games.write(
        tmp_path / "bouts",
        tables,
        name="bouts",
        game="toy",
        heads=HEADS,
        groups=(("stage", 5, 2),),
        features=features,
        provenance=[{}] * 8,
    )


def test_a_policy_keeps_its_trunk_and_takes_the_datas_inputs_and_heads(bouts):
    model = preset("hal-20m").model
    fitted = fit_model(model, load_dataset(bouts))
    assert fitted == PolicyConfig(
        decoder=model.decoder,
        heads=(Head(name="direction", classes=9), Head(name="fire", classes=2)),
        categories=(Category(name="stage", rows=5, width=4, columns=2),),  # the width is HAL's for stages
        numbers=3,
        previous=("direction", "fire"),
    )


def test_a_language_trunk_can_play_and_a_policys_trunk_can_read(bouts, text):
    fitted = fit_model(preset("fast-c256").model, load_dataset(bouts))
    assert isinstance(fitted, PolicyConfig)
    assert fitted.decoder == preset("fast-c256").model.decoder
    read = fit_model(preset("hal-5m").model, load_dataset(text))
    assert read == LanguageConfig(decoder=preset("hal-5m").model.decoder, vocabulary=9)


def test_unknown_tokenizers_keep_the_presets_vocabulary(tmp_path):
    file = tmp_path / "ids.bin"
    np.arange(400, dtype="<u2").tofile(file)
    data = load_dataset(file)
    assert data.vocabulary == Vocabulary(kind="tokens", size=400)
    assert fit_model(preset("gpt2-124m").model, data).vocabulary == 50257
    assert fit_model(preset("gpt2-c256").model, data).vocabulary == 400


def test_a_policy_trains_on_games_and_records_their_features(bouts):
    tiny = {"layers": 1, "width": 16, "heads": 2, "head_width": 8, "dropout": 0.0, "context": 8, "position_table": 8}
    config = override(
        preset("hal-20m"),
        {
            "model": {"decoder": tiny},
            "window": {"context": 8, "stride": 2, "delay": 1},
            "data": str(bouts),
            "batch": 8,
            "steps": 60,
            "optimizer": {"lr": 1e-2},
            "device": "cpu",
            "out": "run",
        },
    )
    result = train(config)
    records = read_metrics("run")
    assert result.progress.val_loss < 0.8 * records[0]["loss"]
    meta = checkpoint.load("run/last").meta
    assert meta["features"] == {"game": "toy", "version": 1}
    assert meta["window"] == {"context": 8, "stride": 2, "delay": 1}


def test_on_a_card_auto_is_the_fastest_and_best_is_the_fused_blocks_or_says_why(config, change, monkeypatch):
    monkeypatch.setattr("ridgeline.train.engines.triton_missing", lambda device: None)
    card = torch.device("cuda")
    assert find_engine("auto", card) == "best"
    assert find_engine("auto", torch.device("cpu")) == "eager"
    best = change(config, engine="best", device="cuda", precision="bf16")
    assert settle_engine(best, "auto") == settle_engine(best, "best") == best
    exact = change(best, precision="fp32")
    for missing, engine in ((None, "best"), ("has no dropout", "compile+graph")):
        monkeypatch.setattr("ridgeline.train.engines.attention_missing", lambda *_, missing=missing: missing)
        assert settle_engine(exact, "best") == exact
        assert settle_engine(exact, "auto").engine == engine
    assert fused_slower(exact).endswith("and its fp32 kernel has no dropout")
    for other, reason in (
        (change(best, precision="bf16-autocast"), "casts between"),
        (override(best, {"model": {"decoder": {"width": 16384}}}), "at most 8192"),
    ):
        assert settle_engine(other, "auto").engine == "compile+graph"
        assert reason in fused_missing(other)
        with pytest.raises(UnsupportedError, match=f"best is the fused blocks, and .*{reason}.*; use auto"):
            settle_engine(other, "best")
    monkeypatch.setattr("ridgeline.train.engines.triton_missing", lambda device: "triton is not installed")
    assert settle_engine(best, "auto").engine == "graph"


def test_pytorchs_own_step_has_no_lanes(config, change):
    settled = change(config, engine="eager", precision="fp32", lanes=2)
    with pytest.raises(UnsupportedError, match=r"lanes=2 is the step engine's, .*; set lanes to 1 or 0"):
        make_step(build_model(settled), settled)
    assert make_step(build_model(settled), change(settled, lanes=1))


def test_engines_of_pytorchs_own_graphs_do_not_train_in_several_processes(config, change):
    settled = change(config, engine="reduce-overhead", precision="fp32")
    with pytest.raises(UnsupportedError, match="no place for an all-reduce over 2 processes; use best"):
        make_step(build_model(change(settled, engine="eager")), settled, world=2)
