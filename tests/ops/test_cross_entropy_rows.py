"""Cross-entropy of long rows by the Hopper kernel: on the host by tests/ops/emulation against float64, and compiled."""

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ops.test_cross_entropy import draw, draw_targets
from ridgeline.ops import _cuda as cuda
from ridgeline.ops.cross_entropy import IGNORE, cross_entropy, rows
from ridgeline.ops.cross_entropy import triton as kernels

GPT2 = (50257, 50304)
SOURCE = """#include "rows_sm90.cu"
extern "C" const char* run(const rl::u16* logits, const void* targets, rl::u16* dlogits, float* losses,
                           const int* counts, const float* scale, const int* n, int grid, int random, int late) {
  return emulation::launch(grid, THREADS, random, late, [=] {
    cross_entropy(logits, targets, dlogits, losses, counts, scale, n[0], n[1], n[2], n[3]);
  });
}
"""


def truth_of(x_NV: torch.Tensor, targets_N: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient times `scale`, in float64."""
    wide_NV = x_NV.double().requires_grad_()
    loss = cross_entropy(wide_NV, targets_N)
    (gradient_NV,) = torch.autograd.grad(loss * scale, [wide_NV])
    return loss.detach(), gradient_NV


@pytest.mark.parametrize(
    ("N", "V", "W", "grid", "targets", "in_place", "late"),
    [
        (5, 2500, 2504, 2, torch.int64, True, True),
        (3, 9001, 9064, 1, torch.int16, False, False),
        (4, 8200, 8200, 4, torch.int32, True, True),
    ],
)
def test_kernel_matches_float64(
    N: int, V: int, W: int, grid: int, targets: torch.dtype, in_place: bool, late: bool, emulation: Any
) -> None:
    x_NV, targets_N = draw(N, V, dtype=torch.bfloat16, seed=N).cpu(), draw_targets(N, V).cpu()
    x_NV[0, 7] = float("-inf")
    targets_N[1] = IGNORE
    loss, right_NV = truth_of(x_NV, targets_N, -3)
    logits_NW = torch.full((N, W), float("nan"), dtype=torch.bfloat16)
    logits_NW[:, :V] = x_NV
    dlogits_NW = logits_NW if in_place else torch.full_like(logits_NW, float("nan"))
    losses_P, scale = torch.full((grid,), float("nan")), torch.tensor([-3.0])
    counts = torch.tensor([int((targets_N != IGNORE).sum()), *[0] * 63], dtype=torch.int32)
    run = emulation.compile(SOURCE, rows.defines(V, W, 64, torch.bfloat16, targets), rows.SOURCE.parent)
    held = targets_N.to(targets)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (logits_NW, held, dlogits_NW, losses_P, counts, scale))
    assert run(*pointers, (ctypes.c_int * 4)(N, 1, W, W), grid, N, int(late)) is None
    torch.testing.assert_close(losses_P.sum().double() / counts.sum(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dlogits_NW[:, :V].double(), right_NV, rtol=4e-3, atol=1e-7)
    assert not dlogits_NW[:, V:].any()


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [GPT2, (57300, 57344)])
def test_compiles_for_hopper(
    dtype: torch.dtype, width: tuple[int, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    usage = cuda.build(rows.SOURCE, rows.defines(*width, 64, dtype, torch.int64)).resources()["cross_entropy"]
    assert (usage.spill_loads, usage.spill_stores) == (0, 0)
    assert rows.smem(width[1]) <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("V", "W"), [(2500, 2560), GPT2, (57300, 57344)])
def test_rows_on_a_card(V: int, W: int, dtype: torch.dtype) -> None:
    if not rows.fits(torch.device("cuda"), dtype, W):
        pytest.skip("needs compute capability 9.0")
    N = 300
    x_NV, targets_N = draw(N, V, dtype=dtype, seed=1), draw_targets(N, V)
    loss, right_NV = truth_of(x_NV, targets_N, 1024)
    logits_NW = torch.full((N, W), float("nan"), dtype=dtype, device="cuda")
    logits_NW[:, :V] = x_NV
    counts = torch.full((kernels.COUNTS,), -1, dtype=torch.int32, device="cuda")
    kernels.count_valid_raw(targets_N, counts)
    found, scale = [], torch.full((1,), 1024.0, device="cuda")
    for _ in range(2):
        dlogits_NW = torch.full_like(logits_NW, float("nan"))
        losses_P = torch.full((rows.loss_partials(N, logits_NW),), float("nan"), device="cuda")
        rows.cross_entropy_raw(logits_NW, targets_N, dlogits_NW, losses_P, counts, classes=V, gradient_scale=scale)
        found.append((dlogits_NW, losses_P))
    assert torch.equal(*(part[0] for part in found))
    assert torch.equal(*(part[1] for part in found))
    torch.testing.assert_close(losses_P.sum().double() / counts.sum(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dlogits_NW[:, :V].double(), right_NV, rtol=4e-3, atol=1e-6)
    assert not dlogits_NW[:, V:].any()
