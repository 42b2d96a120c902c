"""The projections with their joins for many rows (ops/mlp/project_many.cu): whole kernels on the host, compilation."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.mlp import many
from ridgeline.ops.mlp.kernels import Join, JoinGradient

EPS = 1e-5
POINTERS = {
    "forward": ["const u16*"] * 3 + ["float*"] * 2,
    "backward": ["const u16*"] + ["const float*"] * 2 + ["float*"],
}


def source(part: str) -> str:
    pointers = ", ".join(f"({kind})p[{i}]" for i, kind in enumerate(POINTERS[part]))
    number = "1e-5f" if part == "forward" else "n[2]"
    return f"""#include "project_many.cu"
extern "C" const char* run(const TensorMap* m, void* const* p, const int* n, int grid, int seed, int late) {{
  auto kernel = [=] {{ project_many_{part}(m[0], m[1], m[2], m[3], m[4], {pointers}, {number}, n[0], n[1]); }};
  return emulation::launch(grid, 384, seed, late, kernel, 2);
}}
"""


def run(
    emulation: Any, part: str, macros: dict[str, int], tensors: list[Tensor], pointers: list[Tensor | None],
    numbers: list[int], late: bool,
) -> None:  # fmt: skip
    boxes = [(64, 64)] * (3 if part == "forward" else 4) + [(16, 64)] * (2 if part == "forward" else 1)
    maps = emulation.maps(*zip(tensors, boxes, strict=True))
    addresses = (ctypes.c_void_p * len(pointers))(*[None if x is None else x.data_ptr() for x in pointers])
    kernel = emulation.compile(source(part), macros, many.SOURCE.parent)
    assert kernel(maps, addresses, (ctypes.c_int * len(numbers))(*numbers), 2, 3 + late, int(late)) is None


def close(name: str, got: Tensor, expected: Tensor, tolerance: float = 3e-3) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= tolerance, f"{name}: {error:.3g}"


def normed(x: Tensor, weight: Tensor, shift: Tensor | None, rms: bool) -> Tensor:
    if rms:
        return functional.rms_norm(x, (many.WIDTH,), weight, EPS)
    return functional.layer_norm(x, (many.WIDTH,), weight, shift, EPS)


CASES = [(400, 200, False, False, torch.bfloat16), (700, 64, True, True, torch.bfloat16),
         (300, 328, False, True, torch.float16)]  # fmt: skip


@pytest.mark.parametrize(("N", "K", "rms", "late", "dtype"), CASES)
def test_forward_matches_float64(emulation: Any, N: int, K: int, rms: bool, late: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape) * scale).to(dtype)  # noqa: E731
    x, weight, residual, scale = normal(N, K), normal(256, K, scale=K**-0.5), normal(N, 256), normal(256) + 1
    shift, bias = (None, None) if rms else (normal(256), normal(256))
    r, h = (torch.full((N, 256), float("nan"), dtype=dtype) for _ in range(2))
    mean, rstd = (torch.full((N,), float("nan")) for _ in range(2))
    macros = many.macros(dtype, backward=False, rms=rms, norm_bias=not rms, branch_bias=not rms)
    pointers = [scale, shift, bias, None if rms else mean, rstd]
    run(emulation, "forward", macros, [x, weight, residual, r, h], pointers, [N, -(-K // 64)], late)
    branch = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    close("r", r, branch + residual.double())
    close("h", h, normed(r.double(), scale.double(), None if shift is None else shift.double(), rms))
    centred = r.double() if rms else r.double() - r.double().mean(1, keepdim=True)
    close("rstd", rstd, (centred.square().mean(1) + EPS).rsqrt(), 1e-5)
    if not rms:
        close("mean", mean, r.double().mean(1), 1e-4)


@pytest.mark.parametrize(("N", "K", "rms", "late", "dtype"), CASES)
def test_backward_matches_float64(emulation: Any, N: int, K: int, rms: bool, late: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape) * scale).to(dtype)  # noqa: E731
    dy, weight, scale = normal(N, K), normal(K, 256, scale=K**-0.5), normal(256) + 1
    r, dresidual, dr = normal(N, 256) + 0.3, normal(N, 256), torch.full((N, 256), float("nan"), dtype=dtype)
    mean = None if rms else r.float().mean(1)
    rstd = ((r.float() if mean is None else r.float() - mean[:, None]).square().mean(1) + EPS).rsqrt()
    kinds = 1 + (not rms)
    partials = torch.full((2, kinds * 256 + 4), float("nan"))
    macros = many.macros(dtype, backward=True, rms=rms, norm_bias=not rms)
    numbers = [N, -(-K // 64), partials.stride(0)]
    run(emulation, "backward", macros, [dy, weight, r, dresidual, dr], [scale, mean, rstd, partials], numbers, late)
    leaves = [r.double().requires_grad_(), scale.double().requires_grad_(), torch.zeros(256).double().requires_grad_()]
    h = normed(leaves[0], leaves[1], leaves[2], rms) + (leaves[2] if rms else 0)
    expected, dscale, dshift = torch.autograd.grad(h, leaves, dy.double() @ weight.double())
    close("dr", dr, expected + dresidual.double())
    sums = partials[:, : kinds * 256].double().sum(0).split(256)
    close("dscale", sums[0], dscale)
    if not rms:
        close("dshift", sums[1], dshift)
    assert partials[:, kinds * 256 :].isnan().all()


@pytest.mark.usefixtures("needs_nvrtc")
def test_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    for backward in (False, True):
        for rms in (False, True):
            macros = many.macros(
                torch.bfloat16, backward=backward, rms=rms, norm_bias=not rms, branch_bias=not (rms or backward)
            )
            cubin = cuda.build(many.SOURCE, macros)
            (resources,) = cubin.resources().values()
            assert resources.spill_loads == 0
            assert "C75" not in cubin.log


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K", "rms"), [(70000, 1024, False), (1000, 320, True)])
def test_both_on_the_card(N: int, K: int, rms: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(N)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).bfloat16()  # noqa: E731
    nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")  # noqa: E731
    kind, kinds = ("rmsnorm", 1) if rms else ("layernorm", 2)
    x, weight, residual, scale = normal(N, K), normal(256, K, scale=K**-0.5), normal(N, 256), normal(256) + 1
    shift, bias = (None, None) if rms else (normal(256), normal(256))
    r, h, mean, rstd = nan(N, 256).bfloat16(), nan(N, 256).bfloat16(), None if rms else nan(N), nan(N)
    join = Join(kind, EPS, scale, shift, bias, residual, r, h, mean, rstd, None)  # type: ignore[arg-type]
    many.project_many_forward_raw(x, weight, join)
    close("r", r, x.double() @ weight.double().t() + residual.double() + (0 if bias is None else bias.double()))
    close("h", h, normed(r.double(), scale.double(), None if shift is None else shift.double(), rms))
    dr, partials = nan(N, 256).bfloat16(), nan(many.blocks(N, r.device), kinds * 256)
    gradient = JoinGradient(kind, scale, r, mean, rstd, residual, dr, None, partials, not rms, False, None)  # type: ignore[arg-type]
    down = normal(K, 256, scale=K**-0.5)
    many.project_many_backward_raw(x, down, gradient)
    leaves = [t.double().requires_grad_() for t in (r, scale, torch.zeros_like(scale))]
    h = normed(leaves[0], leaves[1], leaves[2], rms) + (leaves[2] if rms else 0)
    expected, *small = torch.autograd.grad(h, leaves, x.double() @ down.double())
    close("dr", dr, expected + residual.double())
    for name, got, wanted in zip(("dscale", "dshift"), partials.double().sum(0).split(256), small, strict=False):
        close(name, got, wanted)
