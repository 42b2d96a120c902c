"""Attention's CUDA C++ compiled for the emulation, and its problems: cases in bf16 with what float64 makes of them."""

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
from ridgeline.ops.dropout import DropoutState, quantise

SOURCES = Path(__file__).parents[2] / "src/ridgeline/ops/attention/cuda"
EMULATION = Path(__file__).parent / "emulation"
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


def compiled(folder: Path, source: str, defines: dict[str, int], name: str = "kernel") -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
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

    def __init__(self, case: Case, queries: float = 1.0) -> None:
        """`queries`: a factor of the queries, for scores that are far apart."""
        torch.manual_seed(case.seed)
        self.q, self.k, self.v = heads(torch.randn(case.B, case.T, (case.H + 2 * case.G) * case.D).bfloat16(), case)
        self.q.mul_(queries)
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
