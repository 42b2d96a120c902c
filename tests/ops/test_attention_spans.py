"""The CUDA C++ of plain attention's backward pass in one kernel, whole kernels, run on the host against float64.

What a kernel has not written yet is NaN, in shared memory too; a launch has the shared memory that it counts on.
"""

import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ops.attention_cases import Case, Map, Problem, compiled, error, heads, pointer, tensor_map, unwritten
from ridgeline.ops.attention import hopper, spans

BACKWARD = """#include "plain_backward.cu"
extern "C" int bytes() { return rl::Here::BYTES; }
extern "C" const char* run(const rl::TensorMap* m, const rl::u16* o, const float* lse, rl::u16* dq, rl::u16* dk,
                           rl::u16* dv, float* dq_sums, float* dk_parts, float* dv_parts, float* sums, rl::u32* notes,
                           float* noted, const int* n, float scale, int grid, int random, int late) {
  const int blocks = rl::ceil_div(n[0], 64), spans = rl::ceil_div(blocks, rl::SPAN), tile = 64 * rl::D;
  emulation::machine.given = [=](const rl::u32* at) {  // what is there of dQ when it is said to be
    const int first = (at - notes) / spans * blocks + (at - notes) % spans * rl::SPAN;
    if (std::isnan(noted[first * tile])) std::copy_n(dq_sums + first * tile, rl::SPAN * tile, noted + first * tile);
  };
  return emulation::launch(grid, rl::THREADS, random, late, [=] {
    attention_plain_backward(m[0], m[1], m[2], m[3], o, lse, dq, dk, dv, dq_sums, dk_parts, dv_parts, sums, notes,
                             n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], scale, n[10], n[11], n[12],
                             n[13]);
  });
}
"""
SUM = """#include "plain_sum.cu"
extern "C" const char* run(const float* sums, rl::u16* dq, float* columns, const rl::u32* notes,
                           const float4* dk_parts, const float4* dv_parts, rl::u16* dk, rl::u16* dv, const int* n,
                           float scale, int grid) {
  return emulation::launch(grid, 128, 0, false, [=] {
    attention_plain_sum(sums, dq, columns, notes, dk_parts, dv_parts, dk, dv, n[0], n[1], n[2], n[3], n[4], n[5], n[6],
                        n[7], n[8], scale);
  });
}
"""
D = spans.WIDTH


