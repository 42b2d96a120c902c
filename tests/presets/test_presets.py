import dataclasses

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.models import build
from ridgeline.presets import (
    PRESETS,
    boxing,
    boxing_fast,
    fast_c256,
    gpt2_124m,
    gpt2_c256,
    hal_5m,
    hal_20m,
    preset,
    shakespeare_fast,
)
from ridgeline.presets.hal import RELEASED_TABLES


def parameters(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config.model, seed=0).parameters())


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (gpt2_c256(), 4_837_888),
        (fast_c256(), 2_559_744),
        (shakespeare_fast(), 4_821_504),
        (gpt2_124m(), 124_439_808),
        (hal_20m(), 19_845_065),
        (hal_20m(tables=RELEASED_TABLES), 19_844_861),
        (hal_20m(shoulder=True, tables=RELEASED_TABLES), 19_983_347),
        (hal_5m(), 5_309_641),
        (boxing(), 430_029),
        (boxing_fast(), 430_029),
    ],
)
def test_parameter_counts(config, count):
    assert parameters(config) == count


def test_hal_sees_what_the_original_sees():
    three, four = hal_20m().model, hal_20m(shoulder=True).model
    assert (three.input_width, four.input_width) == (162, 164)
    assert [(head.name, head.classes) for head in three.heads] == [("c", 9), ("main", 37), ("buttons", 6)]
    assert [(head.name, head.classes) for head in four.heads] == [
        ("shoulder", 3),
        ("c", 9),
        ("main", 37),
        ("buttons", 5),
    ]
    assert (three.decoder.context, three.decoder.table_rows, three.decoder.positions) == (256, 1024, "relative")


def test_hal_trains_as_the_original_did():
    config = hal_20m()
    assert config.step_tokens == 131_072
    assert config.steps == 32_768
    assert dataclasses.asdict(config.optimizer) == {
        "algorithm": "adamw",
        "lr": 3e-4,
        "floor": 1e-6,
        "warmup": 0,
        "stable": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "momentum": 0.95,  # Muon's
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    assert (config.eval_interval * config.batch, config.eval_windows) == (2**19, 2**15)


def test_hal_5m_spans_the_same_frames_at_half_the_positions():
    config = hal_5m()
    assert (config.window.context, config.window.stride) == (128, 2)
    assert config.step_tokens == 65_536


def test_fast_c256_follows_the_measured_code():
    decoder = fast_c256().model.decoder
    assert (decoder.gelu, decoder.norm_eps, decoder.groups, decoder.hidden, decoder.bias) == (
        "tanh",
        1e-5,
        1,
        512,
        False,
    )


def test_both_character_models_share_a_recipe():
    one, other = gpt2_c256(), fast_c256()
    assert dataclasses.replace(one, preset="", model=other.model) == dataclasses.replace(other, preset="")


@pytest.mark.parametrize("name", PRESETS)
def test_names_agree(name):
    assert preset(name).preset == name


def test_a_mistyped_name_meets_its_neighbours():
    with pytest.raises(ConfigError, match=r"unknown preset 'hal-20M'; did you mean hal-20m"):
        preset("hal-20M")
