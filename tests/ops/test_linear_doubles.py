"""Products of fp32 matrices in fp64: whole kernels on the host against float64, compilation, and on the card."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import doubles, reduce, wgrad
from ridgeline.ops.linear.doubles import Tile
from ridgeline.ops.linear.wgrad import Gradient, share_out

PRODUCT = """#include "ridgeline/doubles.cuh"
#include "doubles.cu"
extern "C" const char* run(const float* a, const float* b, float* out, const float* bias, float* other, const int* n,
                           int grid, int seed, int late) {
  return emulation::launch(grid, THREADS, seed, late, [=] {
    product_of_floats(a, b, out, bias, other, n[0], n[1], n[2], n[3], n[4], n[5]);
  });
}
"""
GRADIENTS = """#include "ridgeline/doubles.cuh"
#include "doubles_gradients.cu"
extern "C" const char* run(const Problems* problems, const int* starts, const Share* shares, float* tiles, float* sums,
                           int N, int grid, int seed, int late) {
  return emulation::launch(grid, THREADS, seed, late, [=] {
    gradients_of_floats(*problems, starts, shares, tiles, sums, N);
  });
}
"""
REDUCE = """#include "ridgeline/hopper.cuh"
#define __shared__ static
#include "reduce.cu"
extern "C" const char* run(const Jobs* jobs, int count, int grid, int random) {
  return emulation::launch(grid, 256, random, false, [=] { reduce(*jobs, count, 0, nullptr); });
}
"""
TILES = [Tile(), Tile(2, 64, 1), Tile(1, 32, 3)]


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def expected_product(
    a: Tensor, b_NK: Tensor, bias: Tensor | None, epilogue: int, tanh: bool, other: Tensor
) -> tuple[Tensor, Tensor | None]:
    u = (a.double() @ b_NK.double().t() + (0 if bias is None else bias.double())).requires_grad_()
    if epilogue == doubles.GELU:
        y = torch.nn.functional.gelu(u, approximate="tanh" if tanh else "none")
        (slope,) = torch.autograd.grad(y.sum(), u)
        return y.detach(), slope
    result = u.detach()
    if epilogue == doubles.FACTOR:
        result = result * other.double()
    elif epilogue == doubles.RESIDUAL:
        result = result + other.double()
    return result, None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("tile", "M", "N", "K", "transposed", "epilogue", "tanh"),
    [
        (0, 130, 68, 40, False, doubles.PLAIN, False),
        (0, 100, 64, 16, True, doubles.FACTOR, False),
        (1, 129, 140, 72, False, doubles.GELU, True),
        (2, 60, 36, 100, True, doubles.RESIDUAL, False),
        (2, 128, 32, 4, False, doubles.GELU, False),
        (0, 260, 132, 120, True, doubles.FACTOR, False),
        (1, 200, 132, 36, False, doubles.RESIDUAL, False),
    ],
)
def test_whole_products_match_float64(
    emulation: Any, tile: int, M: int, N: int, K: int, transposed: bool, epilogue: int, tanh: bool, late: bool
) -> None:
    torch.manual_seed(K)
    a, b_NK = torch.randn(M, K + 4)[:, :K], torch.randn(N, K)
    b = b_NK.t().contiguous() if transposed else b_NK
    bias = None if epilogue == doubles.FACTOR else torch.randn(N)
    whole = torch.full((M, N + 4), float("nan"))
    out = whole[:, :N]
    other = torch.randn(M, N + 4)[:, :N]
    wanted, slope = expected_product(a, b_NK, bias, epilogue, tanh, other)
    macros = {"A_ROWS": 1, "B_ROWS": int(not transposed), "EPILOGUE": epilogue, "TANH": int(tanh)}
    macros["BIAS"] = int(bias is not None)
    run = emulation.compile(PRODUCT, TILES[tile].macros() | macros, doubles.PRODUCT.parent)
    sizes = (ctypes.c_int * 6)(M, N, K, a.stride(0), b.stride(0), out.stride(0))
    grid = -(-M // 128) * -(-N // TILES[tile].columns)
    fault = run(*map(pointer, (a, b, out, bias, other)), sizes, grid, 3, int(late))
    assert fault is None, fault
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=1e-6)
    if slope is not None:
        torch.testing.assert_close(other.double(), slope, rtol=2e-6, atol=1e-6)
    assert whole[:, N:].isnan().all()  # nothing beyond a row


@pytest.mark.parametrize("late", [False, True])
def test_whole_gradients_match_float64(emulation: Any, late: bool) -> None:
    torch.manual_seed(0)
    N, tile = 700, Tile(1, 32, 2)
    shapes = [(136, 132, True), (64, 40, False), (36, 76, True)]
    normal = lambda width: torch.randn(N, width + 4)[:, :width]  # noqa: E731
    gradients = [
        Gradient(normal(M), normal(K), torch.randn(M, K), torch.randn(M) if bias else None, i < 2, i < 1)
        for i, (M, K, bias) in enumerate(shapes)
    ]
    before = [(g.dweight_MK.clone(), None if g.dbias_M is None else g.dbias_M.clone()) for g in gradients]
    plan = share_out(shapes, -(-N // wgrad.CHUNK), tile.columns, 9)
    assert plan.divided
    assert len(plan.work[0]) > 1
    starts, shares = wgrad.tables(plan)
    tiles = torch.full((plan.parts, 128, tile.columns), float("nan"))
    sums = torch.full((plan.parts, 128), float("nan"))
    run = emulation.compile(GRADIENTS, tile.macros() | {"MAX_PROBLEMS": wgrad.MAX_PROBLEMS}, doubles.PRODUCT.parent)
    packed = ctypes.create_string_buffer(doubles.pack(gradients))
    fault = run(packed, *map(pointer, (starts, shares, tiles, sums)), N, len(plan.work), 5, int(late))
    assert fault is None, fault
    job_bytes, grid, _ = reduce.pack(jobs := wgrad.jobs_of(gradients, plan, tiles, sums))
    finish = emulation.compile(REDUCE, {"MAX_JOBS": reduce.MAX_JOBS}, doubles.PRODUCT.parent)
    assert finish(ctypes.create_string_buffer(job_bytes), len(jobs), grid, 1) is None
    for gradient, (weight, bias) in zip(gradients, before, strict=True):
        dy, x = gradient.dy_NM.double(), gradient.x_NK.double()
        wanted = dy.t() @ x + (weight.double() if gradient.add_weight else 0)
        assert (gradient.dweight_MK - wanted).norm() < 2e-7 * wanted.norm()
        if bias is not None:
            wanted = dy.sum(0) + (bias.double() if gradient.add_bias else 0)
            assert (gradient.dbias_M - wanted).norm() < 2e-7 * wanted.norm()


def test_matrices_that_lie_otherwise_are_refused() -> None:
    good = torch.randn(8, 8)
    for bad, words in ((torch.randn(8, 6), "multiple of 4"), (good.half(), "float16"), (good.t(), "rows at multiples")):
        with pytest.raises(ValueError, match=words):
            doubles.product(bad, good, good)
    with pytest.raises(ValueError, match="lie as out"):
        doubles.product(good, good, good, factor_MN=torch.randn(8, 12)[:, :8])


@pytest.mark.slow
@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("tile", TILES[:2])
def test_compiles_without_spills(tile: Tile) -> None:
    kinds = ((1, doubles.GELU, 1), (0, doubles.FACTOR, 0), (1, doubles.RESIDUAL, 1))
    layouts = [{"A_ROWS": 1, "B_ROWS": b, "EPILOGUE": e, "TANH": 1, "BIAS": bias} for b, e, bias in kinds]
    cubins = [cuda.build(doubles.PRODUCT, tile.macros() | layout) for layout in layouts]
    cubins.append(cuda.build(doubles.GRADIENTS, tile.macros() | {"MAX_PROBLEMS": wgrad.MAX_PROBLEMS}))
    for cubin in cubins:
        for used in cubin.resources().values():
            assert used.spill_loads == 0


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "poisoned")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("M", "N", "K"), [(8192, 1024, 256), (1000, 68, 320), (3, 4, 4)])
@pytest.mark.parametrize("epilogue", [doubles.PLAIN, doubles.GELU, doubles.FACTOR, doubles.RESIDUAL])
def test_products_on_the_card(tile: Tile, M: int, N: int, K: int, epilogue: int) -> None:
    torch.manual_seed(K)
    a, b_NK, bias = (torch.randn(*shape, device="cuda") for shape in ((M, K), (N, K), (N,)))
    other, out = torch.randn(M, N, device="cuda"), torch.full((M, N), float("nan"), device="cuda")
    bias_N = None if epilogue == doubles.FACTOR else bias
    wanted, slope = expected_product(a, b_NK, bias_N, epilogue, True, other)
    name = {doubles.GELU: "slope_MN", doubles.FACTOR: "factor_MN", doubles.RESIDUAL: "residual_MN"}.get(epilogue)
    options: dict[str, Any] = {} if name is None else {name: other}
    if epilogue == doubles.GELU:
        options["gelu"] = "tanh"
    doubles.product(a, b_NK, out, bias_N=bias_N, tile=tile, **options)
    assert (out - wanted).norm() < 1e-6 * wanted.norm()
    if slope is not None:
        assert (other - slope).norm() < 1e-6 * slope.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "poisoned")
@pytest.mark.parametrize("N", [8192, 1000])
def test_gradients_on_the_card(N: int) -> None:
    torch.manual_seed(2)
    shapes = [(768, 256, True), (256, 1024, True), (36, 132, False)] * 6
    nan = lambda *s: torch.full(s, float("nan"), device="cuda")  # noqa: E731
    normal = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
    gradients = [Gradient(normal(N, M), normal(N, K), nan(M, K), nan(M) if bias else None) for M, K, bias in shapes]
    doubles.weight_gradients(gradients)
    first = [g.dweight_MK.clone() for g in gradients]
    doubles.weight_gradients(gradients)
    for gradient, again in zip(gradients, first, strict=True):
        wanted = gradient.dy_NM.double().t() @ gradient.x_NK.double()
        assert (gradient.dweight_MK - wanted).norm() < 2e-7 * wanted.norm()
        assert torch.equal(gradient.dweight_MK, again)
        if gradient.dbias_M is not None:
            sums = gradient.dy_NM.double().sum(0)
            assert (gradient.dbias_M - sums).norm() < 2e-7 * sums.norm()
