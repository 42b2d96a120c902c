"""The MLP's forward pass for many rows (ops/mlp/forward_many.cu): the kernel on the host, compilation, the card."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ops.product_cases import decoded, slopes_are
from ops.test_mlp_many import EPS, close, normed
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear.codes import codes_empty
from ridgeline.ops.mlp import forward_many
from ridgeline.ops.mlp.kernels import Join

SOURCE = """#include "forward_many.cu"
extern "C" const char* run(const TensorMap* m, void* const* p, const int* n, int grid, int seed, int late) {
  auto kernel = [=] {
    forward_many(m[0], m[1], m[2], m[3], m[4], m[5], m[6], (const u16*)p[0], (const u16*)p[1], (u8*)p[2],
                 (const u16*)p[3], (const u16*)p[4], (const u16*)p[5], (float*)p[6], (float*)p[7], 1e-5f, n[0], n[1]);
  };
  return emulation::launch(grid, 640, seed, late, kernel, 2);
}
"""


class Case:
    """Operands of N rows and F inner columns, and results that are NaN so far."""

    def __init__(self, N: int, F: int, rms: bool, device: str = "cpu") -> None:
        torch.manual_seed(N)
        normal = lambda *shape, scale=1.0: (torch.randn(*shape, device=device) * scale).bfloat16()  # noqa: E731
        nan = lambda *shape: torch.full(shape, float("nan"), device=device)  # noqa: E731
        self.N, self.F, self.rms = N, F, rms
        self.h, self.residual, self.scale = normal(N, 256), normal(N, 256), normal(256) + 1
        self.up, self.down = normal(F, 256, scale=1.5 / 16), normal(256, F, scale=F**-0.5)
        self.up_bias, self.shift, self.bias = (None,) * 3 if rms else (normal(F), normal(256), normal(256))
        self.a, self.r, self.next_h = nan(N, F).bfloat16(), nan(N, 256).bfloat16(), nan(N, 256).bfloat16()
        self.mean, self.rstd = None if rms else nan(N), nan(N)
        self.codes = codes_empty(self.h, N, F).fill_(255)

    def macros(self, gelu: Any) -> dict[str, int]:
        plain = not self.rms
        return forward_many.macros(rms=self.rms, norm_bias=plain, up_bias=plain, branch_bias=plain, gelu=gelu)

    def check(self, gelu: str) -> None:
        double = lambda x: None if x is None else x.double()  # noqa: E731
        u = functional.linear(self.h.double(), self.up.double(), double(self.up_bias)).requires_grad_()
        a = functional.gelu(u, approximate="tanh" if gelu == "tanh" else "none")
        (slope,) = torch.autograd.grad(a.sum(), u)
        close("a", self.a, a.detach())
        got = decoded(self.codes.cpu(), self.N, self.F, streaming=False)
        assert slopes_are(got, slope.cpu(), True, behind_norm=self.h.is_cuda)  # the card's tanh errs more
        r = functional.linear(self.a.double(), self.down.double(), double(self.bias)) + self.residual.double()
        close("r", self.r, r)
        r = self.r.double()
        close("h", self.next_h, normed(r, self.scale.double(), double(self.shift), self.rms))
        centred = r if self.rms else r - r.mean(1, keepdim=True)
        close("rstd", self.rstd, (centred.square().mean(1) + EPS).rsqrt(), 1e-5)
        if self.mean is not None:
            close("mean", self.mean, r.mean(1), 1e-4)


@pytest.mark.parametrize(
    ("N", "F", "rms", "gelu", "late"),
    [(400, 200, False, "tanh", False), (700, 72, True, "exact", True), (130, 328, True, "tanh", True)],
)
def test_the_kernel_matches_float64(emulation: Any, N: int, F: int, rms: bool, gelu: str, late: bool) -> None:
    case = Case(N, F, rms)
    tensors = [case.h, case.up, case.down, case.a, case.residual, case.r, case.next_h]
    maps = emulation.maps(*zip(tensors, forward_many.boxes(), strict=True))
    maps[2].swizzle = 2 * forward_many.boxes()[2][1]
    pointers = [case.h, case.up_bias, case.codes, case.scale, case.shift, case.bias, case.mean, case.rstd]
    addresses = (ctypes.c_void_p * 8)(*[None if x is None else x.data_ptr() for x in pointers])
    kernel = emulation.compile(SOURCE, case.macros(gelu), forward_many.SOURCE.parent)
    assert kernel(maps, addresses, (ctypes.c_int * 2)(N, F), 2, 3 + late, int(late)) is None
    case.check(gelu)


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("rms", [False, True])
def test_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rms: bool) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(forward_many.SOURCE, Case(1, 8, rms).macros("tanh"))
    (resources,) = cubin.resources().values()
    assert resources.spill_loads == 0
    assert "C75" not in cubin.log


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "F", "rms", "gelu"), [(70000, 1024, False, "tanh"), (1000, 328, True, "exact")])
def test_on_the_card(N: int, F: int, rms: bool, gelu: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case = Case(N, F, rms, "cuda")
    kind = "rmsnorm" if rms else "layernorm"
    join = Join(
        kind, EPS, case.scale, case.shift, case.bias, case.residual, case.r, case.next_h, case.mean, case.rstd, None
    )  # type: ignore[arg-type]
    forward_many.mlp_many_forward_raw(case.h, case.up, case.up_bias, case.down, case.codes, case.a, join, gelu=gelu)
    case.check(gelu)
