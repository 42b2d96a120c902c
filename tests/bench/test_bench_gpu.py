"""A benchmark on a card: captured and call by call, with everything that a record can hold."""

from __future__ import annotations

import pytest
import torch

from ridgeline.bench.plan import Plan
from ridgeline.bench.run import run_bench
from ridgeline.bench.workloads import workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card here"),
]


def test_every_field_is_measured():
    case = workload("gpt2-c256", batch=8, context=256)
    plan = Plan(rounds=2, steps=5, turn_s=0.05, warm_s=1.0, phases=3, profile=2)
    record = run_bench(case, ["best", "eager"], torch.device("cuda"), plan)
    for result in record.contenders:
        assert result.error is None
        assert result.first_step_s is not None
        assert (result.peak_memory_bytes or 0) > 16 * 4_837_888
        assert list(result.phases_ms or {}) == ["forward", "backward", "optimizer"]
        assert sum((result.phases_ms or {}).values()) < 3 * (result.step_ms or 0)
        assert result.overlap is not None
        groups = result.groups_ms_per_layer or {}
        parts = {part for group in groups for part in group.split(" · ")[1].split(" + ")}  # a kernel may be for several
        assert {"QKV", "attention", "MLP up", "MLP down", "norms"} <= parts
        assert groups.get("forward · not told", 0.0) < 0.05 * sum(groups.values())
    assert record.clocks is not None
    assert record.gpus == 1
