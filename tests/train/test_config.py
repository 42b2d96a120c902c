import dataclasses
import math

import pytest
import torch

from ridgeline.errors import ConfigError, RidgelineError, UnsupportedError
from ridgeline.models import LanguageConfig, PolicyConfig
from ridgeline.presets import PRESETS, preset
from ridgeline.train.config import ENGINES, engine_called
from ridgeline.train.engines import find_engine
from ridgeline.train.settings import from_dict, override, read_toml, to_dict, to_toml


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        (
            {"accumulation": 3},
            "accumulation=3, which tiny sets unless you do, does not divide batch=4; set accumulation=1",
        ),
        ({"steps": None}, "exactly one of steps, tokens and minutes, got none"),
        ({"minutes": 1.0}, "exactly one of steps, tokens and minutes, got steps, minutes"),
        ({"steps": 0}, "steps must be positive"),
        ({"steps": None, "minutes": math.nan}, "minutes must be positive"),
        ({"steps": None, "minutes": math.inf}, "minutes must be positive and finite, got inf"),
        ({"precision": "bf61"}, "unknown precision 'bf61'; did you mean bf16"),
        ({"engine": "eagre"}, "unknown engine 'eagre'; did you mean eager"),
        ({"track": ("tensorbord",)}, "unknown tracker 'tensorbord'; did you mean tensorboard"),
        ({"seed": -1}, "seed must be"),
        ({"eval_windows": -1}, "eval_windows must be"),
    ],
)
def test_settings_that_cannot_be(config, change, values, message):
    with pytest.raises(ConfigError, match=message):
        change(config, **values)


def test_engines_are_named_once_rungs_and_their_single_changes_included(config, change):
    assert change(config, engine="m2+reuse").engine == "m2+reuse"
    assert engine_called("m3") is ENGINES["m3"]
    assert engine_called("r16").lanes == 2
    assert engine_called("best+lean") == dataclasses.replace(ENGINES["best"], impl="fused+lean")
    assert change(config, engine="best+leanest").engine == "best+leanest"
    with pytest.raises(RidgelineError, match="unknown plan of the fused blocks 'leen'; did you mean lean"):
        change(config, engine="best+leen")
    alone = engine_called("m2+capture")
    assert (alone.impl, alone.capture, alone.own, alone.prefetch) == ("m2+capture", True, True, False)
    for name in ("m2+captur", "m5"):
        with pytest.raises(RidgelineError, match="did you mean"):
            change(config, engine=name)
        with pytest.raises(UnsupportedError, match="did you mean"):
            engine_called(name)
    with pytest.raises(UnsupportedError, match="m0 runs a card's kernels and needs a GPU"):
        find_engine("m0", torch.device("cpu"))


def test_window_longer_than_the_model_sees(config, change):
    with pytest.raises(ConfigError, match=r"window.context=17 is longer than the model's context=16"):
        change(config, window=change(config.window, context=17))


def test_length_in_tokens_rounds_up_to_whole_steps(config, change):
    assert change(config, steps=None, tokens=65).total_steps == 2
    assert change(config, steps=None, minutes=1.0).total_steps is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_toml(name, tmp_path):
    config = preset(name)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    values = read_toml(file)
    assert from_dict(values) == config
    assert from_dict(to_dict(config)) == config


def test_toml_says_what_is_unset(config, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    other = override(config, {"model": {"decoder": {"kv_heads": 1}}, "minutes": 3})
    assert other.minutes == 3.0
    assert other.steps is None
    assert override(other, read_toml(file)) == config


def test_override_reaches_nested_settings_and_leaves_the_rest(config, change):
    other = override(config, {"optimizer": {"betas": [0.8, 0.9]}, "model": {"decoder": {"width": 32}}, "tokens": 640})
    assert other.optimizer == change(config.optimizer, betas=(0.8, 0.9))
    assert other.model == change(config.model, decoder=change(config.model.decoder, width=32))
    assert (other.steps, other.tokens) == (None, 640)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batsch": 3}, "unknown setting 'batsch'; did you mean batch"),
        ({"model": {"decoder": {"widht": 3}}}, r"unknown setting 'widht'; did you mean width.*\(in model.decoder\)"),
        ({"lr": 3}, r"unknown setting 'lr'; did you mean optimizer.lr\?$"),
        ({"model": {"kv_heads": 3}}, r"'kv_heads'; did you mean model.decoder.kv_heads\? \(in model\)"),
        ({"qq": 3}, "unknown setting 'qq'; known: accumulation, batch"),
        ({"batch": "many"}, "batch must be a whole number, got 'many'"),
        ({"batch": 2.5}, "batch must be a whole number, got 2.5"),
        ({"batch": True}, "batch must be a whole number, got True"),
        ({"model": {"decoder": {"bias": 1}}}, "model.decoder.bias must be true or false"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr must be a number"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must have 2 entries, got 1"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas must be a list"),
        ({"optimizer": 3}, "optimizer must be a table"),
        ({"model": {"decoder": {"heads": 3}}}, "heads=3 does not divide width=16"),
        ({"model": {"decoder": {"kv_heads": 3}}}, "kv_heads=3 does not divide heads=2"),
        ({"model": {"decoder": {"position_table": 8}}}, "context=16 is longer than position_table=8"),
    ],
)
def test_overrides_that_cannot_be(config, values, message):
    with pytest.raises(ConfigError, match=message):
        override(config, values)


def test_whole_dicts_know_their_kind_of_model_and_what_is_missing():
    assert isinstance(from_dict(to_dict(preset("hal-5m"))).model, PolicyConfig)
    assert isinstance(from_dict(to_dict(preset("fast-c256"))).model, LanguageConfig)
    values = to_dict(preset("fast-c256"))
    del values["batch"]
    with pytest.raises(ConfigError, match="setting 'batch' is missing"):
        from_dict(values)
    for odd in ([1], 3, None, "batch"):
        with pytest.raises(ConfigError, match=r"what is read must be a table of settings, got "):
            from_dict(odd)


def test_files_that_are_no_settings(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")
    file = tmp_path / "broken.toml"
    for broken in ("batch = = 3", f"batch = {'[' * 10_000}"):
        file.write_text(broken)
        with pytest.raises(ConfigError, match="is not TOML"):
            read_toml(file)
