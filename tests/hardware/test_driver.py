"""What the driver says goes over what the table says; without a card there is an error or a row of the table."""

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.hardware import card, driver, present, read_driver, resolve
from ridgeline.hardware.driver import DriverReading, parse_smi, refined, unlisted

READING = DriverReading(
    name="NVIDIA H200",
    capability=(9, 0),
    sm_count=120,
    memory_bytes=100 * 2**30,
    l2_bytes=40 * 2**20,
    shared_per_sm=228 * 1024,
    shared_per_block=227 * 1024,
)


def test_the_drivers_sizes_replace_the_tables_and_the_peaks_stay() -> None:
    spec = refined(card("h200"), READING)
    assert (spec.sm_count, spec.memory_bytes, spec.l2_bytes) == (120, 100 * 2**30, 40 * 2**20)
    assert spec.peak("bf16") == card("h200").peak("bf16")
    assert spec.source.endswith("sizes from the driver")


def test_an_unlisted_card_has_sizes_and_no_peaks() -> None:
    spec = unlisted(READING)
    assert spec.sm_count == 120
    with pytest.raises(UnsupportedError, match="no verified bf16 peak"):
        spec.peak("bf16")


def test_nvidia_smi_lines_are_read_and_missing_figures_are_none() -> None:
    assert parse_smi("580.95.05, 1830, 1980, 3201, 700.00") == {
        "driver": "580.95.05",
        "sm_clock_mhz": 1830.0,
        "sm_clock_max_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_limit_w": 700.0,
    }
    assert parse_smi("580.95.05, 1830, 1980, [N/A], [N/A]")["power_limit_w"] is None
    assert parse_smi("No devices were found") == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_without_a_card() -> None:
    assert read_driver() is None
    assert present() is None
    for device in (None, "cuda", "auto"):
        with pytest.raises(UnsupportedError, match="no CUDA card here; name one of the table"):
            resolve(device)
    assert resolve("h200") == card("h200")


def test_a_key_that_names_the_card_that_is_here_gets_the_drivers_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "read_driver", lambda index=0: READING)
    assert resolve("h200").sm_count == resolve(None).sm_count == 120
    assert resolve("t4") == card("t4")


@pytest.mark.gpu
def test_the_driver_describes_the_card_that_is_here() -> None:
    reading = read_driver()
    assert reading is not None
    assert reading.sm_count > 0
    assert reading.shared_per_block >= 48 * 1024
    assert reading.l2_bytes > 2**20
    spec = present()
    assert spec is not None
    assert spec.memory_bytes == pytest.approx(reading.memory_bytes, rel=1e-9)
