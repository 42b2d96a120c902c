"""The CUDA C++ of plain attention over windows of any length, whole kernels, run on the host against float64.

A launch has the shared memory that its kernel counts on.
"""

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch

from ops.attention_cases import Case, Map, Problem, compiled, error, heads, pointer, tensor_map, unwritten
from ridgeline.ops.attention import hopper
from ridgeline.ops.attention.plain import Launch

FORWARD = """#include "plain_forward.cu"
extern "C" int bytes() { return rl::Here::BYTES; }
extern "C" const char* run(const rl::TensorMap* m, rl::u16* o, float* lse, const int* n, float scale, int grid,
                           int random, int late) {
  return emulation::launch(grid, rl::THREADS, random, late, [=] {
    attention_plain_forward(m[0], m[1], m[2], o, lse, n[0], n[1], n[2], n[3], n[4], scale, n[5], n[6], n[7],
                            n[8]);
  });
}
"""
QUERIES = """#include "plain_queries.cu"
extern "C" int bytes() { return rl::Here::BYTES; }
extern "C" const char* run(const rl::TensorMap* m, const float* lse, rl::u16* dq, float* stats, float* sums,
                           const int* n, float scale, int grid, int random, int late) {
  return emulation::launch(grid, rl::THREADS, random, late, [=] {
    attention_plain_queries(m[0], m[1], m[2], m[3], m[4], lse, dq, stats, sums, n[0], n[1], n[2], n[3],
                            n[4], n[5], scale);
  });
}
"""
KEYS = """#include "plain_keys.cu"
extern "C" int bytes() { return rl::Here::BYTES; }
extern "C" const char* run(const rl::TensorMap* m, rl::u16* dk, rl::u16* dv, float* dk_parts, float* dv_parts,
                           float* sums, const int* n, float scale, int grid, int random, int late) {
  return emulation::launch(grid, rl::THREADS, random, late, [=] {
    attention_plain_keys(m[0], m[1], m[2], m[3], m[4], dk, dv, dk_parts, dv_parts, sums, n[0], n[1], n[2], n[3],
                         n[4], n[5], n[6], scale);
  });
}
"""


