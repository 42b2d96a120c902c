"""The Hopper GEMM without a GPU: its work division, its GELU, and what the compiler makes of it."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import gemm
from ridgeline.ops.linear.gemm import Config, Form, divide

LINEAR = Path(gemm.__file__).parent


@pytest.mark.parametrize(
    ("row_tiles", "columns", "units"),
    [
        (1024, 16, 132),
        (1024, 12, 132),
        (1024, 8, 66),
        (64, 8, 132),
        (64, 2, 132),
        (1, 1, 132),
        (7, 200, 132),
        (33, 3, 66),
    ],
)
def test_division_covers_every_tile_once_and_evenly(row_tiles: int, columns: int, units: int) -> None:
    work, slots = divide(row_tiles, columns, units)
    assert len(work) <= units
    segments = [segment for unit in work for segment in unit]
    tiles = [(code % 65536, first + i * step) for code, first, step, count in segments for i in range(count)]
    assert sorted(tiles) == [(c, r) for c in range(columns) for r in range(row_tiles)]
    rows = [(code % 65536, code // 65536) for code, *_ in segments]
    assert len(set(rows)) == len(rows)
    assert max(row for _, row in rows) < slots
    longest = max(sum(count for *_, count in unit) for unit in work)
    assert longest <= math.ceil(row_tiles * columns / units) + 1


GELU_SOURCE = """
#include "gelu.cuh"
extern "C" void evaluate(const float* x, float* out, int count) {
  for (int i = 0; i < count; ++i) {
    out[i] = rl::gelu<false>(x[i]);
    out[count + i] = rl::gelu_derivative<false>(x[i]);
    out[2 * count + i] = rl::gelu<true>(x[i]);
    out[3 * count + i] = rl::gelu_derivative<true>(x[i]);
    out[4 * count + i] = rl::gelu_gate<false>(x[i], x[i] * x[i]);
    out[5 * count + i] = rl::gelu_gate<true>(x[i], x[i] * x[i]);
  }
}
"""


def test_gelu_is_far_better_than_bf16_everywhere(compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(GELU_SOURCE, LINEAR)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    dense = torch.linspace(-9, 9, 200_001)
    x = torch.cat([every[every.abs() < 1e18], dense]).contiguous()
    out = np.empty((6, len(x)), np.float32)
    as_pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    library.evaluate(as_pointer(x.numpy()), as_pointer(out), len(x))
    double = x.double().requires_grad_()
    for i, form in enumerate(("none", "tanh")):
        value = torch.nn.functional.gelu(double, approximate=form)
        (slope,) = torch.autograd.grad(value.sum(), double)
        gate = torch.where(double == 0, 0.5, value / double)
        got, got_slope, got_gate = (torch.from_numpy(out[row]).double() for row in (2 * i, 2 * i + 1, 4 + i))
        assert (got_gate - gate).abs().max() < 1.2e-5
        assert (got - value).abs().max() < 5e-5
        assert (got_slope - slope).abs().max() < (2e-5 if form == "none" else 2.5e-4)


def test_gelu_keeps_nan(compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(GELU_SOURCE, LINEAR)
    x, out = np.array([np.nan], np.float32), np.zeros(6, np.float32)
    library.evaluate(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), 1)
    assert np.isnan(out[:4]).all()


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(
    "macros",
    [
        gemm.defines(Config(), 600, Form(bias=True)),
        gemm.defines(Config(), 600, Form(bias=True, gelu="exact", slope=True)),
        gemm.defines(Config(), 600, Form(torch.float16, bias=True, residual=True, dropout=True)),
        gemm.defines(Config(), 600, Form(transposed_b=True, factor=True)),
        gemm.defines(Config(tile_m=64), 256, Form(bias=True, gelu="tanh", slope=True)),
        gemm.defines(Config(), 768, Form(bias=True, gelu="tanh", slope=True, coded=True)),
        gemm.defines(Config(), 768, Form(transposed_b=True, factor=True, coded=True)),
    ],
    ids=["bias", "gelu", "residual-fp16", "factor", "small-tanh", "coded-gelu", "coded-factor"],
)
def test_compiles_for_hopper_with_accumulators_in_registers(
    macros: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_code: Callable[[bytes], str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(gemm.SOURCE, macros)
    usage = cubin.resources()["gemm"]
    assert usage.registers <= 168
    assert usage.spill_loads <= 64  # a few scalars that outlive a tile; the accumulators alone are 512 bytes
    assert "C75" not in cubin.log  # wgmma serialised, or setmaxnreg ignored
    text = machine_code(cubin.image)
    assert text.count("R2UR") < text.count("HGMMA") + 8  # roles are uniform: so are operands' descriptors
    assert "BRA.U.ANY" not in text  # and one lane starts a copy, which takes a loop over lanes otherwise
