"""The product with its weights in registers: its GELU in half precision, and what the compiler makes of it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.linear import stationary
from ridgeline.ops.linear.gemm import Form

LINEAR = Path(stationary.__file__).parent
GELU_SOURCE = """
#include "gelu.cuh"
using namespace rl;
template <bool TANH>
void both(float x, float* gate, float* slope) {
  const u32 pair = half_pair(x, -x), g = gelu_gate_pair<TANH>(pair, half_multiply(pair, pair));
  gate[0] = half_low(g), gate[1] = half_high(g);
  u32 gate_again;
  const u32 d = gelu_derivative_pair<TANH>(pair, gate_again);
  slope[0] = half_low(d), slope[1] = half_high(d);
}
extern "C" void evaluate(const float* x, float* out, int count) {
  for (int i = 0; i < count; ++i) {
    both<false>(x[i], out + 8 * i, out + 8 * i + 2);
    both<true>(x[i], out + 8 * i + 4, out + 8 * i + 6);
  }
}
"""


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_in_half_precision_is_far_better_than_bf16(form: str, compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(GELU_SOURCE, LINEAR)
    every = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([every[every < 60000], torch.linspace(0, 9, 100_001)]).contiguous()
    out = np.empty((len(x), 8), np.float32)
    as_pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    library.evaluate(as_pointer(x.numpy()), as_pointer(out), len(x))
    got = torch.from_numpy(out)[:, 4 * (form == "tanh") :].double()
    both = torch.stack([x, -x], 1).double().requires_grad_()
    value = torch.nn.functional.gelu(both, approximate=form)
    (slope,) = torch.autograd.grad(value.sum(), both)
    gate = torch.where(both == 0, 0.5, value / both)
    assert (got[:, :2] - gate).abs().max() < 7e-4  # bf16 rounds Φ near 1 by 2e-3
    error = got[:, 2:4] - slope  # bf16 rounds slopes above 1 by up to 4e-3
    assert error.abs().max() < 2.5e-3
    density = (-both * both / 2).exp().detach()[-100_001:]
    assert (density * error[-100_001:].square()).sum() < 4e-4**2 * density.sum()


def test_gelu_in_half_precision_keeps_nan(compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(GELU_SOURCE, LINEAR)
    x, out = np.array([np.nan], np.float32), np.zeros(8, np.float32)
    library.evaluate(x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), 1)
    assert np.isnan(out).all()


CODES_SOURCE = """
#include "slope_codes.cuh"
using namespace rl;
extern "C" void evaluate(const u32* pairs, u32* codes, u32* again, int count) {
  for (int i = 0; i < count; i += 2) {
    codes[i / 2] = encode_slopes(pairs[i], pairs[i + 1]);
    again[i] = decode_slopes<0>(codes[i / 2]), again[i + 1] = decode_slopes<1>(codes[i / 2]);
  }
}
"""


def test_slopes_in_codes_are_within_half_a_step(compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(CODES_SOURCE, LINEAR)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    slopes = every[(every > -0.14) & (every < 1.14)]
    slopes = torch.cat([slopes, torch.tensor([0.0, 1.0]).half().repeat(4)])
    slopes = slopes[: len(slopes) // 4 * 4].contiguous()
    codes, again = torch.empty(len(slopes), dtype=torch.uint8), torch.empty_like(slopes)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (slopes, codes, again))
    library.evaluate(*pointers, len(slopes) // 2)
    codes = codes.view(-1, 2, 2).transpose(1, 2).reshape(-1)  # of two pairs the first ones come first
    assert torch.equal(codes, (slopes.double() * 195 + 32).round().to(torch.uint8))
    assert torch.equal(again, ((codes.double() - 32) * 42 / 8192).half())
    assert (again.double() - slopes.double()).abs().max() < 0.5 / 195 + 5e-4
    whole = (slopes == 0) | (slopes == 1)
    assert torch.equal(again[whole], slopes[whole])


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(
    "macros",
    [
        stationary.defines(512, Form(bias=True)),
        stationary.defines(512, Form(bias=True, gelu="exact", slope=True)),
        stationary.defines(512, Form(torch.float16, bias=True, gelu="exact", slope=True)),
        stationary.defines(512, Form(bias=True, residual=True, dropout=True)),
        stationary.defines(512, Form(transposed_b=True, factor=True)),
        stationary.defines(256, Form(transposed_b=True, factor=True)),
        stationary.defines(256, Form(bias=True, gelu="tanh", slope=True)),
        stationary.defines(384, Form(bias=True, gelu="exact", slope=True)),
        stationary.defines(512, Form(bias=True, gelu="exact", slope=True), folded=True),
        stationary.defines(512, Form(bias=True, residual=True, dropout=True), folded=True),
        stationary.defines(512, Form(bias=True, gelu="exact", slope=True, coded=True), folded=True),
        stationary.defines(256, Form(bias=True, gelu="tanh", slope=True, coded=True)),
        stationary.defines(512, Form(transposed_b=True, factor=True, coded=True), folded=True),
        stationary.defines(768, Form(bias=True)),
        stationary.defines(768, Form(bias=True, gelu="tanh", slope=True, coded=True)),
        stationary.defines(768, Form(bias=True, residual=True)),
        stationary.defines(768, Form(transposed_b=True, factor=True, coded=True)),
        stationary.defines(768, Form(bias=True, gelu="tanh", slope=True, coded=True), folded=True),
        stationary.defines(768, Form(bias=True, residual=True), folded=True),
        stationary.defines(768, Form(transposed_b=True, factor=True, coded=True), folded=True),
        stationary.defines(640, Form(bias=True, gelu="exact", slope=True)),
    ],
    ids=[
        "bias",
        "gelu",
        "gelu-fp16",
        "residual",
        "factor",
        "small-factor",
        "small-gelu",
        "middle-gelu",
        "folded-gelu",
        "folded-residual",
        "coded-gelu",
        "small-coded-gelu",
        "coded-factor",
        "wide-bias",
        "wide-coded-gelu",
        "wide-residual",
        "wide-coded-factor",
        "wide-folded-gelu",
        "wide-folded-residual",
        "wide-folded-factor",
        "wider-gelu",
    ],
)
def test_compiles_for_hopper_with_weights_and_accumulators_in_registers(
    macros: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_code: Callable[[bytes], str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    cubin = cuda.build(stationary.SOURCE, macros)
    usage = cubin.resources()["stationary"]
    spilled = (48, 24) if macros["SCALED"] else (0, 0)  # where the schedule goes on, outside the loop over tiles
    assert usage.spill_loads <= spilled[0]
    assert usage.spill_stores <= spilled[1]
    assert "C75" not in cubin.log  # wgmma serialised, or setmaxnreg ignored
    text = machine_code(cubin.image)
    assert text.count("R2UR") < text.count("HGMMA") / 2  # operands are described in uniform registers
    assert "BRA.U.ANY" not in text
    assert stationary.smem(macros) <= stationary.SMEM_LIMIT
    assert macros["LAPS"] >= (2 if macros["K_CHUNKS"] <= stationary.HELD else 1)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("K", [64, 72, 256, 448, 512, 600, 768])
def test_the_ring_fits_beside_the_tiles(K: int, coded: bool) -> None:
    forms = (Form(gelu="exact", slope=True, coded=coded), Form(factor=True, coded=coded))
    for macros in (stationary.defines(K, form) for form in forms):
        assert macros["LAPS"] >= (2 if macros["K_CHUNKS"] <= stationary.HELD else 1)
        assert stationary.SMEM_LIMIT - 8192 * macros["K_CHUNKS"] < stationary.smem(macros) <= stationary.SMEM_LIMIT
