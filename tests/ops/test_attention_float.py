"""The fp32 kernels of short-window attention: run whole on the host against float64, compiled, and on the card."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from error_budget import compare
from ridgeline.errors import UnsupportedError
from ridgeline.ops._cuda import build
from ridgeline.ops.attention import attention, attention_reference, available, float32
from ridgeline.ops.attention.float32 import DOUBLES, LANES, Kernels

SOURCES = Path(float32.__file__).parent / "cuda"
RUN = """#include "ridgeline/hopper.cuh"
#include SOURCE
extern "C" const char* run(const float* q, const float* k, const float* v, float* out, float* lse, const float* d_out,
                           float* dq, float* dk, float* dv, rl::i64 part, const int* n,
                           float scale, int grid, int forward, int backward, int seed) {
  const char* fault = emulation::launch(grid, forward, seed, seed % 2, [=] {
    attention_forward_float(q, k, v, out, lse, n[0], n[1], n[2], n[3], n[4], n[5], scale);
  });
  return fault ? fault : emulation::launch(grid, backward, seed, seed % 2, [=] {
    attention_backward_float(q, k, v, out, d_out, lse, dq, dk, dv, part, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7],
                             scale);
  });
}
"""


def heads(joint: Tensor, H: int, G: int) -> tuple[Tensor, ...]:
    D = float32.WIDTH
    return tuple(x.unflatten(-1, (-1, D)) for x in joint.split((H * D, G * D, G * D), -1))


@pytest.mark.parametrize(
    ("B", "T", "H", "G"), [(1, 256, 1, 1), (2, 100, 2, 2), (1, 177, 4, 1), (1, 16, 2, 1), (2, 2, 1, 1), (1, 129, 1, 1)]
)
@pytest.mark.parametrize("kernels", [LANES, DOUBLES])
def test_whole_kernels_on_the_host(B: int, T: int, H: int, G: int, kernels: Kernels, emulation: Any) -> None:
    torch.manual_seed(T)
    D, share = float32.WIDTH, H // G
    joint = torch.randn(B, T, (H + 2 * G) * D)
    q, k, v = heads(joint, H, G)
    d_out = torch.randn(B, T, H, D)
    nan = lambda *shape: torch.full(shape, float("nan"))  # noqa: E731
    out, lse, gradients = nan(B, T, H, D), nan(B, H, T), nan(*joint.shape)
    dq, dk, dv = heads(gradients, H, G)
    parts = nan(share, 2, B, T, G, D)
    if share > 1:
        dk, dv = parts[0, 0], parts[0, 1]
    sizes = (ctypes.c_int * 8)(T, H, share, q.stride(1), k.stride(1), out.stride(1), dq.stride(1), dk.stride(1))
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out, lse, d_out, dq, dk, dv)]
    run = emulation.compile(RUN.replace("SOURCE", f'"{kernels.source.name}"'), {}, SOURCES)
    threads = (kernels.forward_threads, kernels.backward_threads)
    fault = run(*pointers, ctypes.c_int64(parts.stride(0)), sizes, ctypes.c_float(0.2), B * H, *threads, T)
    assert fault is None, fault
    if share > 1:
        dk, dv = parts.sum(0)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attention_reference(leaves[0], leaves[1], leaves[2], None, scale=0.2)
    wanted = torch.autograd.grad(expected, leaves, d_out.double())
    for got, right in zip((out, dq, dk, dv), (expected, *wanted), strict=True):
        assert (got - right).norm() < 1e-6 * right.norm()
    scores = torch.einsum("bthd,bshd->bhts", leaves[0], leaves[1].repeat_interleave(share, 2)) * 0.2
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    assert (lse - scores.masked_fill(future, float("-inf")).logsumexp(-1)).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("kernels", [LANES, DOUBLES])
def test_nothing_spills(kernels: Kernels) -> None:
    for used in build(kernels.source, {}, "sm_90a").resources().values():
        assert used.spill_stores == used.spill_loads == 0


def test_what_it_does_not_take_is_said() -> None:
    q, k, v = heads(torch.randn(1, 20, 96), 1, 1)
    assert "CUDA" in str(available("cuda-fp32", q, k, v))
    with pytest.raises(UnsupportedError, match="CUDA"):
        attention(q, k, v, scale=1.0, impl="cuda-fp32")
    assert float32.misplaced("q", q) is None
    assert "q as rows" in str(float32.misplaced("q", q.transpose(0, 1)))
    assert "q as rows" in str(float32.misplaced("q", torch.randn(1, 20, 98)[..., 1:97].unflatten(-1, (-1, 32))))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("B", "T", "H", "G"), [(32, 256, 8, 8), (3, 177, 8, 1), (2, 64, 4, 2), (5, 3, 1, 1)])
def test_on_the_card(B: int, T: int, H: int, G: int) -> None:
    torch.manual_seed(T)
    inputs = dict(zip("qkv", heads(torch.randn(B, T, (H + 2 * G) * float32.WIDTH).cuda(), H, G), strict=True))
    compare(lambda q, k, v, impl: attention(q, k, v, scale=0.2, impl=impl), inputs, "cuda-fp32")
