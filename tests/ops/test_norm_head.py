"""The last norm, a narrow head and its loss by one kernel (ops/mlp/head.cu): on the host against float64, compiled."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.cross_entropy.reference import IGNORE
from ridgeline.ops.mlp import head
from ridgeline.ops.mlp.head_triton import Place, head_gradients_raw

EPS = 1e-5
SOURCE = """#include "head.cu"
extern "C" const char* run(const TensorMap* m, void* const* p, const int* n, int grid, int seed, int late) {
  return emulation::launch(grid, 384, seed, late, [=] {
    norm_head(m[0], m[1], (const u16*)p[0], (const u16*)p[1], (const u16*)p[2], (const float*)p[3], (const float*)p[4],
              (const i64*)p[5], (const int*)p[6], (float*)p[7], (float*)p[8], n[0], n[1]);
  });
}
"""


def close(name: str, got: Tensor, expected: Tensor, tolerance: float = 4e-3) -> None:
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= tolerance, f"{name}: {error:.3g}"


class Case:
    """Operands, and in float64 the loss and its gradients: of r, the head, the norm's scale and shift."""

    def __init__(self, N: int, V: int, rms: bool, device: str = "cpu") -> None:
        torch.manual_seed(N)
        draw = lambda *shape, scale=1.0: (torch.randn(*shape, device=device) * scale).bfloat16()  # noqa: E731
        self.r, self.weight, self.scale = draw(N, 256) + 0.3, draw(V, 256, scale=0.06), draw(256, scale=0.2) + 1
        self.shift = None if rms else draw(256, scale=0.3)
        self.targets = torch.randint(0, V, (N,), device=device)
        self.targets[3], self.targets[N - 1] = IGNORE, V - 1
        self.norm = head.FinalNorm(self.scale, self.shift, "rmsnorm" if rms else "layernorm")
        mean = None if rms else self.r.float().mean(1)
        centred = self.r.float() if mean is None else self.r.float() - mean[:, None]
        self.statistics = head.Statistics(mean, (centred.square().mean(1) + EPS).rsqrt())
        tensors = (self.r, self.weight, self.scale, self.shift)
        leaves = [None if x is None else x.double().requires_grad_() for x in tensors]
        norm = functional.rms_norm if rms else functional.layer_norm
        h = norm(leaves[0], (256,), *leaves[2 : 3 if rms else 4], eps=EPS)  # type: ignore[operator]
        loss = functional.cross_entropy(h @ leaves[1].t(), self.targets, ignore_index=IGNORE)  # type: ignore[union-attr]
        self.loss = loss.detach()
        self.gradients = torch.autograd.grad(loss, [x for x in leaves if x is not None])


@pytest.mark.parametrize(
    ("N", "V", "rms", "late"), [(200, 65, False, False), (700, 72, True, True), (330, 10, False, True)]
)
def test_kernels_match_float64(emulation: Any, N: int, V: int, rms: bool, late: bool) -> None:
    case = Case(N, V, rms)
    nan = lambda *shape: torch.full(shape, float("nan"))  # noqa: E731
    counts = torch.zeros(64, dtype=torch.int32)
    counts[0], counts[5] = int((case.targets != IGNORE).sum()) - 1, 1
    dr, partials, losses = nan(N, 256).bfloat16(), nan(2, head.partial_columns(V) + 3), nan(2)
    maps = emulation.maps((case.r, (64, 64)), (dr, (16, 64)))
    pointers = [case.weight, case.scale, case.shift, *case.statistics, case.targets, counts, partials, losses]
    addresses = (ctypes.c_void_p * 9)(*[None if x is None else x.data_ptr() for x in pointers])
    macros = head.macros(V, 64, rms=rms, bias=not rms)
    run = emulation.compile(SOURCE, macros, head.SOURCE.parent)
    assert run(maps, addresses, (ctypes.c_int * 2)(partials.stride(0), N), 2, 3 + late, int(late)) is None
    assert partials[:, head.partial_columns(V) :].isnan().all()
    torch.testing.assert_close(losses.sum().double() / counts.sum(), case.loss, rtol=1e-4, atol=0)
    close("dr", dr, case.gradients[0])
    places = [Place(torch.ones_like(x, dtype=torch.float32), True) for x in (case.weight, case.scale)]
    shift = None if rms else Place(nan(256), False)
    factor = torch.tensor([-2.0])
    head_gradients_raw(
        partials, case.weight, case.scale, case.shift, factor, places[0], places[1], shift,
        columns=head.class_columns(V),
    )  # fmt: skip
    for name, place, right in zip(("head", "scale"), places, case.gradients[1:], strict=False):
        close(name, (place.target - 1) / -2, right)
    if shift is not None:
        close("shift", shift.target / -2, case.gradients[3])


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("rms", [False, True])
def test_compiles_with_products_that_overlap(rms: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(head.SOURCE, head.macros(65, 64, rms=rms, bias=not rms))
    (resources,) = cubin.resources().values()
    assert resources.spill_stores <= 48  # of a tile's beginning, none among products
    assert "C75" not in cubin.log


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "V", "rms"), [(70_000, 65, False), (131_072, 65, True), (1000, 72, False), (8192, 9, True)]
)
def test_on_the_card(N: int, V: int, rms: bool) -> None:
    case = Case(N, V, rms, "cuda")
    if head.missing(case.r.device, case.r.dtype, 256, V) is not None:
        pytest.skip("needs compute capability 9.0")
    leaves = [x.clone().requires_grad_() for x in (case.r, case.weight, case.scale, case.shift) if x is not None]
    norm = head.FinalNorm(leaves[2], None if rms else leaves[3], case.norm.kind)
    results = []
    for _ in range(2):
        loss = head.norm_head_loss(leaves[0], case.statistics, norm, leaves[1], case.targets)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(results[0][0].double(), case.loss, rtol=1e-4, atol=0)
    for name, got, right in zip(("dr", "head", "scale", "shift"), results[0][1:], case.gradients, strict=False):
        close(name, got, right, 6e-3)
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
