"""The CUDA C++ of the Hopper GEMM, the whole kernel, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.product_cases import (
    aligned,
    beside,
    code_lines,
    coded,
    decoded,
    dropping,
    expected,
    form_of,
    scheduled,
    slopes_are,
    source,
)
from ridgeline.ops.linear import gemm
from ridgeline.ops.linear.codes import LINE
from ridgeline.ops.linear.gemm import Config, Form, defines


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    epilogue: str  # plain, bias, gelu, residual, factor, terms
    config: Config
    transposed_b: bool = False
    units: int = 2
    seed: int = 0
    late: bool = False
    coded: bool = False


CASES = [
    Case(300, 200, 100, "gelu", Config(tile_m=64), units=2, seed=1),
    Case(520, 104, 136, "residual", Config(tile_m=64, stages=3), units=1, seed=2, late=True),
    Case(450, 264, 72, "factor", Config(tile_m=64), transposed_b=True, units=2, seed=3, late=True),
    Case(390, 130, 70, "bias", Config(), units=1, seed=4),
    Case(300, 136, 136, "plain", Config(tile_m=64), transposed_b=True, units=1, seed=5, late=True),
    Case(300, 256, 72, "residual", Config(tile_m=64), units=1, seed=6, late=True),
    Case(200, 260, 64, "gelu", Config(tile_m=64, tile_n=256), units=1, seed=7),
    Case(390, 200, 136, "gelu", Config(), units=1, seed=8, late=True),
    Case(390, 200, 136, "factor", Config(), transposed_b=True, units=2, seed=9),
    Case(390, 200, 136, "terms", Config(), transposed_b=True, units=2, seed=10, late=True),
    Case(300, 200, 100, "gelu", Config(tile_m=64), units=2, seed=11, coded=True),
    Case(390, 200, 136, "gelu", Config(), units=1, seed=12, late=True, coded=True),
    Case(450, 264, 72, "factor", Config(tile_m=64), transposed_b=True, units=2, seed=13, late=True, coded=True),
    Case(390, 200, 136, "factor", Config(), transposed_b=True, units=2, seed=14, coded=True),
]
PARAMETERS = ", const float* factor, const float* terms, int rows"
FACTOR = 0.7
PANEL = (16, 64)


def run(
    case: Case, form: Form, emulation: Any, a: Tensor, b: Tensor, bias: Tensor, c: Tensor, slope: Tensor, terms: Tensor,
    codes: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and column sums."""
    M, N = case.M, case.N
    macros = defines(case.config, case.K, form)
    config = case.config.fitted(form.reads_c)
    schedule, slots = scheduled(-(-M // config.tile_m), -(-N // config.tile_n), case.units)
    out = aligned(M, N).fill_(float("nan"))
    sums = torch.zeros(slots * 8, N)
    b_box = (64, 64) if case.transposed_b else (config.tile_n, 64)
    c_map, slope_map = (c, PANEL), (slope, PANEL)
    if case.coded:
        c_map = slope_map = (code_lines(codes), (gemm.PANEL_LINES, LINE))
    maps = emulation.maps((a, (config.tile_m, 64)), (b, b_box), c_map, (out, PANEL), slope_map)
    seed_step, numbers, scale = dropping(M, N)
    pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    factor = ctypes.c_float(FACTOR)
    fault = emulation.compile(source("gemm", PARAMETERS, ", factor, terms, rows"), macros, gemm.SOURCE.parent)(
        ctypes.byref(maps), pointer(schedule), schedule.shape[1], pointer(bias), pointer(sums), pointer(seed_step),
        numbers, scale, len(schedule), case.seed, int(case.late), ctypes.byref(factor), pointer(terms), M,
    )  # fmt: skip
    assert fault is None
    return out, sums.sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.epilogue}-{case.M}x{case.N}x{case.K}{'-coded' * case.coded}"
)
def test_whole_kernel_matches_float64(case: Case, emulation: Any) -> None:
    torch.manual_seed(case.seed)
    M, N, K = case.M, case.N, case.K
    form = form_of(case.epilogue, case.transposed_b, case.coded)
    a, b = aligned(M, K), aligned(K, N) if case.transposed_b else aligned(N, K)
    c, slope = beside(form, M, N)
    codes = coded(c, streaming=True)
    c = decoded(codes, M, N, streaming=True) if case.coded else c
    bias = torch.randn(N).bfloat16()
    terms = torch.randn(2, M)
    out, sums = run(case, form, emulation, a, b, bias, c, slope, terms, codes)
    right, right_slope = expected(form, a, b, bias, c)
    if form.terms:
        right = FACTOR * right + terms.double()[0, :, None] + terms.double()[1, :, None] * c.double()
    assert (out.double() - right).norm() <= 2e-3 * right.norm()
    if form.slope:
        slope = decoded(codes, M, N, streaming=True) if case.coded else slope
        assert slopes_are(slope, right_slope, case.coded)
    if form.factor:
        assert (sums.double() - right.sum(0)).norm() <= 1e-4 * right.sum(0).norm()
