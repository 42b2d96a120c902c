"""The table of cards: peaks by accumulate type, what a card lacks, names."""

import pytest

from ridgeline.errors import UnsupportedError
from ridgeline.hardware import CARDS, by_driver_name, card, check_precision, default_precision
from ridgeline.hardware.spec import lacking

KEYS = {
    "t4", "v100", "a100", "a100-40gb", "a100-pcie", "a10", "rtx-3090", "l4", "l40s", "rtx-4090", "rtx-5090",
    "rtx-pro-6000", "rtx-pro-6000-max-q", "h100-pcie", "h100", "h200", "b200", "mi300x",
}  # fmt: skip


def test_every_card_is_there_with_a_source() -> None:
    assert set(CARDS) == KEYS
    for key, spec in CARDS.items():
        assert spec.key == key
        assert len(spec.source) > 10
        assert spec.gb_per_s > 0
        assert spec.memory_gib > 0
        assert spec.driver_names


def test_no_card_claims_a_format_that_its_architecture_lacks() -> None:
    for spec in CARDS.values():
        if spec.capability is not None:
            assert not lacking(spec.capability) & set(spec.tflops), spec.key


# FLOP a byte at which a product turns from memory-bound to compute-bound
@pytest.mark.parametrize(
    ("key", "number", "ridge"),
    [
        ("t4", "fp16", 203), ("a100", "bf16", 153), ("l4", "bf16", 403), ("rtx-4090", "bf16", 164),
        ("rtx-5090", "bf16", 117), ("rtx-pro-6000", "bf16", 281), ("h100", "bf16", 295), ("h200", "bf16", 206),
        ("b200", "bf16", 281), ("t4", "fp32", 25),
    ],
)  # fmt: skip
def test_ridge_points(key: str, number: str, ridge: int) -> None:
    spec = card(key)
    assert int(spec.peak(number) / spec.bandwidth) == pytest.approx(ridge, abs=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "number", "fp32_sum", "fp16_sum"),
    [
        ("rtx-3090", "fp16", 71, 142),
        ("rtx-4090", "fp16", 165.2, 330.3),
        ("rtx-4090", "fp8", 330.3, 660.6),
        ("rtx-5090", "fp16", 209.5, 419),
        ("rtx-5090", "fp8", 419, 838),
        ("h200", "fp16", 989.4, 989.4),  # full rate with fp32 sums
        ("rtx-pro-6000", "fp16", 503.8, 503.8),
    ],
)
def test_geforce_doubles_its_rate_with_fp16_sums_and_the_others_do_not(
    key: str, number: str, fp32_sum: float, fp16_sum: float
) -> None:
    assert card(key).peak(number) == pytest.approx(fp32_sum * 1e12)  # type: ignore[arg-type]
    assert card(key).peak(number, "fp16") == pytest.approx(fp16_sum * 1e12)  # type: ignore[arg-type]


def test_bf16_products_are_never_summed_in_fp16() -> None:
    with pytest.raises(UnsupportedError, match="never summed in fp16"):
        card("rtx-4090").peak("bf16", "fp16")


def test_default_precision_is_bf16_then_fp16_then_fp32() -> None:
    assert default_precision(card("h200")) == "bf16"
    assert default_precision(card("t4")) == "fp16"


def test_a_precision_that_the_card_lacks_is_an_error_that_names_those_it_has() -> None:
    with pytest.raises(UnsupportedError, match=r"NVIDIA T4 has no bf16; choose .*fp32, fp16"):
        check_precision(card("t4"), "bf16")
    with pytest.raises(UnsupportedError, match="one of bf16, fp16, tf32, fp32, got 'fp8'"):
        check_precision(card("h200"), "fp8")


def test_a_figure_that_could_not_be_verified_is_left_out_and_said_so() -> None:
    with pytest.raises(UnsupportedError, match="no verified tf32 peak is known"):
        card("rtx-pro-6000-max-q").peak("tf32")
    assert card("rtx-pro-6000-max-q").vector_peak is None
    assert card("l40s").l2_bytes is None


def test_driver_names_are_exact() -> None:
    for name, key in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
    ):
        found = by_driver_name(name)
        assert found is not None, name
        assert found.key == key
    for other in ("NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL", "NVIDIA A10G"):
        assert by_driver_name(other) is None, other


def test_a_mistyped_card_is_answered_with_near_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"unknown card 'h20'; did you mean .*h200"):
        card("h20")


def test_spelling_of_a_card_is_forgiven() -> None:
    assert card("RTX 4090") is card("rtx4090") is CARDS["rtx-4090"]
