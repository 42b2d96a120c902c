"""Configs by name: a preset, a file of settings, and changes behind either."""

from pathlib import Path

import pytest

from ridgeline.bench.explain import explain_preset
from ridgeline.bench.workloads import workload
from ridgeline.errors import ConfigError
from ridgeline.models.accounting import parameters
from ridgeline.presets import find_config


def test_a_preset_with_changes() -> None:
    config = find_config("gpt2-c256+norm=rmsnorm+kv_heads=1+bias=false+optimizer.lr=2e-3")
    decoder = config.model.decoder
    assert (decoder.norm, decoder.kv_heads, decoder.bias, config.optimizer.lr) == ("rmsnorm", 1, False, 2e-3)


def test_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "gpt2-c256"\nbatch = 4\n', encoding="utf-8")
    config = find_config(f"{file}+layers=2")
    assert (config.batch, config.model.decoder.layers) == (4, 2)
    file.write_text("batch = 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="names no preset"):
        find_config(str(file))


@pytest.mark.parametrize("name", ["gpt3", "gpt2-c256+", "gpt2-c256+norm", "gpt2-c256+norms=rmsnorm", "gpt2-c256+=1"])
def test_no_config(name: str) -> None:
    with pytest.raises(ConfigError):
        find_config(name)


@pytest.mark.parametrize(("change", "meant"), [("kvheads=1", "model.decoder.kv_heads"), ("lr=1e-3", "optimizer.lr")])
def test_a_change_that_is_near_another(change: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        find_config(f"gpt2-c256+{change}")
    assert find_config(f"gpt2-c256+{meant}=1") != find_config("gpt2-c256")


def test_costs_and_workloads_of_a_model_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "fast-c256"\nbatch = 3\n[window]\ncontext = 16\n[model.decoder]\nlayers = 1\n')
    name = f"{file}+width=96+heads=6+kv_heads=2+mlp_width=200"
    result = explain_preset(name, device="h200")
    work = workload(name)
    assert result.case.model.decoder.width == work.model.decoder.width == 96
    assert (result.case.batch, result.case.context) == (work.batch, work.context) == (3, 16)
    # two norms and the last one of 96; projections 6 + 2·2 heads of 16 and back; MLP; 65 rows twice, 16 positions
    own = 3 * 96 + 96 * 160 + 96 * 96 + 2 * 96 * 200 + 2 * 65 * 96 + 16 * 96
    assert parameters(result.case.model) == own
