"""The MLP's input gradients for many rows (ops/mlp/mlp_many.cu): the whole kernel on the host, compilation."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.product_cases import code_lines, coded, decoded
from ops.test_mlp_many import EPS, close, normed
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.codes import LINE, LINES, codes_empty
from ridgeline.ops.mlp import many
from ridgeline.ops.mlp.kernels import JoinGradient
from ridgeline.ops.norm.reference import NormKind

SOURCE = """#include "mlp_many.cu"
extern "C" const char* run(const TensorMap* m, void* const* p, const int* n, int grid, int seed, int late) {
  auto kernel = [=] { mlp_many_backward(m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], (const u16*)p[0],
                                        (const float*)p[1], (const float*)p[2], (float*)p[3], n[2], n[0], n[1]); };
  return emulation::launch(grid, 384, seed, late, kernel, 2);
}
"""
# rows and inner columns that fill no tile, a block without rows, more than one tile a block
CASES = [(416, 200, False, False), (736, 128, True, True), (1088, 72, False, True), (96, 328, True, False)]


def statistics(r: Tensor, rms: bool) -> tuple[Tensor | None, Tensor]:
    mean = None if rms else r.float().mean(1)
    centred = r.float() if mean is None else r.float() - mean[:, None]
    return mean, (centred.square().mean(1) + EPS).rsqrt()


def check(
    rms: bool, dz: Tensor, down: Tensor, up: Tensor, slope: Tensor, scale: Tensor, r: Tensor, dresidual: Tensor,
    du: Tensor, dr: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Results against float64."""
    right = dz.double() @ down.double() * slope.double()
    close("du", du, right)
    leaves = [x.double().requires_grad_() for x in (r, scale, torch.zeros_like(scale))]
    h = normed(leaves[0], leaves[1], leaves[2], rms) + (leaves[2] if rms else 0)
    expected, *small = torch.autograd.grad(h, leaves, right @ up.double())
    close("dr", dr, expected + dresidual.double())
    for name, got, wanted in zip(("dscale", "dshift"), sums.double().sum(0).split(256), small, strict=False):
        close(name, got, wanted)


@pytest.mark.parametrize(("N", "F", "rms", "late"), CASES)
def test_the_mlp_matches_float64(emulation: Any, N: int, F: int, rms: bool, late: bool) -> None:
    torch.manual_seed(N)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape) * scale).bfloat16()  # noqa: E731
    dz, down, up, scale = normal(N, 256), normal(256, F, scale=1 / 16), normal(F, 256, scale=F**-0.5), normal(256) + 1
    r, dresidual = normal(N, 256) + 0.3, normal(N, 256)
    du, dr = torch.full((N, F), float("nan")).bfloat16(), torch.full((N, 256), float("nan")).bfloat16()
    codes = coded(torch.rand(N, F) * 1.26 - 0.13, streaming=False)
    mean, rstd = statistics(r, rms)
    kinds = 1 + (not rms)
    partials = torch.full((2 * many.WARPS, kinds * 256 + 4), float("nan"))
    rows, sixteen = (lambda x: many.turned(x, 32)), (lambda x: many.turned(x, 16))
    maps = emulation.maps(
        rows(dz), (down, (64, 64)), (up, (64, 64)), (code_lines(codes), (LINES, LINE)), rows(r), rows(dresidual),
        sixteen(du), sixteen(dr),
    )  # fmt: skip
    tensors = (scale, mean, rstd, partials)
    pointers = (ctypes.c_void_p * 4)(*[None if x is None else x.data_ptr() for x in tensors])
    kernel = emulation.compile(SOURCE, many.mlp_macros(torch.bfloat16, rms=rms, norm_bias=not rms), many.SOURCE.parent)
    assert kernel(maps, pointers, (ctypes.c_int * 3)(N, F, partials.stride(0)), 2, 3 + late, int(late)) is None
    slope = decoded(codes, N, F, streaming=False)
    check(rms, dz, down, up, slope, scale, r, dresidual, du, dr, partials[:, : kinds * 256])
    assert partials[:, kinds * 256 :].isnan().all()


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("rms", [False, True])
def test_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rms: bool) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(many.MLP_SOURCE, many.mlp_macros(torch.bfloat16, rms=rms, norm_bias=not rms))
    (resources,) = cubin.resources().values()
    assert (resources.spill_loads, resources.spill_stores) == (0, 0)
    assert "C75" not in cubin.log


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "F", "rms"), [(70016, 1024, False), (992, 328, True)])
def test_the_mlp_on_the_card(N: int, F: int, rms: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(N)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).bfloat16()  # noqa: E731
    nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")  # noqa: E731
    dz, down, up, scale = normal(N, 256), normal(256, F, scale=1 / 16), normal(F, 256, scale=F**-0.5), normal(256) + 1
    r, dresidual, du, dr = normal(N, 256) + 0.3, normal(N, 256), nan(N, F).bfloat16(), nan(N, 256).bfloat16()
    codes = coded(torch.rand(N, F) * 1.26 - 0.13, streaming=False)
    mean, rstd = statistics(r, rms)
    partials = nan(many.mlp_partial_rows(N, dz.device), (2 - rms) * 256)
    kind: NormKind = "rmsnorm" if rms else "layernorm"
    join = JoinGradient(kind, scale, r, mean, rstd, dresidual, dr, None, partials, not rms, False, None)
    many.mlp_many_backward_raw(dz, down, up, codes.cuda(), du, join)
    slope = decoded(codes, N, F, streaming=False).cuda()
    check(rms, dz, down, up, slope, scale, r, dresidual, du, dr, partials)


def test_what_the_kernel_does_not_know_is_refused() -> None:
    rows, weight = torch.zeros(40, 256).bfloat16(), torch.zeros(64, 256).bfloat16()
    join = JoinGradient("rmsnorm", weight[0], rows, None, rows[:, 0], rows, rows, None, rows, False, False, None)
    with pytest.raises(ValueError, match="multiples of 32 rows"):
        many.mlp_many_backward_raw(rows, weight.t().contiguous(), weight, codes_empty(rows, 40, 64), rows, join)