@dataclasses.dataclass(frozen=True)
class Plain:
    T: int
    H: int
    G: int
    D: int
    B: int = 1
    grid: int = 3
    groups: int = 2
    stages: int = 4
    parts: int = 1
    step: int = 64
    seed: int = 0
    late: bool = False
    scores: float = 1.0  # a factor of the queries

    def problem(self) -> Problem:
        x = Case(self.T, self.H, self.G, self.D, rows=0, p=0.0, B=self.B, seed=self.seed)
        return Problem(x, queries=self.scores)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "HEAD_WIDTH": self.D, "WARPGROUPS": self.groups, "RING_STAGES": self.stages, "BLOCKS_PER_PROCESSOR": 1,
            "RL_COLUMN_SUMS": 1,
            "STEP_COLUMNS": self.step,
        }  # fmt: skip

    @property
    def launch(self) -> Launch:
        return Launch(self.groups, self.stages, 1, self.step)

    @property
    def blocks(self) -> int:
        return -(-self.T // 64)

    @property
    def head_units(self) -> int:
        return -(-self.blocks // self.groups)


CASES = [
    Plain(T=256, H=2, G=2, D=32, grid=2, step=32, seed=1),  # a thread block takes several units, there and back
    Plain(T=330, H=2, G=1, D=32, grid=2, groups=4, step=32, stages=8, parts=2, seed=2, late=True),
    Plain(T=130, H=4, G=4, D=32, grid=1, step=32, seed=8),  # many rounds: a head's units follow each other
    Plain(T=330, H=2, G=2, D=32, groups=3, grid=2, stages=5, seed=3, late=True),
    Plain(T=330, H=2, G=1, D=64, groups=3, grid=2, seed=4),
    Plain(T=200, H=2, G=1, D=64, groups=3, parts=2, seed=5, late=True),
    Plain(T=37, H=2, G=2, D=64, grid=1, step=32, seed=6),
]
STEEP = [Plain(T=200, H=1, G=1, D=32, scores=30.0, seed=7, late=True)]


@pytest.mark.parametrize("case", CASES[1::2] + CASES[2:3] + STEEP, ids=str)
def test_forward(case: Plain, tmp_path: Path) -> None:
    x = case.problem()
    library = compiled(tmp_path, FORWARD, case.defines)
    assert library.bytes() == case.launch.smem(case.D, own=1)
    out = unwritten(case.B, case.T, case.H, case.D, dtype=torch.bfloat16)
    lse = unwritten(case.B, case.H, case.T)
    maps = (Map * 3)(*(tensor_map(y, (1, 64, 1, case.D)) for y in (x.q, x.k, x.v)))
    units = case.B * case.H * case.head_units
    divisor = case.B * case.H if units < 8 * case.grid else case.head_units
    numbers = (ctypes.c_uint32 * 9)(
        case.T, case.H, case.H // case.G, units, case.H * case.D, divisor,
        *(hopper.inverse(y) for y in (divisor, case.H, case.H // case.G)),
    )  # fmt: skip
    fault = library.run(
        maps, pointer(out), pointer(lse), numbers, ctypes.c_float(x.scale), case.grid, case.seed, case.late
    )
    assert fault is None
    assert error(out, x.out) < 4e-3
    assert error(lse, x.lse) < 1e-5


def key_sums(
    case: Plain, x: Problem, maps: list[Map], library: ctypes.CDLL, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV, (B, T, G, D), from the second kernel."""
    B, T, G, D, parts = case.B, case.T, case.G, case.D, case.parts
    width = (case.H + 2 * G) * D
    _, dk, dv = heads(unwritten(B, T, width, dtype=torch.bfloat16), Case(T, case.H, G, D, rows=0, p=0.0, B=B))
    sums = [unwritten(B, G, parts, T, D) for _ in range(2)]
    numbers = (ctypes.c_int * 7)(
        T, case.H, case.H // (G * parts), parts, B * G * parts * case.head_units, width, len(columns)
    )  # fmt: skip
    fault = library.run(
        (Map * 5)(*maps), *map(pointer, (dk, dv, *sums, columns)), numbers, ctypes.c_float(x.scale), case.grid,
        case.seed, case.late,
    )  # fmt: skip
    assert fault is None
    return (dk, dv) if parts == 1 else tuple(y.sum(2).transpose(1, 2) for y in sums)  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Plain, tmp_path: Path) -> None:
    x = case.problem()
    B, T, H, D = case.B, case.T, case.H, case.D
    width = (H + 2 * case.G) * D
    queries, keys = (compiled(tmp_path, source, case.defines, name) for source, name in ((QUERIES, "q"), (KEYS, "k")))
    assert queries.bytes() == case.launch.smem(D, own=3)
    assert keys.bytes() == case.launch.smem(D, own=2, stats=True)
    dq, _, _ = heads(unwritten(B, T, width, dtype=torch.bfloat16), Case(T, H, case.G, D, rows=0, p=0.0, B=B))
    out, lse = x.out.bfloat16(), x.lse.float()
    stats = unwritten(B * H, case.blocks * 128)
    box = (1, 64, 1, D)
    q, k, v, o, d_o = (tensor_map(y, box) for y in (x.q, x.k, x.v, out, x.d_out))
    columns = unwritten(4 * case.groups * case.grid + 1, width)  # and a row for nobody
    numbers = (ctypes.c_int * 6)(T, H, H // case.G, B * H * case.head_units, width, len(columns))
    fault = queries.run(
        (Map * 5)(q, k, v, o, d_o), pointer(lse), pointer(dq), pointer(stats), pointer(columns), numbers,
        ctypes.c_float(x.scale), case.grid, case.seed, case.late,
    )  # fmt: skip
    assert fault is None
    assert error(dq, x.gradients[0]) < 5e-3
    statistics = tensor_map(stats.view(torch.bfloat16), (1, 256))
    statistics.swizzle = 0
    dk, dv = key_sums(case, x, [q, k, v, d_o, statistics], keys, columns)
    assert error(dk, x.gradients[1]) < 5e-3
    assert error(dv, x.gradients[2]) < 5e-3
    bias = torch.cat([y.sum((0, 1)).flatten() for y in x.gradients])
    assert error(columns.sum(0), bias) < 5e-3
