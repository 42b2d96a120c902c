"""The CUDA C++ of ops/mlp, whole kernels, run on the host by tests/ops/emulation against float64.

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
from torch.nn import functional

from ridgeline.ops._cuda.compiler import INCLUDE_DIRECTORY
from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise
from ridgeline.ops.linear import Masks
from ridgeline.ops.mlp import kernels
from ridgeline.ops.mlp.kernels import ABREAST, WHOLE, Config
from ridgeline.ops.norm.reference import NormKind

EMULATION = Path(__file__).parent / "emulation"
SITE, FIRST_SAMPLE, SEED_STEP, EPS = 3, 5, (77, 9), 1e-5
JOIN = ["const u16*"] * 3 + ["u16*"] * 2 + ["float*"] * 2  # residual, weight, bias, r, h, mean, rstd
GRADIENT = ["const u16*"] * 2 + ["const float*"] * 2 + ["const u16*"] + ["u16*"] * 2 + ["float*"]
# each kernel's file, number of maps, pointers, and what comes after them: eps, or the stride of the partial sums
KERNELS = {
    "mlp_forward": ("forward.cu", 4, ["const u16*", "const u16*", "uint4*", *JOIN], ""),
    "mlp_backward": ("backward.cu", 4, ["const uint4*", "float*", *GRADIENT], "n[6], "),
    "project_forward": ("project.cu", 2, ["const u16*", *JOIN], "1e-5f, "),
    "project_backward": ("project.cu", 2, GRADIENT, "n[6], "),
}


class Map(ctypes.Structure):
    """The emulation's TensorMap."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_uint64 * 4),
        ("extent", ctypes.c_uint32 * 4),
        ("box", ctypes.c_uint32 * 4),
        ("swizzle", ctypes.c_uint32),
        ("outer_extent", ctypes.c_uint32),
        ("outer_box", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 44),
    )


def rows_map(x: Tensor, rows: int, columns: int = 64) -> Map:
    rank = [1, 1]
    return Map(
        x.data_ptr(), (ctypes.c_uint64 * 4)(*x.stride()[::-1], 0, 0), (ctypes.c_uint32 * 4)(*x.shape[::-1], *rank),
        (ctypes.c_uint32 * 4)(columns, rows, *rank), 2 * columns, 1, 1,
    )  # fmt: skip


def owned_map(x: Tensor) -> Map:
    C, K = x.shape
    return Map(
        x.data_ptr(), (ctypes.c_uint64 * 4)(1, K, 8 * K, 2 * K), (ctypes.c_uint32 * 4)(K, 2, 4, 4),
        (ctypes.c_uint32 * 4)(64, 2, 4, 4), 128, C // 32, 4,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    part: kernels.Part
    N: int
    C: int
    inner: int  # F of the MLP, K of a projection
    config: Config
    rms: bool = False
    tanh: bool = False
    bias: bool = True
    p: float = 0.0
    residual: bool = True
    blocks: int = 1
    seed: int = 0
    late: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.part}-{self.N}x{self.C}x{self.inner}-{self.config.abreast}"


