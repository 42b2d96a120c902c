"""The CUDA C++ of short-window attention, whole kernels, run on the host by tests/ops/emulation against float64.

Each case runs under its own seed of the emulation's scheduler, with wgmma early or late, over unwritten (NaN) outputs.
"""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.ops._cuda.compiler import INCLUDE_DIRECTORY
from ridgeline.ops.attention.reference import attention_reference, skew
from ridgeline.ops.attention.short import backward_block, forward_smem
from ridgeline.ops.dropout import DropoutState, quantise

SOURCES = Path(__file__).parents[2] / "src/ridgeline/ops/attention/cuda"
EMULATION = Path(__file__).parent / "emulation"
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
SITE, FIRST_SAMPLE = 3, 5


class Map(ctypes.Structure):
    """The emulation's TensorMap."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_uint64 * 4),
        ("extent", ctypes.c_uint32 * 4),
        ("box", ctypes.c_uint32 * 4),
        ("swizzle", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 52),
    ]


@dataclass(frozen=True)
class Case:
    T: int
    H: int
    G: int
    D: int
    rows: int  # of the table; 0 for none
    p: float
    B: int = 1
    grid: int = 2
    seed: int = 0
    late: bool = False
    in_block: bool = False  # gradients of shared keys summed within a thread block

    @property
    def defines(self) -> dict[str, int]:
        return {
            "HEAD_WIDTH": self.D,
            "ROW_BLOCKS": -(-self.T // 64),
            "RL_RELATIVE": int(self.rows > 0),
            "RL_DROPOUT": int(self.p > 0),
        }


CASES = [
    Case(T=256, H=4, G=2, D=64, rows=256, p=0.2, B=2, grid=1, seed=9),  # a warpgroup takes several heads
    Case(T=250, H=4, G=2, D=64, rows=256, p=0.2, B=2, grid=1, seed=10, late=True),
    Case(T=256, H=7, G=7, D=32, rows=0, p=0.0, grid=1, seed=11, late=True),
    Case(T=256, H=2, G=2, D=64, rows=300, p=0.2, seed=1),
    Case(T=177, H=3, G=3, D=64, rows=177, p=0.2, grid=1, seed=2, late=True),
    Case(T=100, H=4, G=2, D=64, rows=0, p=0.0, seed=3, late=True),
    Case(T=37, H=3, G=3, D=32, rows=64, p=0.3, grid=1, seed=4),
    Case(T=256, H=3, G=3, D=32, rows=256, p=0.2, grid=1, seed=7, late=True),
    Case(T=128, H=5, G=5, D=64, rows=200, p=0.2, grid=1, seed=8),
    Case(T=256, H=4, G=1, D=32, rows=0, p=0.0, grid=3, seed=5),
    Case(T=150, H=4, G=2, D=32, rows=0, p=0.1, B=2, grid=2, seed=6, late=True, in_block=True),
]
HALVED = [  # half-heads are at most four times the blocks
    Case(T=256, H=4, G=1, D=32, rows=0, p=0.0, grid=3, seed=9),
    Case(T=200, H=2, G=2, D=32, rows=0, p=0.1, grid=1, seed=10, late=True),
]


def compiled(folder: Path, source: str, defines: dict[str, int]) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    file.write_text(source, encoding="utf-8")
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    paths = [f"-I{path}" for path in (EMULATION, SOURCES, INCLUDE_DIRECTORY)]
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", "-w"]
    subprocess.run([compiler, *options, *macros, *paths, file, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.c_char_p
    return loaded


def tensor_map(x: Tensor, box: tuple[int, ...]) -> Map:
    pad = 4 - x.dim()
    return Map(
        x.data_ptr(),
        (ctypes.c_uint64 * 4)(*x.stride()[::-1], *[0] * pad),
        (ctypes.c_uint32 * 4)(*x.shape[::-1], *[1] * pad),
        (ctypes.c_uint32 * 4)(*box[::-1], *[1] * pad),
        2 * x.shape[-1],
    )


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def heads(joint: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as views of a joint (B, T, (H + 2 G) · D) buffer."""
    widths = [case.H * case.D, case.G * case.D, case.G * case.D]
    q, k, v = (x.unflatten(-1, (-1, case.D)) for x in joint.split(widths, -1))
    return q, k, v


class Problem:
    """Inputs in bf16 and what float64 makes of them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed)
        self.q, self.k, self.v = heads(torch.randn(case.B, case.T, (case.H + 2 * case.G) * case.D).bfloat16(), case)
        self.table = (torch.randn(case.rows, case.D) / 2).bfloat16() if case.rows else None
        self.d_out = torch.randn(case.B, case.T, case.H, case.D).bfloat16()
        self.scale = case.D**-0.5
        self.seed_step = torch.tensor([1234567890123, 77])
        self.threshold, self.kept = quantise(case.p)
        state = DropoutState(self.seed_step, FIRST_SAMPLE) if case.p else None
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        if self.table is not None:
            leaves.append(self.table.double().requires_grad_())
        q, k, v, table = (*leaves, None)[:4]
        out = attention_reference(q, k, v, table, scale=self.scale, p=case.p, dropout=state, site=SITE)
        self.gradients = torch.autograd.grad(out, leaves, self.d_out.double())
        self.out = out.detach()
        q, k = q.detach().transpose(1, 2), k.detach().transpose(1, 2).repeat_interleave(case.H // case.G, 1)
        scores = q @ k.transpose(-1, -2)
        if table is not None:
            scores = scores + skew(q @ table.detach()[-case.T :].t())
        future = torch.ones(case.T, case.T, dtype=torch.bool).triu(1)
        self.lse = (scores * self.scale).masked_fill(future, float("-inf")).logsumexp(-1)


def error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


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
    library = compiled(tmp_path, FORWARD, case.defines | groups)
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
    if x.table is not None:
        by_distance = parts[:blocks].sum(0)[:T]
        assert error(by_distance.flip(0), x.gradients[3][-T:]) < 5e-3
