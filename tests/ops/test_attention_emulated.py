"""The CUDA C++ of short-window attention, whole kernels, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
from pathlib import Path

import pytest
import torch

from ops.attention_cases import (
    FIRST_SAMPLE,
    SITE,
    Case,
    Map,
    Problem,
    compiled,
    error,
    heads,
    pointer,
    tensor_map,
    unwritten,
)
from ridgeline.ops.attention.short import backward_block, forward_blocks, forward_smem

FORWARD = """#include "forward.cu"
extern "C" const char* run(const rl::TensorMap* m, const rl::u16* q, rl::u16* o, float* lse, const rl::i64* seed_step,
                           rl::i64 q_batch, const int* n, float scale, float kept, unsigned threshold, int grid,
                           int random, int late) {
  return emulation::launch(grid, 128 * WARPGROUPS, random, late, [=] {
    attention_forward(m[0], m[1], m[2], m[3], q, o, lse, seed_step, q_batch, n[0], n[1], n[2], n[3], n[4], n[5], n[6],
                      n[7], scale, kept, n[8], n[9], threshold);
  });
}
"""
BACKWARD = """#include "backward.cu"
extern "C" const char* run(const rl::TensorMap* m, const float* lse, rl::u16* dq, rl::u16* dk, rl::u16* dv,
                           float* dk_heads, float* dv_heads, float* parts, float* carry, float* sums,
                           const rl::i64* seed_step, const int* n, float scale, float kept, unsigned threshold,
                           int grid, int random, int late) {
  return emulation::launch(grid, rl::THREADS, random, late, [=] {
    attention_backward(m[0], m[1], m[2], m[3], m[4], m[5], lse, dq, dk, dv, dk_heads, dv_heads, parts, carry, sums,
                       seed_step, n[0], n[1], n[2], n[3], n[4], n[5], n[6], scale, kept, n[7], n[8], threshold);
  });
}
"""
CASES = [
    Case(T=256, H=4, G=2, D=64, rows=256, p=0.2, B=2, grid=1, seed=9),  # a warpgroup takes several heads
    Case(T=250, H=4, G=2, D=64, rows=256, p=0.2, B=2, grid=1, seed=10, late=True),
    Case(T=256, H=7, G=7, D=32, rows=0, p=0.0, grid=1, seed=11, late=True),
    Case(T=256, H=2, G=2, D=64, rows=300, p=0.2, seed=1),
    Case(T=177, H=3, G=3, D=64, rows=177, p=0.2, grid=1, seed=2, late=True),
    Case(T=100, H=4, G=2, D=64, rows=0, p=0.0, seed=3, late=True),
    Case(T=256, H=3, G=3, D=64, rows=0, p=0.1, grid=1, seed=12, late=True),
    Case(T=37, H=3, G=3, D=32, rows=64, p=0.3, grid=1, seed=4),
    Case(T=37, H=7, G=7, D=32, rows=64, p=0.3, grid=1, seed=4),
    Case(T=16, H=4, G=2, D=64, rows=16, p=0.2, B=2, grid=1, seed=3, late=True),
    Case(T=256, H=3, G=3, D=32, rows=256, p=0.2, grid=1, seed=7, late=True),
    Case(T=128, H=5, G=5, D=64, rows=200, p=0.2, grid=1, seed=8),
    Case(T=256, H=4, G=1, D=32, rows=0, p=0.0, grid=3, seed=5),
    Case(T=150, H=4, G=2, D=32, rows=0, p=0.1, B=2, grid=2, seed=6, late=True, in_block=True),
]
HALVED = [  # half-heads are at most four times the blocks
    Case(T=256, H=4, G=1, D=32, rows=0, p=0.0, grid=3, seed=9),
    Case(T=200, H=2, G=2, D=32, rows=0, p=0.1, grid=1, seed=10, late=True),
]


@pytest.mark.parametrize(("D", "blocks", "relative"), [(64, 4, 1), (64, 3, 1), (64, 2, 1), (32, 4, 1), (64, 4, 0)])
def test_shared_memory_of_a_launch_is_that_of_the_kernel(D: int, blocks: int, relative: int, tmp_path: Path) -> None:
    defines = {"HEAD_WIDTH": D, "ROW_BLOCKS": blocks, "RL_RELATIVE": relative, "RL_DROPOUT": 1, "RL_GROUPED": 0}
    source = """#include "schedule.cuh"
    extern "C" int bytes() { return rl::BARRIERS_AT + 8 * rl::BARRIERS; }
    extern "C" int threads() { return rl::THREADS; }
    extern "C" void run() {}
    """
    library = compiled(tmp_path, source, defines)
    threads, smem = backward_block(blocks, D, bool(relative), True)
    assert (library.threads(), library.bytes()) == (threads, smem)
    assert smem <= 227 * 1024


@pytest.mark.parametrize(("D", "blocks", "relative"), [(64, 4, 1), (64, 4, 0), (64, 3, 1), (32, 4, 0)])
def test_shared_memory_of_a_forward_launch_is_that_of_the_kernel(
    D: int, blocks: int, relative: int, tmp_path: Path
) -> None:
    defines = {"HEAD_WIDTH": D, "ROW_BLOCKS": blocks, "RL_RELATIVE": relative, "RL_DROPOUT": 0, "WARPGROUPS": 3}
    source = """#include "forward.cu"
    extern "C" int bytes() { return rl::BARRIERS_AT + 8 * rl::BARRIERS; }
    extern "C" void run() {}
    """
    smem = forward_smem(blocks, D, bool(relative), 3)
    assert compiled(tmp_path, source, defines).bytes() == smem
    assert smem <= 227 * 1024


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, tmp_path: Path) -> None:
    check_forward(case, {"WARPGROUPS": 3}, tmp_path)


@pytest.mark.parametrize("case", HALVED, ids=str)
def test_forward_of_few_heads(case: Case, tmp_path: Path) -> None:
    check_forward(case, {"WARPGROUPS": 4, "RL_HALVES": 1}, tmp_path)


def check_forward(case: Case, groups: dict[str, int], tmp_path: Path) -> None:
    x = Problem(case)
    blocks = forward_blocks(case.T, case.B * case.H, case.grid)
    library = compiled(tmp_path, FORWARD, case.defines | groups | {"ROW_BLOCKS": blocks})
    out = unwritten(case.B, case.T, case.H, case.D, dtype=torch.bfloat16)
    lse = unwritten(case.B, case.H, case.T)
    box = (1, 64, 1, case.D)
    table = tensor_map(x.table, (64, case.D)) if x.table is not None else Map()
    maps = (Map * 4)(tensor_map(x.q, box), tensor_map(x.k, box), tensor_map(x.v, box), table)
    numbers = (ctypes.c_int * 10)(
        case.T, case.rows, case.H, case.H // case.G, case.B * case.H, x.q.stride(1), x.q.stride(2), case.H * case.D,
        SITE, FIRST_SAMPLE * case.H,
    )  # fmt: skip
    fault = library.run(
        maps, pointer(x.q), pointer(out), pointer(lse), pointer(x.seed_step), ctypes.c_int64(x.q.stride(0)), numbers,
        ctypes.c_float(x.scale), ctypes.c_float(x.kept), x.threshold, case.grid, case.seed, case.late,
    )  # fmt: skip
    assert fault is None
    assert error(out, x.out) < 4e-3
    assert error(lse, x.lse) < 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, tmp_path: Path) -> None:
    x = Problem(case)
    grouping = 0 if case.G == case.H else 2 if case.in_block else 1
    library = compiled(tmp_path, BACKWARD, case.defines | {"RL_GROUPED": grouping, "RL_COLUMN_SUMS": 1})
    B, T, H, G, D, width = case.B, case.T, case.H, case.G, case.D, (case.H + 2 * case.G) * case.D
    dq, dk, dv = heads(unwritten(B, T, width, dtype=torch.bfloat16), case)
    dk_heads, dv_heads = unwritten(B, H, T, D), unwritten(B, H, T, D)
    parts, carry = unwritten(case.grid, -(-T // 64) * 64, D), unwritten(case.grid, 64, D)
    sums = unwritten(4 * case.grid, width)
    box = (1, 64, 1, D)
    out, lse = x.out.bfloat16(), x.lse.float()
    table = tensor_map(x.table, (64, D)) if x.table is not None else Map()
    maps = (Map * 6)(
        tensor_map(x.q, box), tensor_map(x.k, box), tensor_map(x.v, box), tensor_map(out, (1, 16, 1, D)),
        tensor_map(x.d_out, box), table,
    )  # fmt: skip
    numbers = (ctypes.c_int * 9)(T, case.rows, H, H // G, B * H, width, width, SITE, FIRST_SAMPLE * H)
    fault = library.run(
        maps, *map(pointer, (lse, dq, dk, dv, dk_heads, dv_heads, parts, carry, sums, x.seed_step)), numbers,
        ctypes.c_float(x.scale), ctypes.c_float(x.kept), x.threshold, case.grid, case.seed, case.late,
    )  # fmt: skip
    assert fault is None
    if grouping == 1:
        dk, dv = (y.view(B, G, H // G, T, D).sum(2).transpose(1, 2) for y in (dk_heads, dv_heads))
    assert error(dq, x.gradients[0]) < 5e-3
    assert error(dk, x.gradients[1]) < 5e-3
    assert error(dv, x.gradients[2]) < 5e-3
    blocks = min(case.grid, B * H)
    bias = torch.cat([y.sum((0, 1)).flatten() for y in x.gradients[:3]])
    assert error(sums[: 4 * blocks].sum(0), bias) < 5e-3
    assert not sums[: 4 * blocks, H * D : (H + G) * D].any()  # a bias of keys has no gradient
    if x.table is not None:
        by_distance = parts[:blocks].sum(0)[:T]
        assert error(by_distance.flip(0), x.gradients[3][-T:]) < 5e-3
