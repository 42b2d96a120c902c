"""The product with its weights in registers, the whole kernel, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear import stationary
from ridgeline.ops.linear.gemm import Form, divide

SOURCE = """#include "stationary_sm90.cu"
extern "C" const char* run(const rl::TensorMap* m, const int* schedule, int segments, const rl::u16* bias,
                           float* partials, const rl::i64* seed_step, const int* n, float scale, int grid, int random,
                           int late) {
  return emulation::launch(grid, 384, random, late, [=] {
    stationary(m[0], m[1], m[2], m[3], m[4], reinterpret_cast<const int4*>(schedule), segments, bias, partials,
               seed_step, n[0], n[1], n[2], scale, n[3], n[4]);
  }, CLUSTER);
}
"""


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    epilogue: str  # plain, bias, gelu, residual, derivative
    transposed_b: bool = False
    units: int = 2
    seed: int = 0
    late: bool = False
    cluster: int = 1


CASES = [
    Case(300, 200, 200, "gelu", units=2, seed=1),
    Case(330, 136, 72, "derivative", transposed_b=True, units=2, seed=2, late=True),
    Case(200, 130, 512, "bias", units=1, seed=3, late=True),
    Case(390, 128, 256, "plain", transposed_b=True, units=1, seed=4),
    Case(450, 264, 136, "derivative", units=1, seed=5),
    Case(300, 400, 200, "gelu", units=2, seed=6, cluster=2),
    Case(450, 132, 136, "residual", units=2, seed=8, late=True),
    Case(41, 136, 40, "bias", units=6, seed=9),
    Case(330, 264, 136, "derivative", transposed_b=True, units=1, seed=7, late=True, cluster=2),
]


SITE, FIRST_SAMPLE, P = 3, 5, 0.3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.epilogue}-{case.M}x{case.N}x{case.K}")
def test_whole_kernel_matches_float64(case: Case, emulation: Any) -> None:
    torch.manual_seed(case.seed)
    M, N, K = case.M, case.N, case.K
    normal = lambda rows, width: torch.randn(rows, -(-width // 8) * 8).bfloat16()[:, :width]  # noqa: E731
    a, b, c = normal(M, K), normal(K, N) if case.transposed_b else normal(N, K), normal(M, N)
    bias, biased = torch.randn(N).bfloat16(), case.epilogue in ("bias", "gelu", "residual")
    out, pre = (normal(M, N).fill_(float("nan")) for _ in range(2))
    form = Form(
        transposed_b=case.transposed_b,
        bias=biased,
        gelu="exact" if case.epilogue == "gelu" else None,
        pre=case.epilogue == "gelu",
        residual=case.epilogue == "residual",
        dropout=case.epilogue == "residual",
        derivative=case.epilogue == "derivative",
    )
    macros = stationary.defines(K, form, case.cluster)
    work, slots = divide(-(-M // stationary.TILE), -(-N // (stationary.COLUMNS * case.cluster)), case.units)
    longest = max(map(len, work)) + 1
    schedule = torch.tensor([[*mine, *[(0, 0, 0, 0)] * (longest - len(mine))] for mine in work], dtype=torch.int32)
    sums = torch.zeros(slots, N)
    pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    maps = emulation.maps((a, (64 // case.cluster, 64)), *((x, (64, 64)) for x in (b, c, out, pre)))
    threshold, scale = quantise(P)
    numbers = (ctypes.c_int * 5)(N, SITE, threshold, M // 2, FIRST_SAMPLE)
    seed_step = torch.tensor([77, 9])
    fault = emulation.compile(SOURCE, macros, stationary.SOURCE.parent)(
        ctypes.byref(maps), pointer(schedule), longest, pointer(bias), pointer(sums), pointer(seed_step),
        numbers, ctypes.c_float(scale), len(work) * case.cluster, case.seed, int(case.late),
    )  # fmt: skip
    assert fault is None
    expected = a.double() @ (b.double() if case.transposed_b else b.double().t())
    if biased:
        expected = expected + bias.double()
    if case.epilogue == "gelu":
        assert (pre.double() - expected).norm() <= 2e-3 * expected.norm()
        expected = torch.nn.functional.gelu(expected)
    elif case.epilogue == "residual":
        state = DropoutState(seed_step, FIRST_SAMPLE)
        keep = hidden_keep(state, SITE, (2, M // 2, N), P, torch.device("cpu")).view(M, N)
        expected = c.double() + expected * keep * scale
    elif case.epilogue == "derivative":
        u = c.double().requires_grad_()
        (slope,) = torch.autograd.grad(torch.nn.functional.gelu(u).sum(), u)
        expected = expected * slope
        assert (sums.double().sum(0) - expected.sum(0)).norm() <= 1e-3 * expected.sum(0).norm()
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()