@dataclass(frozen=True)
class Spans:
    T: int
    H: int
    G: int
    B: int = 1
    grid: int = 1
    parts: int = 1
    key_parts: int = 1
    seed: int = 0
    late: bool = False

    @property
    def case(self) -> Case:
        return Case(self.T, self.H, self.G, D, rows=0, p=0.0, B=self.B, seed=self.seed)

    @property
    def blocks(self) -> int:
        return -(-self.T // 64)

    @property
    def shared(self) -> int:
        """Query heads that a unit takes."""
        return self.H // (self.G * self.parts)


CASES = [
    Spans(T=256, H=2, G=2, B=2, grid=2, seed=1),  # a span for each unit, and several units
    Spans(T=600, H=2, G=1, grid=1, seed=2, late=True),  # three spans of both heads, the last one short
    Spans(T=600, H=2, G=1, grid=2, key_parts=2, seed=3, late=True),  # there and back
    Spans(T=780, H=2, G=2, grid=3, key_parts=2, seed=4),  # a span of one tile between others
    Spans(T=1100, H=1, G=1, grid=2, key_parts=2, seed=7),  # three spans and two, the last one short
    Spans(T=330, H=4, G=2, grid=4, parts=2, key_parts=2, seed=5),
    Spans(T=37, H=3, G=3, B=2, grid=2, seed=6, late=True),  # a tile for each unit
]


def add_parts(
    x: Spans,
    folder: Path,
    sums: torch.Tensor,
    notes: torch.Tensor,
    columns: torch.Tensor,
    parts: list[torch.Tensor],
    gradients: tuple[torch.Tensor, ...],
    scale: float,
) -> None:
    """The second kernel: dQ from the parts of a head's keys, dK and dV from those of a key head's query heads."""
    library = compiled(folder, SUM, spans.defines(torch.bfloat16, sums=True), "sum")
    dq, dk, dv = gradients
    width = columns.shape[1]
    numbers = (ctypes.c_int * 9)(x.T, x.H, x.shared, x.parts, x.key_parts, x.B, dq.stride(1), dk.stride(1), width)
    grid = x.B * x.H * x.blocks + (-(-2 * dk.numel() // 512) if x.parts > 1 else 0)
    pointers = map(pointer, (sums, dq, columns, notes, *parts, dk, dv))
    assert library.run(*pointers, numbers, ctypes.c_float(scale), grid) is None


def check_notes(x: Spans, sums: torch.Tensor, notes: torch.Tensor, noted: torch.Tensor) -> None:
    """Each unit's share of dQ was all there when it said so, and it said so where another kernel waits for it."""
    for unit, span in itertools.product(range(len(sums)), range(notes.shape[-1])):
        last = spans.SPAN * (span + 1) - 1  # tile of the span
        said = unit % x.key_parts <= span and last + spans.SQUARES + 1 < x.blocks
        assert notes[unit, :, span].tolist() == [said] * x.shared
        tiles = slice(last + 1 - spans.SPAN, last + 1)
        if said:
            assert torch.equal(noted[unit, :, tiles], sums[unit, :, tiles])
        else:
            assert noted[unit, :, tiles].isnan().all()


@pytest.mark.parametrize("x", CASES, ids=str)
def test_backward(x: Spans, tmp_path: Path) -> None:
    problem = Problem(x.case)
    library = compiled(tmp_path, BACKWARD, spans.defines(torch.bfloat16, sums=True))
    assert library.bytes() == spans.SMEM
    width, units = (x.H + 2 * x.G) * D, x.B * x.G * x.parts * x.key_parts
    dq, dk, dv = heads(unwritten(x.B, x.T, width, dtype=torch.bfloat16), x.case)
    dq_sums = unwritten(units if x.key_parts > 1 else x.grid, x.shared, x.blocks, 64 * D)
    notes = torch.full((units, x.shared, -(-x.blocks // spans.SPAN)), 7, dtype=torch.int32)
    noted = unwritten(*dq_sums.shape)
    parts = [unwritten(x.B, x.G, x.parts, x.T, D) for _ in range(2)]
    columns = unwritten(4 * max(spans.GROUPS * x.grid, x.B * x.blocks) + 1, width)  # and a row for nobody
    out, lse = problem.out.bfloat16().contiguous(), problem.lse.float()
    maps = (Map * 4)(*(tensor_map(y, (1, 64, 1, D)) for y in (problem.q, problem.k, problem.v, problem.d_out)))
    inverses = [hopper.inverse(y) for y in (x.key_parts, x.G * x.parts, x.parts)]
    numbers = (ctypes.c_uint32 * 14)(
        x.T, x.H, x.shared, x.parts, x.key_parts, units, out.stride(1), width, width, len(columns), x.G * x.parts,
        *inverses,
    )  # fmt: skip
    fault = library.run(
        maps, *map(pointer, (out, lse, dq, dk, dv, dq_sums, *parts, columns, notes, noted)), numbers,
        ctypes.c_float(problem.scale), x.grid, x.seed, x.late,
    )  # fmt: skip
    assert fault is None
    if x.key_parts > 1:
        check_notes(x, dq_sums, notes, noted)
        add_parts(x, tmp_path, dq_sums, notes, columns, parts, (dq, dk, dv), problem.scale)
    for found, expected in zip((dq, dk, dv), problem.gradients, strict=True):
        assert error(found, expected) < 5e-3
    bias = torch.cat([y.sum((0, 1)).flatten() for y in problem.gradients])
    assert error(columns.sum(0), bias) < 5e-3
    assert not columns[:, x.H * D : (x.H + x.G) * D].any()  # a bias of keys has no gradient
