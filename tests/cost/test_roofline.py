"""Floors: the busiest resource bounds an op, ops follow one another, a step may overlap them."""

import pytest

from ridgeline.cost import (
    OpCost,
    Rates,
    StepCost,
    floor,
    floor_of,
    measured_rates,
    overlapped_floor,
    storage,
    table_rates,
)
from ridgeline.errors import UnsupportedError
from ridgeline.hardware import Ceilings, card

RATES = Rates(matrix=100.0, bandwidth=10.0, vector=5.0, source="test")


def op(**costs: float) -> OpCost:
    return OpCost(name="op", phase="forward", **costs)  # type: ignore[arg-type]


def test_the_busiest_resource_bounds_an_op() -> None:
    assert floor(op(flops=500, read_bytes=10), RATES) == (5.0, "matrix units")
    assert floor(op(flops=500, read_bytes=60, written_bytes=40), RATES) == (10.0, "memory")
    assert floor(op(vector_flops=100, read_bytes=60), RATES) == (20.0, "vector units")
    assert floor(op(), RATES) == (0.0, "nothing")


def test_in_true_fp32_products_and_other_arithmetic_share_the_vector_units() -> None:
    shared = table_rates(card("h200"), "fp32")
    cost = op(flops=66.9e12, vector_flops=66.9e11)
    assert floor(cost, shared) == (pytest.approx(1.1), "vector units")
    assert floor(cost, table_rates(card("h200"), "bf16")).seconds == pytest.approx(0.1)
    unknown = Rates(matrix=100.0, bandwidth=10.0, vector=None, source="test")
    assert floor(op(flops=500, vector_flops=1e9), unknown) == (5.0, "matrix units")


def test_the_floor_counts_what_is_executed_and_not_what_the_model_needs() -> None:
    cost = OpCost(name="attention", phase="backward", flops=400, dense_flops=800, executed_flops=500)
    assert floor(cost, RATES).seconds == 5.0
    step = StepCost((cost,))
    assert (step.flops, step.dense_flops, step.executed_flops) == (400, 800, 500)


def test_ops_one_after_another_take_the_sum_and_overlapped_ones_the_busiest_resource() -> None:
    compute = OpCost(name="a", phase="forward", flops=300, count=2)
    copy = OpCost(name="b", phase="forward", read_bytes=50)
    assert floor_of([compute, copy], RATES) == (11.0, "matrix units")
    assert overlapped_floor([compute, copy], RATES) == (6.0, "matrix units")
    assert floor_of([], RATES) == (0.0, "nothing")


def test_totals_count_each_run_of_an_op() -> None:
    step = StepCost((OpCost(name="a", phase="forward", flops=3, read_bytes=1, written_bytes=2, launches=2, count=4),))
    assert (step.flops, step.bytes, step.launches) == (12, 12, 8)
    assert step.total("flops", "backward") == 0


def test_half_precisions_store_two_bytes_and_keep_fp32_gradients() -> None:
    assert storage("bf16") == (2, 2, 4, 4, 1)
    assert storage("fp16") == (2, 2, 4, 4, 2)
    assert storage("tf32") == storage("fp32") == (4, 4, 4, 4, 4)


def test_rates_of_table_and_measurement() -> None:
    h200 = card("h200")
    assert table_rates(h200, "bf16").matrix == pytest.approx(989.4e12)
    fp32 = table_rates(h200, "fp32")
    assert fp32.matrix == fp32.vector == pytest.approx(66.9e12)
    measured = measured_rates(
        h200, Ceilings(card="NVIDIA H200", copy_bytes_per_s=4e12, products={"bf16": 7e14}), "bf16"
    )
    assert (measured.matrix, measured.bandwidth) == (7e14, 4e12)
    with pytest.raises(UnsupportedError, match="no fp16 product was measured"):
        measured_rates(h200, Ceilings(card="NVIDIA H200", copy_bytes_per_s=4e12), "fp16")


def test_a_narrow_product_is_bound_by_memory_on_an_h200() -> None:
    # 8,192 × 256 × 1024 in bf16: 200 FLOP a byte, below the card's ridge of 206
    from ridgeline.ops.linear.cost import linear_forward

    cost = linear_forward("mlp_up", 8192, 256, 1024, bias=False, store=storage("bf16"))
    assert cost.flops / cost.bytes == pytest.approx(199.8, abs=0.5)
    assert floor(cost, table_rates(card("h200"), "bf16")).bound == "memory"