def normal(case: Case, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return (torch.randn(shape) * scale + shift).to(case.dtype)


def unwritten(case: Case, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, float("nan")).to(dtype or case.dtype)


@dataclass
class Build:
    """What a case compiles and launches: macros, tensor maps, the pointers before the join's."""

    folder: Path
    config: Config
    macros: dict[str, int]
    maps: list[Map]
    lead: list[Tensor | None]


def source(part: kernels.Part) -> str:
    file, maps, kinds, extra = KERNELS[part]
    first = [*(f"m[{i}]" for i in range(maps)), *(f"({kind})p[{i}]" for i, kind in enumerate(kinds))]
    eps = "1e-5f, " if part == "mlp_forward" else ""
    state = f"(const i64*)p[{len(kinds)}]"
    return f"""#include "{file}"
using namespace rl;
extern "C" const char* run(const TensorMap* m, void* const* p, const int* n, float scale, int grid, int seed,
                           int late) {{
  auto kernel = [=] {{
    {part}({", ".join(first)}, {extra}{state}, n[0], n[1], {eps}n[2], n[3], scale, n[4], n[5]);
  }};
  return emulation::launch(grid, 384, seed, late, kernel, 1);
}}
"""


def compiled(folder: Path, text: str, macros: dict[str, int]) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    file.write_text(text, encoding="utf-8")
    paths = [f"-I{path}" for path in (EMULATION, kernels.FOLDER, INCLUDE_DIRECTORY)]
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    subprocess.run([compiler, *options, *flags, *paths, file, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def run(case: Case, build: Build, pointers: list[Tensor | None], stride: int) -> None:
    loaded = compiled(build.folder, source(case.part), build.macros)
    loaded.run.restype = ctypes.c_char_p
    threshold, scale = quantise(case.p)
    inner = -(-case.inner // 64) if case.part.startswith("project") else case.inner
    numbers = (ctypes.c_int * 7)(case.N, inner, SITE, threshold, case.N // 2, FIRST_SAMPLE, stride)
    pointers = [*build.lead, *pointers, torch.tensor(SEED_STEP)]
    addresses = (ctypes.c_void_p * len(pointers))(*[None if x is None else x.data_ptr() for x in pointers])
    maps = (Map * len(build.maps))(*build.maps)
    fault = loaded.run(maps, addresses, numbers, ctypes.c_float(scale), case.blocks, case.seed, int(case.late))
    assert fault is None


def masks(case: Case) -> Masks | None:
    return Masks(case.p, DropoutState(torch.tensor(SEED_STEP)), SITE, case.N // 2) if case.p else None


def dropped(case: Case, x: Tensor) -> Tensor:
    if not case.p:
        return x
    state = DropoutState(torch.tensor(SEED_STEP), FIRST_SAMPLE)
    keep = hidden_keep(state, SITE, (2, case.N // 2, case.C), case.p, torch.device("cpu")).view(case.N, case.C)
    return x * keep * quantise(case.p)[1]


def normed(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if case.rms:
        return functional.rms_norm(x, (case.C,), weight, EPS)
    return functional.layer_norm(x, (case.C,), weight, bias, EPS)


def close(name: str, got: Tensor, expected: Tensor, tolerance: float = 3e-3) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= tolerance, f"{name}: {error:.3g}"


def check_join(case: Case, build: Build, branch: Tensor) -> None:
    """Run a forward kernel; `branch` is the product before its bias, which ends `lead`'s first two."""
    N, C = case.N, case.C
    bias = normal(case, C) if case.bias else None
    build.lead.insert(1, bias)
    weight, shift = normal(case, C, scale=0.2, shift=1.0), normal(case, C) if case.bias and not case.rms else None
    residual = normal(case, N, C) if case.residual else None
    r, h, mean, rstd = (
        unwritten(case, N, C),
        unwritten(case, N, C),
        *(unwritten(case, N, dtype=torch.float32) for _ in range(2)),
    )
    kind: NormKind = "rmsnorm" if case.rms else "layernorm"
    statistics = None if case.rms else mean, rstd
    join = kernels.Join(kind, EPS, weight, shift, bias, residual, r, h, *statistics, masks(case))
    build.macros |= kernels.join_macros(join)
    run(case, build, [residual, weight, shift, r, h, *statistics], 0)
    if bias is not None:
        branch = branch + bias.double()
    expected = dropped(case, branch) + (0 if residual is None else residual.double())
    close("r", r, expected)
    close("h", h, normed(case, r.double(), weight.double(), None if shift is None else shift.double()))
    centred = r.double()
    if not case.rms:
        close("mean", mean, r.double().mean(1), 1e-5)
        centred = centred - centred.mean(1, keepdim=True)
    close("rstd", rstd, (centred.square().mean(1) + EPS).rsqrt(), 1e-5)


def check_gradient(case: Case, build: Build, dh: Tensor) -> None:
    """Run a backward kernel; `dh` is the gradient that the product makes."""
    N, C = case.N, case.C
    weight = normal(case, C, scale=0.2, shift=1.0)
    r, dresidual = normal(case, N, C, shift=0.3), normal(case, N, C) if case.residual else None
    mean = None if case.rms else r.float().mean(1)
    centred = r.float() if mean is None else r.float() - mean[:, None]
    rstd = (centred.square().mean(1) + EPS).rsqrt()
    dr, dbranch = unwritten(case, N, C), unwritten(case, N, C) if case.p else None
    shift = case.bias and not case.rms
    sums = 1 + shift + case.bias
    partials = unwritten(case, kernels.partial_rows(N, build.config), sums * C + 4, dtype=torch.float32)
    join = kernels.JoinGradient(
        "rmsnorm" if case.rms else "layernorm", weight, r, mean, rstd, dresidual, dr, dbranch, partials, shift,
        case.bias, masks(case),
    )  # fmt: skip
    build.macros |= kernels.gradient_macros(join)
    run(case, build, [r, weight, mean, rstd, dresidual, dr, dbranch, partials], partials.stride(0))
    leaves = [r.double().requires_grad_(), weight.double().requires_grad_(), torch.zeros(C).double().requires_grad_()]
    h = normed(case, leaves[0], leaves[1], leaves[2]) + (leaves[2] if case.rms else 0)
    expected_dr, dweight, dbias = torch.autograd.grad(h, leaves, dh)
    expected_dr = expected_dr + (0 if dresidual is None else dresidual.double())
    close("dr", dr, expected_dr)
    small = list(partials[:, : sums * C].double().sum(0).split(C))
    close("dweight", small.pop(0), dweight)
    if shift:
        close("dbias", small.pop(0), dbias)
    if dbranch is not None:
        close("dbranch", dbranch, dropped(case, expected_dr))
    if case.bias:
        close("dbranch_bias", small.pop(0), dropped(case, expected_dr).sum(0))
    assert partials[:, sums * C :].isnan().all()


CASES = [
    Case("project_forward", 200, 128, 72, ABREAST, p=0.3, seed=1),
    Case("project_forward", 100, 256, 136, ABREAST, rms=True, bias=False, residual=False, seed=2, late=True),
    Case("project_backward", 200, 128, 72, ABREAST, p=0.3, seed=3, late=True),
    Case("project_backward", 100, 256, 136, ABREAST, rms=True, bias=False, residual=False, seed=4),
    Case("mlp_forward", 300, 128, 192, ABREAST, p=0.3, seed=5, late=True),
    Case("mlp_forward", 100, 256, 320, ABREAST, tanh=True, seed=6),
    Case("mlp_forward", 300, 128, 128, ABREAST, rms=True, bias=False, seed=7),
    Case("mlp_forward", 200, 128, 256, ABREAST, p=0.3, seed=8, late=True),
    Case("mlp_backward", 300, 128, 192, ABREAST, p=0.3, seed=9),
    Case("mlp_backward", 100, 256, 320, ABREAST, tanh=True, seed=10, late=True),
    Case("mlp_backward", 300, 128, 128, ABREAST, rms=True, bias=False, seed=11, late=True),
    Case("mlp_backward", 200, 128, 256, ABREAST, p=0.3, seed=12),
    Case("project_forward", 200, 256, 456, ABREAST, p=0.3, seed=13, late=True),
    Case("project_backward", 300, 256, 456, ABREAST, seed=14),
    Case("mlp_forward", 100, 128, 256, ABREAST, seed=15, dtype=torch.float16),
    Case("mlp_backward", 100, 128, 256, ABREAST, seed=16, late=True, dtype=torch.float16),
    Case("project_forward", 100, 128, 72, ABREAST, seed=17, late=True, dtype=torch.float16),
    Case("mlp_forward", 300, 128, 192, WHOLE, p=0.3, seed=22, late=True),
    Case("mlp_forward", 200, 256, 320, WHOLE, tanh=True, seed=23),
    Case("mlp_backward", 300, 128, 192, WHOLE, p=0.3, seed=24),
    Case("mlp_backward", 300, 256, 320, WHOLE, tanh=True, seed=25, late=True),
    Case("mlp_backward", 300, 128, 128, WHOLE, rms=True, bias=False, seed=26),
    Case("project_forward", 400, 128, 72, WHOLE, p=0.3, seed=18),
    Case("project_forward", 300, 256, 456, WHOLE, seed=19, late=True),
    Case("project_backward", 300, 128, 456, WHOLE, p=0.3, seed=20),
    Case("project_backward", 200, 256, 136, WHOLE, rms=True, bias=False, residual=False, seed=21, late=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_kernel_matches_float64(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(case.seed)
    config = kernels.fitted(case.part, case.C, case.config, case.inner)
    build = Build(tmp_path, config, kernels.tile_macros(case.C, case.dtype, config), [], [])
    if case.part.startswith("project"):
        check_projection(case, build)
    else:
        check_mlp(case, build)


def check_projection(case: Case, build: Build) -> None:
    N, C, K = case.N, case.C, case.inner
    forward = case.part == "project_forward"
    x, weight = normal(case, N, K), normal(case, *(C, K) if forward else (K, C), scale=K**-0.5)
    product = x.double() @ (weight.double().t() if forward else weight.double())
    build.macros["BACKWARD"] = int(not forward)
    build.maps = [rows_map(x, 64), owned_map(weight) if forward else rows_map(weight, 64)]
    (check_join if forward else check_gradient)(case, build, product)


def check_mlp(case: Case, build: Build) -> None:
    N, C, F = case.N, case.C, case.inner
    build.macros |= {"GELU_TANH": int(case.tanh), "UP_BIAS": int(case.bias)}
    up, down = normal(case, F, C, scale=C**-0.5), normal(case, C, F, scale=F**-0.5)
    kept = unwritten(case, *kernels.kept_shape(N, F), dtype=torch.float16)
    if case.part == "mlp_forward":
        h, bias, got_a = normal(case, N, C), normal(case, F) if case.bias else None, unwritten(case, N, F)
        a, slope = gelu(case, functional.linear(h.double(), up.double(), None if bias is None else bias.double()))
        build.maps = [rows_map(h, 64), rows_map(up, 64), owned_map(down), rows_map(got_a, 16)]
        build.lead = [bias, kept]
        check_join(case, build, a @ down.double().t())
        close("a", got_a, a)
        close("kept", kernels.unkeep(kept, N, F), slope, 1e-3)
        return
    dz, slope = normal(case, N, C), gelu(case, normal(case, N, F).double())[1].half()
    kernels.keep(slope, kept)
    du = (dz.double() @ down.double()) * slope.double()
    got_du = unwritten(case, N, F)
    sums = unwritten(case, kernels.inner_partial_rows(N), F, dtype=torch.float32) if case.bias else None
    build.maps = [*(rows_map(x, 64) for x in (dz, up, down)), rows_map(got_du, 16)]
    build.lead = [kept, sums]
    check_gradient(case, build, du @ up.double())
    close("du", got_du, du)
    if sums is not None:
        close("sums of du", sums.double().sum(0), du.sum(0))


def gelu(case: Case, u: Tensor) -> tuple[Tensor, Tensor]:
    """GELU and its derivative."""
    wide = u.requires_grad_()
    a = functional.gelu(wide, approximate="tanh" if case.tanh else "none")
    return a.detach(), torch.autograd.grad(a.sum(), wide)[0]
