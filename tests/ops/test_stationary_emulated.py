"""The product with its weights in registers, the whole kernel, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch

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
from ridgeline.ops.linear import stationary
from ridgeline.ops.linear.codes import LINE, LINES
from ridgeline.ops.linear.folded import SHARE
from ridgeline.ops.norm.reference import NormKind, norm_reference

PARAMETERS = ", void* const* beside, int count"
ARGUMENTS = """, static_cast<float2*>(beside[0]), static_cast<const float*>(beside[1]),
         static_cast<const float*>(beside[2]), count"""
EPS = 1e-5
TILE_BOX = (64, 64)


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
    norm: NormKind | None = None
    coded: bool = False


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
    Case(330, 200, 128, "gelu", units=2, seed=10, norm="layernorm"),
    Case(300, 200, 192, "bias", units=3, seed=11, late=True, norm="rmsnorm"),
    Case(450, 192, 136, "residual", units=2, seed=12, norm="layernorm", late=True),
    Case(330, 264, 72, "factor", transposed_b=True, units=3, seed=13, norm="layernorm"),
    Case(330, 136, 72, "factor", transposed_b=True, units=2, seed=14, norm="rmsnorm", late=True),
    Case(330, 200, 512, "gelu", units=2, seed=21, late=True),
    Case(270, 192, 512, "residual", units=2, seed=22, norm="layernorm"),
    Case(300, 200, 200, "gelu", units=2, seed=15, coded=True),
    Case(330, 136, 72, "factor", transposed_b=True, units=2, seed=16, late=True, coded=True),
    Case(450, 264, 136, "factor", units=1, seed=17, coded=True),
    Case(300, 400, 512, "gelu", units=2, seed=18, late=True, coded=True),
    Case(330, 200, 128, "gelu", units=2, seed=19, norm="layernorm", coded=True),
    Case(330, 264, 512, "factor", transposed_b=True, units=3, seed=20, norm="layernorm", late=True, coded=True),
    Case(300, 400, 768, "gelu", units=2, seed=23, coded=True),
    Case(200, 264, 768, "factor", transposed_b=True, units=3, seed=24, late=True, coded=True),
    Case(330, 264, 700, "bias", units=1, seed=25, late=True),
    Case(270, 136, 768, "residual", units=2, seed=26),
    Case(200, 264, 600, "plain", transposed_b=True, units=1, seed=27),
    Case(200, 136, 576, "gelu", units=1, seed=28, late=True),
    Case(200, 264, 768, "gelu", units=1, seed=29, norm="layernorm", coded=True),
    Case(200, 192, 704, "residual", units=2, seed=30, norm="layernorm", late=True),
    Case(200, 136, 768, "factor", transposed_b=True, units=2, seed=31, norm="rmsnorm", coded=True),
]


class Beside:
    """What a norm's part of the kernel reads and writes, random where it reads."""

    def __init__(self, case: Case, a_MK: torch.Tensor) -> None:
        columns = case.N if case.epilogue == "residual" else case.K
        self.case, self.takes = case, case.epilogue in ("gelu", "bias")
        self.shares_SM2 = torch.full((-(-columns // SHARE), case.M, 2), float("nan"))
        self.rstd_M = torch.rand(case.M) + 0.5
        self.weight_K, self.bias_K = (torch.randn(2, case.K) + 0.5).bfloat16()
        if self.takes:
            wide_MK = a_MK.double()
            centred_MK = wide_MK - (wide_MK.mean(1, keepdim=True) if case.norm == "layernorm" else 0)
            self.rstd_M = (centred_MK.square().mean(1) + EPS).rsqrt().float()

    def weights(self, b_NK: torch.Tensor, bias_N: torch.Tensor) -> torch.Tensor:
        """What the kernel takes for its weights, and the number of each column."""
        if not self.takes or self.case.norm is None:
            self.shift_N = torch.full((len(bias_N),), float("nan"))
            return b_NK
        scaled_NK = aligned(*b_NK.shape)
        wide_NK = b_NK.float() * self.weight_K.float()
        scaled_NK.copy_(wide_NK - wide_NK.mean(1, keepdim=True) if self.case.norm == "layernorm" else wide_NK)
        self.shift_N = bias_N.float() + b_NK.float() @ self.bias_K.float()
        return scaled_NK

    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        tensors = (self.shares_SM2, self.rstd_M, self.shift_N)
        return (ctypes.c_void_p * 3)(*(x.data_ptr() for x in tensors))

    def normed(self, a_MK: torch.Tensor) -> torch.Tensor:
        """What the product takes in A's place, in float64."""
        kind = self.case.norm
        if not self.takes or kind is None:
            return a_MK
        return norm_reference(a_MK.double(), self.weight_K.double(), self.bias_K.double(), eps=EPS, kind=kind)

    def check(self, out_MN: torch.Tensor) -> None:
        if self.case.epilogue == "residual":
            torch.testing.assert_close(self.shares_SM2, shares_of(out_MN), rtol=1e-5, atol=1e-4)


def shares_of(r_MK: torch.Tensor) -> torch.Tensor:
    """A row's sum and sum of squares over 64 columns each."""
    parts = r_MK.float().split(SHARE, dim=1)
    return torch.stack([torch.stack([part.sum(1), part.square().sum(1)], 1) for part in parts])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.epilogue}-{case.M}x{case.N}x{case.K}-{case.norm}{'-coded' * case.coded}"
)
def test_whole_kernel_matches_float64(case: Case, emulation: Any) -> None:
    torch.manual_seed(case.seed)
    M, N, K = case.M, case.N, case.K
    form = form_of(case.epilogue, case.transposed_b, case.coded)
    a, b = aligned(M, K), aligned(K, N) if case.transposed_b else aligned(N, K)
    bias = torch.randn(N).bfloat16()
    out = aligned(M, N).fill_(float("nan"))
    c, slope = beside(form, M, N)
    codes = coded(c, streaming=False)
    c_map, slope_map = (c, TILE_BOX), (slope, TILE_BOX)
    if case.coded:
        c = decoded(codes, M, N, streaming=False)
        c_map = slope_map = (code_lines(codes), (LINES, LINE))
    schedule, slots = scheduled(-(-M // stationary.TILE), -(-N // stationary.COLUMNS), case.units)
    sums, beside_norm = torch.zeros(slots, N), Beside(case, a)
    weights = beside_norm.weights(b, bias)
    maps = emulation.maps((a, TILE_BOX), (weights, TILE_BOX), c_map, (out, TILE_BOX), slope_map)
    seed_step, numbers, scale = dropping(M, N)
    pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    macros = stationary.defines(K, form, case.norm is not None)
    fault = emulation.compile(source("stationary", PARAMETERS, ARGUMENTS), macros, stationary.SOURCE.parent)(
        ctypes.byref(maps), pointer(schedule), schedule.shape[1], pointer(bias), pointer(sums), pointer(seed_step),
        numbers, scale, len(schedule), case.seed, int(case.late), beside_norm.pointers(), M,
    )  # fmt: skip
    assert fault is None
    right, right_slope = expected(form, beside_norm.normed(a), b, bias, c)
    total = right.sum(0)
    if form.factor and case.norm is not None:
        right = right * beside_norm.rstd_M.double()[:, None]
    roundings = 3e-3 if case.norm else 2e-3  # behind a norm one of the weights times its scale, too
    assert (out.double() - right).norm() <= roundings * right.norm()
    if form.slope:
        slope = decoded(codes, M, N, streaming=False) if case.coded else slope
        assert slopes_are(slope, right_slope, case.coded, case.norm is not None)
    if form.factor:
        assert (sums.double().sum(0) - total).norm() <= 1e-3 * total.norm()
    if case.norm is not None:
        beside_norm.check(out)
