"""Grouped weight gradients and the sums that finish them: whole kernels on the host, plans, compilation, the card."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import reduce, wgrad
from ridgeline.ops.linear.reduce import Job
from ridgeline.ops.linear.wgrad import Gradient, share_out

WGRAD = """#include "wgrad_sm90.cu"
extern "C" const char* run(const FourMaps* dy, const FourMaps* x, const Share* shares, float* tiles, float* bias,
                           int grid, int random, int late) {
  auto kernel = [=] { weight_gradients(*dy, *x, shares, tiles, bias); };
  return emulation::launch(grid, 384, random, late, kernel, 1 + PAIRED);
}
"""
REDUCE = """#include "ridgeline/hopper.cuh"
#define __shared__ static
#include "reduce.cu"
extern "C" const char* run(const Jobs* jobs, int grid, int random) {
  return emulation::launch(grid, 256, random, false, [=] { reduce(*jobs); });
}
"""


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def run_jobs(emulation: Any, jobs: list[Job]) -> None:
    packed, grid = reduce.pack(jobs)
    run = emulation.compile(REDUCE, {"MAX_JOBS": reduce.MAX_JOBS}, wgrad.SOURCE.parent)
    assert run(ctypes.create_string_buffer(packed), grid, 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("shapes", "blocks", "paired"),
    [
        ([(136, 130, True), (64, 130, False), (33, 77, True)], 9, False),
        ([(256, 130, True), (200, 40, False)], 9, True),
    ],
)
def test_whole_kernels_match_float64(
    emulation: Any, shapes: list[tuple[int, int, bool]], blocks: int, paired: bool, late: bool
) -> None:
    torch.manual_seed(0)
    N = 300
    normal = lambda width: torch.randn(N, -(-width // 8) * 8).bfloat16()[:, :width]  # noqa: E731
    gradients = [
        Gradient(normal(M), normal(K), torch.randn(M, K), torch.randn(M) if bias else None, True, True)
        for M, K, bias in shapes
    ]
    before = [(g.dweight_MK.clone(), None if g.dbias_M is None else g.dbias_M.clone()) for g in gradients]
    tile_n = wgrad.tile_width([130])
    plan = share_out(shapes, -(-N // 64), tile_n, blocks)
    assert (plan.parts, plan.paired) == (2, paired)
    tiles, sums = torch.full((plan.tiles[-1],), float("nan")), torch.full((plan.sums[-1],), float("nan"))
    empty = torch.empty(1, 8, dtype=torch.bfloat16)
    maps = [
        emulation.maps(*((x, (64, 64)) for x in (*side, empty)))
        for side in ([g.dy_NM for g in gradients], [g.x_NK for g in gradients])
    ]
    fault = emulation.compile(WGRAD, {"TILE_N": tile_n, "STAGES": 3, "PAIRED": int(paired)}, wgrad.SOURCE.parent)(
        ctypes.byref(maps[0]), ctypes.byref(maps[1]), pointer(plan.shares), pointer(tiles), pointer(sums),
        len(plan.shares), 3, int(late),
    )  # fmt: skip
    assert fault is None
    run_jobs(emulation, wgrad.jobs_of(gradients, plan, tiles, sums))
    for gradient, (weight, bias) in zip(gradients, before, strict=True):
        dy, x = gradient.dy_NM.double(), gradient.x_NK.double()
        torch.testing.assert_close(gradient.dweight_MK.double(), dy.t() @ x + weight.double(), rtol=1e-4, atol=1e-3)
        if bias is not None:
            torch.testing.assert_close(gradient.dbias_M.double(), dy.sum(0) + bias.double(), rtol=1e-4, atol=1e-3)


def test_sums_of_few_and_of_many_shares(emulation: Any) -> None:
    torch.manual_seed(1)
    few, many, odd = torch.randn(3, 9, 36), torch.randn(100, 1, 70), torch.randn(30, 2, 5)
    out = [torch.full((9, 36), float("nan")), torch.randn(1, 70).bfloat16(), torch.full((2, 7), float("nan"))[:, :5]]
    kept = out[1].clone()
    run_jobs(emulation, [Job(few, out[0]), Job(many, out[1], True), Job(odd, out[2])])
    torch.testing.assert_close(out[0], few.sum(0))
    torch.testing.assert_close(out[1], (kept.float() + many.sum(0)).bfloat16())
    torch.testing.assert_close(out[2], odd.sum(0))


def test_a_block_at_width_256_fills_the_card() -> None:
    plan = share_out([(768, 256, True), (256, 256, False), (1024, 256, True), (256, 1024, False)], 128, 256, 132)
    assert len(plan.shares) == 120
    chunks = plan.shares[:, 4]
    assert int(chunks.sum()) == 24 * 128
    assert int(chunks.max()) <= 26
    assert plan.paired
    first, second = plan.shares[::2], plan.shares[1::2]
    assert torch.equal(first[:, 1] + 128, second[:, 1])
    assert torch.equal(first[:, [0, 2, 3, 4]], second[:, [0, 2, 3, 4]])


def test_bad_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="destination must have shape"):
        reduce.pack([Job(torch.randn(3, 2, 4), torch.randn(2, 5))])
    with pytest.raises(ValueError, match="at most 32 sums"):
        reduce.reduce_raw([Job(torch.randn(3, 2, 4), torch.randn(2, 4))] * 33)


@pytest.mark.usefixtures("needs_nvrtc")
def test_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    for tile_n, paired in ((64, 0), (128, 0), (128, 1), (256, 0), (256, 1)):
        macros = {"TILE_N": tile_n, "STAGES": wgrad.stages(tile_n), "PAIRED": paired, "RL_FP16": 0}
        cubin = cuda.build(wgrad.SOURCE, macros)
        assert cubin.resources()["weight_gradients"].spill_loads == 0
        assert "C75" not in cubin.log
    for arch in ("sm_80", "sm_90a", "sm_120"):
        cubin = cuda.build(reduce.SOURCE, {"MAX_JOBS": reduce.MAX_JOBS, "RL_FP16": 0}, arch)
        assert cubin.resources()["reduce"].spill_loads == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [8192, 1000])
def test_weight_gradients_on_the_card(dtype: torch.dtype, N: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(2)
    shapes = [(768, 256, True), (256, 256, False), (1024, 256, True), (256, 1024, False)]
    normal = lambda *s: torch.randn(*s, device="cuda").to(dtype)  # noqa: E731
    nan = lambda *s: torch.full(s, float("nan"), device="cuda")  # noqa: E731
    gradients = [Gradient(normal(N, M), normal(N, K), nan(M, K), nan(M) if bias else None) for M, K, bias in shapes]
    partials, extra = torch.randn(264, 1, 512, device="cuda"), nan(1, 512)
    for _ in range(2):
        wgrad.weight_gradients_raw(gradients, also=[Job(partials, extra)])
    first = [g.dweight_MK.clone() for g in gradients]
    wgrad.weight_gradients_raw(gradients)
    torch.testing.assert_close(extra, partials.sum(0))
    for gradient, again in zip(gradients, first, strict=True):
        dy, x = gradient.dy_NM.double(), gradient.x_NK.double()
        truth = dy.t() @ x
        assert (gradient.dweight_MK.double() - truth).norm() < 1e-5 * truth.norm()
        assert torch.equal(gradient.dweight_MK, again)
        if gradient.dbias_M is not None:
            assert (gradient.dbias_M.double() - dy.sum(0)).norm() < 1e-5 * dy.sum(0).norm()
