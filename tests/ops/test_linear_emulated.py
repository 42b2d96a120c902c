"""The CUDA C++ of the Hopper GEMM, the whole kernel, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear import gemm
from ridgeline.ops.linear.gemm import Config, Form, defines, divide

SOURCE = """#include "gemm_sm90.cu"
extern "C" const char* run(const rl::TensorMap* m, const int* schedule, int segments, const rl::u16* bias,
                           float* partials, const rl::i64* seed_step, const int* n, float scale, int grid, int random,
                           int late) {
  return emulation::launch(grid, 384, random, late, [=] {
    gemm(m[0], m[1], m[2], m[3], m[4], reinterpret_cast<const int4*>(schedule), segments, bias, partials, seed_step,
         n[0], n[1], n[2], scale, n[3], n[4]);
  });
}
"""
SITE, FIRST_SAMPLE, P = 3, 5, 0.3


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    epilogue: str  # plain, bias, gelu, residual, derivative
    config: Config
    transposed_b: bool = False
    units: int = 2
    seed: int = 0
    late: bool = False


CASES = [
    Case(300, 200, 100, "gelu", Config(tile_m=64), units=2, seed=1),
    Case(520, 104, 136, "residual", Config(tile_m=64, stages=3), units=1, seed=2, late=True),
    Case(450, 264, 72, "derivative", Config(tile_m=64), transposed_b=True, units=2, seed=3, late=True),
    Case(390, 130, 70, "bias", Config(), units=1, seed=4),
    Case(300, 136, 136, "plain", Config(tile_m=64, resident=False), transposed_b=True, units=1, seed=5, late=True),
    Case(300, 256, 72, "residual", Config(tile_m=64, resident=False), units=1, seed=6, late=True),
    Case(200, 260, 64, "gelu", Config(tile_m=64, tile_n=256), units=1, seed=7),
    Case(390, 200, 136, "gelu", Config(resident=False), units=1, seed=8, late=True),
    Case(390, 200, 136, "derivative", Config(resident=False), transposed_b=True, units=2, seed=9),
]


def run(case: Case, emulation: Any, a: Tensor, b: Tensor, bias: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, pre-activation and column sums."""
    M, N, K = case.M, case.N, case.K
    form = Form(
        transposed_b=case.transposed_b,
        bias=case.epilogue in ("bias", "gelu", "residual"),
        gelu="exact" if case.epilogue == "gelu" else None,
        pre=case.epilogue == "gelu",
        residual=case.epilogue == "residual",
        dropout=case.epilogue == "residual",
        derivative=case.epilogue == "derivative",
    )
    macros = defines(case.config, K, form)
    config = case.config.fitted(macros["K_CHUNKS"], form.reads_c)
    work, slots = divide(-(-M // config.tile_m), -(-N // config.tile_n), case.units)
    longest = max(map(len, work)) + 1
    table = [[*mine, *[(0, 0, 0, 0)] * (longest - len(mine))] for mine in work]
    schedule = torch.tensor(table, dtype=torch.int32)
    out, pre = (torch.full((M, -(-N // 8) * 8), float("nan")).bfloat16()[:, :N] for _ in range(2))
    sums = torch.zeros(slots * 8, N)
    b_box = (64, 64) if case.transposed_b else (config.tile_n, 64)
    maps = emulation.maps((a, (config.piece_rows, 64)), (b, b_box), *((x, (16, 64)) for x in (c, out, pre)))
    threshold, scale = quantise(P)
    seed_step = torch.tensor([77, 9])
    pointer = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    numbers = (ctypes.c_int * 5)(N, SITE, threshold, M // 2, FIRST_SAMPLE)
    fault = emulation.compile(SOURCE, macros, gemm.SOURCE.parent)(
        ctypes.byref(maps), pointer(schedule), longest, pointer(bias), pointer(sums), pointer(seed_step),
        numbers, ctypes.c_float(scale), len(work), case.seed, int(case.late),
    )  # fmt: skip
    assert fault is None
    return out, pre, sums.sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.epilogue}-{case.M}x{case.N}x{case.K}")
def test_whole_kernel_matches_float64(case: Case, emulation: Any) -> None:
    torch.manual_seed(case.seed)
    M, N, K = case.M, case.N, case.K
    normal = lambda rows, width: torch.randn(rows, -(-width // 8) * 8).bfloat16()[:, :width]  # noqa: E731
    a, b, c = normal(M, K), normal(K, N) if case.transposed_b else normal(N, K), normal(M, N)
    bias = torch.randn(N).bfloat16()
    out, pre, sums = run(case, emulation, a, b, bias, c)
    product = a.double() @ (b.double() if case.transposed_b else b.double().t())
    if case.epilogue in ("bias", "gelu", "residual"):
        product = product + bias[:N].double()
    expected = product
    if case.epilogue == "gelu":
        expected = torch.nn.functional.gelu(product)
        assert (pre.double() - product).norm() <= 2e-3 * product.norm()
    elif case.epilogue == "residual":
        state = DropoutState(torch.tensor([77, 9]), FIRST_SAMPLE)
        keep = hidden_keep(state, SITE, (2, M // 2, N), P, torch.device("cpu")).view(M, N)
        expected = c.double() + product * keep * quantise(P)[1]
    elif case.epilogue == "derivative":
        u = c.double().requires_grad_()
        (slope,) = torch.autograd.grad(torch.nn.functional.gelu(u).sum(), u)
        expected = product * slope
        assert (sums.double() - expected.sum(0)).norm() <= 1e-4 * expected.sum(0).norm()
    assert (out.double() - expected).norm() <= 2e-3 * expected.norm()
