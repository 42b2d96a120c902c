"""The product with its weights in registers, the whole kernel, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ops.product_cases import aligned, beside, dropping, expected, form_of, scheduled, source
from ridgeline.ops.linear import stationary


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    epilogue: str  # plain, bias, gelu, residual, factor
    transposed_b: bool = False
    units: int = 2
    seed: int = 0
    late: bool = False


CASES = [
    Case(300, 200, 200, "gelu", units=2, seed=1),
    Case(330, 136, 72, "factor", transposed_b=True, units=2, seed=2, late=True),
    Case(200, 130, 512, "bias", units=1, seed=3, late=True),
    Case(390, 128, 256, "plain", transposed_b=True, units=1, seed=4),
    Case(450, 264, 136, "factor", units=1, seed=5),
    Case(300, 400, 200, "gelu", units=2, seed=6),
    Case(450, 132, 136, "residual", units=2, seed=8, late=True),
    Case(41, 136, 40, "bias", units=6, seed=9),
    Case(330, 264, 136, "factor", transposed_b=True, units=1, seed=7, late=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.epilogue}-{case.M}x{case.N}x{case.K}")
def test_whole_kernel_matches_float64(case: Case, emulation: Any) -> None:
    torch.manual_seed(case.seed)
    M, N, K = case.M, case.N, case.K
    form = form_of(case.epilogue, case.transposed_b)
    a, b = aligned(M, K), aligned(K, N) if case.transposed_b else aligned(N, K)
    bias = torch.randn(N).bfloat16()
    out = aligned(M, N).fill_(float("nan"))
    c, slope = beside(form, M, N)
    schedule, slots = scheduled(-(-M // stationary.TILE), -(-N // stationary.COLUMNS), case.units)
    sums = torch.zeros(slots, N)
    maps = emulation.maps(*((x, (64, 64)) for x in (a, b, c, out, slope)))
    seed_step, numbers, scale = dropping(M, N)
    pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    macros = stationary.defines(K, form)
    fault = emulation.compile(source("stationary"), macros, stationary.SOURCE.parent)(
        ctypes.byref(maps), pointer(schedule), schedule.shape[1], pointer(bias), pointer(sums), pointer(seed_step),
        numbers, scale, len(schedule), case.seed, int(case.late),
    )  # fmt: skip
    assert fault is None
    right, right_slope = expected(form, a, b, bias, c)
    assert (out.double() - right).norm() <= 2e-3 * right.norm()
    if form.slope:
        assert (slope.double() - right_slope).norm() <= 1e-3 * right_slope.norm()
    if form.factor:
        assert (sums.double().sum(0) - right.sum(0)).norm() <= 1e-3 * right.sum(0).norm()
