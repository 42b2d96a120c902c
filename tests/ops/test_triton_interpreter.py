"""The interpreter's repairs: what goes wrong without them, each by itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ridgeline.ops._triton import interpreter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if not interpreter.enable():
    pytest.skip("there is a CUDA card: kernels are compiled, not interpreted", allow_module_level=True)


@triton.jit
def round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane).to(tl.bfloat16))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place)))


@triton.jit
def careless_kernel(x_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane)
    tl.store(x_ptr + lane, x + x)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def calling_kernel(x_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x_ptr + lane, doubled(doubled(tl.load(x_ptr + lane))))


@triton.jit
def loop_kernel(out_ptr, N):
    total = 0
    for step in range(0, N):
        total += step
    tl.store(out_ptr, total)


def test_casts_to_bfloat16_round_to_nearest_even() -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 1.00390625, 1.01171875]
    random = torch.randn(4096 - len(special), generator=torch.Generator().manual_seed(0))
    x = torch.cat([torch.tensor(special), random])
    out = torch.empty(4096, dtype=torch.bfloat16)
    round_kernel[(1,)](x, out, BLOCK=4096)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_round_trip_of_every_bfloat16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    back = interpreter.to_bfloat16(interpreter.from_bfloat16(bits))
    number = (bits & 0x7FFF) <= 0x7F80
    assert (back == bits)[number].all()
    assert np.isnan(interpreter.from_bfloat16(back[~number])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dot(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, BLOCK=32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5 if dtype != torch.float16 else 2e-3, atol=1e-2)


def test_bfloat16_arithmetic_is_an_error_not_garbage() -> None:
    with pytest.raises(Exception, match="cast to fp32 first"):
        careless_kernel[(1,)](torch.ones(16, dtype=torch.bfloat16), BLOCK=16)


def test_a_loop_may_end_at_an_argument() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    loop_kernel[(1,)](out, 5)
    assert out.item() == 10


def test_importing_the_ops_imports_no_triton() -> None:
    code = "import sys; import " + ", ".join(
        f"ridgeline.ops.{op}" for op in ("norm", "activation", "cross_entropy", "embedding", "optimizer", "dropout")
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", f"{code}; assert 'triton' not in sys.modules"], env=environment, check=True)


def test_the_language_is_patched_once_a_launch_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as triton_interpreter

    calls = []
    find = triton_interpreter._patch_builtin
    monkeypatch.setattr(triton_interpreter, "_patch_builtin", lambda *given: (calls.append(given[0]), find(*given)))
    load, x = tl.load, torch.ones(4)
    for launch in (1, 2):
        calls.clear()
        calling_kernel[(3,)](x, BLOCK=4)
        assert calls.count(tl) == 1
        assert tl.load is load
        assert x.tolist() == [float(4 ** (3 * launch))] * 4
    with pytest.raises(Exception, match="bf16"):
        careless_kernel[(1,)](torch.ones(4, dtype=torch.bfloat16), BLOCK=4)
    assert tl.load is load
