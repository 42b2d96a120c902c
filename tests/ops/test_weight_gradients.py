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
extern "C" const char* run(const Problems* problems, const int* starts, const Share* shares, float* tiles, float* sums,
                           float* squares, int grid, int random, int late) {
  auto kernel = [=] { weight_gradients(*problems, starts, shares, tiles, sums, squares); };
  return emulation::launch(grid, 384, random, late, kernel, 1 + PAIRED);
}
"""
REDUCE = """#include "ridgeline/hopper.cuh"
#define __shared__ static
#include "reduce.cu"
extern "C" const char* run(const Jobs* jobs, int count, float* squares, int grid, int random) {
  return emulation::launch(grid, 256, random, false, [=] { reduce(*jobs, count, 1, squares); });
}
"""


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def run_jobs(emulation: Any, jobs: list[Job]) -> Tensor:
    """The sums of squares that the blocks leave; with none asked for, the results are the same."""
    packed, grid, _ = reduce.pack(jobs)
    squares, before = torch.full((grid,), float("nan")), [job.dst_RC.clone() for job in jobs]
    run = emulation.compile(REDUCE, {"MAX_JOBS": reduce.MAX_JOBS}, wgrad.SOURCE.parent)
    assert run(ctypes.create_string_buffer(packed), len(jobs), pointer(squares), grid, 1) is None
    results = [job.dst_RC.clone() for job in jobs]
    for job, start in zip(jobs, before, strict=True):
        job.dst_RC.copy_(start)
    assert run(ctypes.create_string_buffer(packed), len(jobs), None, grid, 1) is None
    assert all(same(job.dst_RC, result) for job, result in zip(jobs, results, strict=True))
    return squares


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("shapes", "blocks", "paired", "divided"),
    [
        ([(136, 130, True), (64, 130, False), (33, 77, True)], 9, False, 4),
        ([(256, 130, True), (200, 40, False)], 7, True, 4),
        ([(256, 130, True), (200, 40, False), (256, 300, True)], 6, True, 2),
    ],
)
def test_whole_kernels_match_float64(
    emulation: Any, shapes: list[tuple[int, int, bool]], blocks: int, paired: bool, divided: int, late: bool
) -> None:
    torch.manual_seed(0)
    N = 1100
    normal = lambda width: torch.randn(N, -(-width // 8) * 8).bfloat16()[:, :width]  # noqa: E731
    gradients = [
        Gradient(
            normal(M), normal(K), torch.randn(M, K).to(torch.bfloat16 if i == 1 else torch.float32),
            torch.randn(M) if bias else None, i < 2, True,
        )
        for i, (M, K, bias) in enumerate(shapes)
    ]  # fmt: skip
    before = [(g.dweight_MK.clone(), None if g.dbias_M is None else g.dbias_M.clone()) for g in gradients]
    tile_n = wgrad.tile_width([130])
    plan = share_out(shapes, -(-N // 64), tile_n, blocks)
    assert (plan.paired, len(plan.divided)) == (paired, divided)
    starts, shares = wgrad.tables(plan)
    tiles = torch.full((plan.parts, 128, tile_n), float("nan"))
    sums = torch.full((plan.parts, 128), float("nan"))
    operands = [*(g.dy_NM for g in gradients), *(g.x_NK for g in gradients)]
    problems = wgrad.pack(gradients, [bytes(emulation.maps((x, (64, 64)))[0]) for x in operands])
    run = emulation.compile(WGRAD, wgrad.macros(plan, tile_n, torch.bfloat16) | {"STAGES": 3}, wgrad.SOURCE.parent)
    squares = torch.full((wgrad.CONSUMERS * len(plan.work),), float("nan"))
    fault = run(
        ctypes.create_string_buffer(problems), pointer(starts), pointer(shares), pointer(tiles), pointer(sums),
        pointer(squares), len(plan.work), 3, int(late),
    )  # fmt: skip
    assert fault is None
    left = run_jobs(emulation, wgrad.jobs_of(gradients, plan, tiles, sums))
    for gradient, (weight, bias) in zip(gradients, before, strict=True):
        dy, x = gradient.dy_NM.double(), gradient.x_NK.double()
        expected = dy.t() @ x + (weight.double() if gradient.add_weight else 0)
        rounding = 4e-3 if gradient.dweight_MK.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(gradient.dweight_MK.double(), expected, rtol=rounding, atol=1e-3)
        if bias is not None:
            torch.testing.assert_close(gradient.dbias_M.double(), dy.sum(0) + bias.double(), rtol=1e-4, atol=1e-3)
    truth = 0.0
    for gradient in gradients:
        dy, x = gradient.dy_NM.double(), gradient.x_NK.double()
        truth += float((dy.t() @ x).square().sum() + (gradient.dbias_M is not None) * dy.sum(0).square().sum())
    assert float(squares.double().sum() + left.double().sum()) == pytest.approx(truth, rel=1e-6)


def test_sums_of_few_and_of_many_shares(emulation: Any) -> None:
    torch.manual_seed(1)
    few, many, odd = torch.randn(3, 9, 36), torch.randn(100, 1, 70), torch.randn(30, 2, 5)
    out = [torch.full((9, 36), float("nan")), torch.randn(1, 70).bfloat16(), torch.full((2, 7), float("nan"))[:, :5]]
    kept = out[1].clone()
    squares = run_jobs(emulation, [Job(few, out[0]), Job(many, out[1], True), Job(odd, out[2])])
    torch.testing.assert_close(out[0], few.sum(0))
    torch.testing.assert_close(out[1], (kept.float() + many.sum(0)).bfloat16())
    torch.testing.assert_close(out[2], odd.sum(0))
    expected = [few.sum(0), many.sum(0), odd.sum(0)]
    torch.testing.assert_close(squares.sum(), torch.stack([x.square().sum() for x in expected]).sum())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_squares_of_what_is_not_finite_are_not_finite(emulation: Any, which: int, bad: float) -> None:
    shares = [torch.randn(3, 9, 36), torch.randn(100, 1, 70)]
    shares[which][-1, -1, -1] = bad
    squares = run_jobs(emulation, [Job(part, torch.empty(part.shape[1:])) for part in shares])
    assert not squares.sum().isfinite()


GPT2 = [(768, 256, True), (256, 256, True), (1024, 256, True), (256, 1024, True)]
FAST = [(320, 256, False), (256, 256, False), (512, 256, False), (256, 512, False)]


@pytest.mark.parametrize("shapes", [GPT2 * 6, FAST * 6, GPT2, FAST * 12])
@pytest.mark.parametrize("chunks", [2048, 128, 7, 1])
def test_a_model_at_width_256_fills_the_card(shapes: list[tuple[int, int, bool]], chunks: int) -> None:
    """Every chunk of every tile once, blocks evenly loaded, pairs over the same rows of the same columns."""
    plan = share_out(shapes, chunks, 256, 132, wgrad.DELIVERY, wgrad.BIASED)
    assert plan.paired
    assert len(plan.work) == 132
    time = lambda share: share.chunks * (wgrad.BIASED if share.bias else 1) + wgrad.DELIVERY  # noqa: E731
    times = [sum(time(share) for share in work) for work in plan.work]
    if chunks >= 128:
        assert max(times) <= 1.06 * sum(times) / len(times)
    seen = {(layer, row, column): [0] * chunks for layer, row, column in _places(shapes)}
    for work in plan.work:
        for share in work:
            assert (share.part < 0) == (share.chunks == chunks)
            for chunk in range(share.first, share.first + share.chunks):
                seen[share[:3]][chunk] += 1
    assert all(counts == [1] * chunks for counts in seen.values())
    parts = sorted(share.part for work in plan.work for share in work if share.part >= 0)
    assert parts == sorted(number for _, numbers in plan.divided for number in numbers)
    for upper, lower in zip(plan.work[::2], plan.work[1::2], strict=True):
        assert [s._replace(row=s.row + 128, part=0) for s in upper] == [s._replace(part=0) for s in lower]


def _places(shapes: list[tuple[int, int, bool]]) -> list[tuple[int, int, int]]:
    """Tiles of 128 × 256, whose rows are rounded up to pairs."""
    return [
        (layer, row, column)
        for layer, (M, K, _) in enumerate(shapes)
        for row in range(0, -(-M // 256) * 256, 128)
        for column in range(0, K, 256)
    ]


def test_blocks_of_the_first_jobs_are_told_apart() -> None:
    sums = [Job(torch.randn(30, 1, 70), torch.empty(1, 70)), Job(torch.randn(5, 64, 64), torch.empty(64, 64))]
    assert [reduce.pack(sums, ready)[1:] for ready in (-1, 0, 1, 2, 3)] == [(7, 0), (7, 0), (7, 3), (7, 7), (7, 7)]
    assert reduce.blocks_of(sums) == 7


def test_bad_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="destination must have shape"):
        reduce.pack([Job(torch.randn(3, 2, 4), torch.randn(2, 5))])


@pytest.mark.usefixtures("needs_nvrtc")
def test_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    for tile_n, paired in ((64, 0), (128, 0), (128, 1), (256, 0), (256, 1)):
        plan = wgrad.Plan([], bool(paired), 0, [])
        cubin = cuda.build(wgrad.SOURCE, wgrad.macros(plan, tile_n, torch.bfloat16))
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
    shapes = [*GPT2, (256, 256, False)] * 5
    normal = lambda *s: torch.randn(*s, device="cuda").to(dtype)  # noqa: E731
    nan = lambda *s: torch.full(s, float("nan"), device="cuda")  # noqa: E731
    gradients = [Gradient(normal(N, M), normal(N, K), nan(M, K), nan(M) if bias else None) for M, K, bias in shapes]
    partials, extra = torch.randn(264, 1, 512, device="cuda"), nan(1, 512)
    left = [nan(1 << 14) for _ in range(2)]
    counts: list[int] = []

    def room(count: int) -> Tensor:
        counts.append(count)
        return left[len(counts) - 1][:count]

    for _ in range(2):
        wgrad.weight_gradients_raw(gradients, also=[Job(partials, extra)], room=room)
    squares = [x[: counts[0]] for x in left]
    results = [extra, *(x for g in gradients for x in (g.dweight_MK, g.dbias_M) if x is not None)]
    assert torch.equal(*squares)
    assert float(squares[0].double().sum()) == pytest.approx(
        sum(float(x.double().square().sum()) for x in results), rel=1e-6
    )
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
