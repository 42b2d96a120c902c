"""Measured ceilings: kept by card, replaced when measured again, refused without a card."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.hardware import Ceilings, card, load_ceilings, measure_ceilings, save_ceilings
from ridgeline.hardware.ceilings import ceilings_file

H200 = Ceilings(
    card="NVIDIA H200",
    copy_bytes_per_s=4.25e12,
    products={"bf16": 686e12},
    launch_s=2e-6,
    date="2026-11-29T12:00:00+00:00",
    driver="580.95.05",
    sm_clock_mhz=1830,
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def test_ceilings_come_back_as_they_were_kept_one_entry_a_card() -> None:
    assert load_ceilings("NVIDIA H200") is None
    save_ceilings(H200)
    save_ceilings(replace(H200, card="Tesla T4"))
    newer = replace(H200, copy_bytes_per_s=4.3e12)
    save_ceilings(newer)
    assert load_ceilings("NVIDIA H200") == newer
    assert set(json.loads(ceilings_file().read_text())) == {"NVIDIA H200", "Tesla T4"}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"NVIDIA H200": 3}',
        '{"NVIDIA H200": {"speed": 1}}',
        '{"NVIDIA H200": {"card": "NVIDIA H200", "copy_bytes_per_s": "fast"}}',
        '{"NVIDIA H200": {"card": "NVIDIA H200", "copy_bytes_per_s": 0}}',
        '{"NVIDIA H200": {"card": "NVIDIA H200", "copy_bytes_per_s": 4e12, "products": [1]}}',
        '{"NVIDIA H200": {"card": "NVIDIA H200", "copy_bytes_per_s": 4e12, "products": {"bf16": -1}}}',
        '{"NVIDIA H200": {"card": "NVIDIA H200", "copy_bytes_per_s": 4e12, "launch_s": NaN}}',
    ],
)
def test_a_broken_file_is_an_error_that_names_it(content: str) -> None:
    ceilings_file().parent.mkdir(parents=True)
    ceilings_file().write_text(content)
    with pytest.raises(UnsupportedError, match=r"ceilings\.json is not a list of ceilings .* delete it"):
        load_ceilings("NVIDIA H200")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnsupportedError, match=r"cannot write .*ceilings\.json .*; set RIDGELINE_CACHE to a folder"):
        save_ceilings(H200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here")
def test_measuring_needs_a_card() -> None:
    with pytest.raises(UnsupportedError, match="measured on a CUDA card, and there is none"):
        measure_ceilings()


@pytest.mark.gpu
def test_a_card_reaches_half_its_peak_and_never_passes_it() -> None:
    ceilings = measure_ceilings()
    assert ceilings.launch_s is not None
    assert 1e-7 < ceilings.launch_s < 1e-4
    if ceilings.card == "NVIDIA H200":
        spec = card("h200")
        assert 0.5 < ceilings.products["bf16"] / spec.peak("bf16") < 1
        assert 0.5 < ceilings.copy_bytes_per_s / spec.bandwidth < 1
