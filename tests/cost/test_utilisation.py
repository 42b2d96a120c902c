"""MFU and bandwidth: right figures, and above 100 % an error that names the wrong input."""

import pytest

from ridgeline.cost import OpCost, StepCost, bandwidth_share, mfu, step_utilisation
from ridgeline.errors import ConfigError
from ridgeline.hardware import card

H200 = card("h200")
UTILISATION = "ridgeline.cost.utilisation.present"


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UTILISATION, lambda: None)


def test_mfu_is_model_flops_over_peak() -> None:
    assert mfu(flops=989.4e12 / 4, seconds=0.5, spec=H200, precision="bf16") == pytest.approx(0.5)
    assert mfu(flops=989.4e12, seconds=0.5, spec=H200, precision="bf16", gpus=4) == pytest.approx(0.5)


def test_the_second_articles_figures() -> None:
    """33 % and 28 % of a T4's fp32 peak, not the reverse: the smaller model is faster and uses the card less."""
    t4 = card("t4")
    gpt = mfu(flops=271.4e9, seconds=0.1013, spec=t4, precision="fp32")
    fast = mfu(flops=160.3e9, seconds=8192 / 116_080, spec=t4, precision="fp32")
    assert gpt == pytest.approx(0.331, abs=0.001)
    assert fast == pytest.approx(0.280, abs=0.001)
    assert mfu(flops=271.4e9, seconds=0.1013, spec=t4, precision="fp16") == pytest.approx(0.041, abs=0.001)


def test_above_100_percent_in_one_precision_but_not_in_another_names_the_precision() -> None:
    with pytest.raises(ConfigError, match=r"MFU of 200% cannot be .*the precision is wrong: .*bf16, not in tf32"):
        mfu(flops=989.4e12, seconds=1, spec=H200, precision="tf32")


def test_a_step_too_fast_for_its_bytes_too_names_the_clock() -> None:
    with pytest.raises(ConfigError, match=r"seconds is wrong: 0\.1 s is too short; synchronise"):
        mfu(flops=989.4e12, seconds=0.1, spec=H200, precision="bf16", nbytes=4.8e12)
    with pytest.raises(ConfigError, match="seconds is wrong"):
        mfu(flops=989.4e12, seconds=0.1, spec=H200, precision="bf16")


def test_a_step_whose_bytes_fit_the_time_names_the_flops() -> None:
    with pytest.raises(ConfigError, match="flops is wrong"):
        mfu(flops=4e15, seconds=1, spec=H200, precision="bf16", nbytes=1e12)


def test_another_card_than_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UTILISATION, lambda: card("b200"))
    with pytest.raises(ConfigError, match="the device is wrong: NVIDIA B200 SXM is here, not NVIDIA H200 SXM"):
        mfu(flops=2e15, seconds=1, spec=H200, precision="bf16")


def test_more_processes_than_gpus_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    with pytest.raises(ConfigError, match="gpus is wrong: 4 processes took part, not 1"):
        mfu(flops=2e15, seconds=1, spec=H200, precision="bf16")


@pytest.mark.parametrize(("field", "value"), [("seconds", 0), ("seconds", float("nan")), ("flops", -1), ("gpus", 0)])
def test_impossible_inputs_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must"):
        mfu(**{"flops": 1.0, "seconds": 1.0, "spec": H200, "precision": "bf16", field: value})  # type: ignore[arg-type]


def test_bandwidth_has_no_meaning_for_what_fits_in_the_cache() -> None:
    assert bandwidth_share(nbytes=100 * 2**20, seconds=1e-6, spec=H200) is None
    assert bandwidth_share(nbytes=2.4e12, seconds=1, spec=H200) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"150% of the memory bandwidth cannot be .*too short or bytes"):
        bandwidth_share(nbytes=7.2e12, seconds=1, spec=H200)


def test_utilisation_of_a_step() -> None:
    step = StepCost((OpCost(name="a", phase="forward", flops=98.94e12, read_bytes=0.96e12),))
    used = step_utilisation(step, 2.0, H200, "bf16", steps=10)
    assert used.mfu == pytest.approx(0.5)
    assert used.bytes_per_s == pytest.approx(4.8e12)
    assert used.bandwidth == pytest.approx(1.0)
    assert step_utilisation(step, 2.0, H200, "bf16", gpus=2, steps=10).mfu == pytest.approx(0.5)


def test_a_step_whose_bytes_cannot_have_passed_the_memory_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepCost((OpCost(name="a", phase="forward", flops=1e12, read_bytes=9.6e12),))
    with pytest.raises(
        ConfigError, match=r"200% of the memory bandwidth cannot be .*seconds \(1\) is too short or bytes"
    ):
        step_utilisation(step, 1.0, H200, "bf16")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="gpus is wrong: 2 processes took part, not 1"):
        step_utilisation(step, 1.0, H200, "bf16")
    monkeypatch.setattr(UTILISATION, lambda: card("b200"))
    with pytest.raises(ConfigError, match="the device is wrong: NVIDIA B200 SXM is here, not NVIDIA H200 SXM"):
        step_utilisation(step, 1.0, H200, "bf16")


def test_bytes_that_fit_in_the_cache_op_by_op_say_nothing_of_the_memory() -> None:
    small = OpCost(name="a", phase="forward", flops=1e8, read_bytes=40 * 2**20, count=1000)
    used = step_utilisation(StepCost((small,)), 1e-3, H200, "bf16")
    assert used.bytes_per_s == pytest.approx(40 * 2**20 * 1e6)
    assert used.bandwidth is None
    large = OpCost(name="b", phase="forward", read_bytes=1e11)
    assert step_utilisation(StepCost((small, large)), 1.0, H200, "bf16").bandwidth == pytest.approx(0.0296, abs=1e-4)
