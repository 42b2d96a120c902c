"""CUDA C++ at run time: compiling, caching and reporting without a GPU; loading and launching with one."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.ops import _cuda as cuda
from ridgeline.ops._cuda import compiler, nvrtc
from ridgeline.ops.dropout import DropoutState, hidden_keep, quantise

SOURCE = """
#include "ridgeline/hopper.cuh"
#include "part.cuh"
using namespace rl;
extern "C" __global__ void scale(const float* in, float* out, int count, float factor) {
#if __CUDA_ARCH__ >= 900
  wait_for_previous();
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] * factor + OFFSET + PART;
}
extern "C" __global__ void copy_tile(const __grid_constant__ TensorMap map, float* out, long long shift) {
  extern __shared__ u8 raw[];
  const u32 base = align_1024(smem_address(raw)), barrier = base + 32 * 128;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, 32 * 128);
    copy_2d(base, &map, 0, 32 * blockIdx.x, barrier);
  }
  __syncthreads();
  barrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < 32 * 32; i += blockDim.x) {
    float value;
    asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(base + swizzle128(i / 32, i % 32 / 4) + i % 4 * 4));
    out[shift + blockIdx.x * 1024 + i] = value;
  }
}
"""


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE, encoding="utf-8")
    (tmp_path / "part.cuh").write_text("#define PART 0\n")
    return path


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100", "sm_120"])
def test_compiles_and_reports_resources(kernel_file: Path, arch: str) -> None:
    cubin = cuda.build(kernel_file, {"OFFSET": 1}, arch)
    assert cubin.image[:4] == b"\x7fELF"
    report = cubin.resources()
    assert set(report) == {"scale", "copy_tile"}
    assert 0 < report["scale"].registers <= 32
    assert report["scale"].spill_stores == report["scale"].stack == 0


@pytest.mark.usefixtures("needs_nvrtc")
def test_spills_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "spill.cu"
    path.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 1) spill(float* p) {\n'
        "  float v[200];\n#pragma unroll\n  for (int i = 0; i < 200; ++i) v[i] = p[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n#pragma unroll\n  for (int i = 0; i < 200; ++i) p[i * 1024 + threadIdx.x] = v[199 - i];\n"
        "}\n"
    )
    usage = cuda.build(path).resources()["spill"]
    assert usage.registers <= 64
    assert usage.spill_stores > 0


@pytest.mark.usefixtures("needs_nvrtc")
def test_cache_is_keyed_by_source_header_option_and_arch(kernel_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    real = nvrtc.compile_cubin
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *a: compiled.append(a[2][0]) or real(*a))
    first = cuda.build(kernel_file, {"OFFSET": 1})
    assert cuda.build(kernel_file, {"OFFSET": 1}) == first
    assert len(compiled) == 1
    cuda.build(kernel_file, {"OFFSET": 2})
    cuda.build(kernel_file, {"OFFSET": 1}, "sm_120")
    (kernel_file.parent / "part.cuh").write_text("#define PART 3\n")
    assert cuda.build(kernel_file, {"OFFSET": 1}).image != first.image
    assert len(compiled) == 4
    assert len(list(compiler.cache_directory().glob("*.cubin"))) == 4


@pytest.mark.usefixtures("needs_nvrtc")
def test_sources_edited_meanwhile_are_not_kept_under_the_key_of_what_they_were(
    kernel_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, part = cuda.build(kernel_file, {"OFFSET": 1}), kernel_file.parent / "part.cuh"
    for kept in compiler.cache_directory().iterdir():
        kept.unlink()
    real = nvrtc.compile_cubin

    def editing(*arguments):
        kernel_file.write_text(SOURCE.replace("* factor", "- factor"))
        part.write_text("#define PART 3\n")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_cubin", editing)
        assert cuda.build(kernel_file, {"OFFSET": 1}).image == first.image
    assert cuda.build(kernel_file, {"OFFSET": 1}).image != first.image
    assert len(list(compiler.cache_directory().glob("*.cubin"))) == 2


@pytest.mark.usefixtures("needs_nvrtc")
def test_two_headers_of_one_name_are_refused(kernel_file: Path) -> None:
    other = kernel_file.parent / "other"
    other.mkdir()
    (other / "part.cuh").write_text("#define PART 4\n")
    (other / "more.cuh").write_text('#include "part.cuh"\n')
    kernel_file.write_text(f'#include "other/more.cuh"\n{SOURCE}')
    with pytest.raises(ConfigError, match=r"includes two files by the one name part\.cuh"):
        cuda.build(kernel_file, {"OFFSET": 1})


@pytest.mark.usefixtures("needs_nvrtc")
def test_compile_error_holds_the_compilers_words(kernel_file: Path) -> None:
    kernel_file.write_text('extern "C" __global__ void k() { undeclared = 1; }')
    with pytest.raises(RuntimeError, match=r"kernel\.cu does not compile(.|\n)*undeclared"):
        cuda.build(kernel_file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_loading_without_a_gpu_says_why(kernel_file: Path) -> None:
    with pytest.raises(UnsupportedError, match="need a CUDA device"):
        cuda.load(kernel_file, {"OFFSET": 1})


def test_dropout_header_draws_the_specified_masks(compile_host: Callable[..., ctypes.CDLL]) -> None:
    library = compile_host(
        '#include "ridgeline/dropout.cuh"\n'
        'extern "C" void keep(long long seed, long long step, unsigned site, unsigned stream, unsigned threshold,\n'
        "                     int count, unsigned char* out) {\n"
        "  using namespace rl;\n"
        "  const DropoutKeys keys = dropout_stream(dropout_site(seed, step, site), stream);\n"
        "  for (int i = 0; i < count; ++i) {\n"
        "    const DropoutWords words = dropout_words(i, keys);\n"
        "    const u32 bits_0 = dropout_keep_bits(words.word_0, dropout_bias(threshold));\n"
        "    const u32 bits_1 = dropout_keep_bits(words.word_1, dropout_bias(threshold));\n"
        "    out[4 * i] = bits_0 >> 15 & 1; out[4 * i + 1] = bits_0 >> 31;\n"
        "    out[4 * i + 2] = bits_1 >> 15 & 1; out[4 * i + 3] = bits_1 >> 31;\n"
        "  }\n}\n",
    )
    seed, step, site, offset, (T, C), p = 0x1234_5678_9ABC_DEF1, 77, 13, 5, (37, 64), 0.2
    state = DropoutState(torch.tensor([seed, step]), offset)
    expected = hidden_keep(state, site, (2, T, C), p, torch.device("cpu"))
    for sample in range(2):
        got = np.zeros(T * C, np.uint8)
        library.keep(
            ctypes.c_longlong(seed),
            ctypes.c_longlong(step),
            site,
            offset + sample,
            quantise(p)[0],
            T * C // 4,
            got.ctypes.data_as(ctypes.c_void_p),
        )
        assert np.array_equal(got.reshape(T, C).astype(bool), expected[sample].numpy())


@pytest.mark.gpu
def test_launches_on_the_current_stream_and_in_a_graph(kernel_file: Path) -> None:
    kernel = cuda.load(kernel_file, {"OFFSET": 1}).kernel("scale", "PPif")
    x, y = torch.randn(1000, device="cuda"), torch.full((1000,), float("nan"), device="cuda")
    kernel.launch((8,), 128, 0, (x, y, 1000, 2.0))
    torch.testing.assert_close(y, x * 2 + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch((8,), 128, 0, (x, y, 1000, 3.0))
    kernel.launch((8,), 128, 0, (x, y, 1000, 5.0))  # later packing must not reach into the graph
    graph.replay()
    torch.testing.assert_close(y, x * 3 + 1)


@pytest.mark.gpu
def test_early_launches_still_see_what_came_before(kernel_file: Path) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("early launches need compute capability 9.0")
    kernel = cuda.load(kernel_file, {"OFFSET": 1}).kernel("scale", "PPif", patient=True)
    x = torch.randn(1 << 22, device="cuda")
    y, z = torch.empty_like(x), torch.empty_like(x)

    def chain() -> None:
        for source, target in ((x, y), (y, z), (z, y), (y, z)):
            kernel.launch((len(x) // 128,), 128, 0, (source, target, len(x), 0.5))

    chain()
    expected = x / 16 + 1.875
    torch.testing.assert_close(z, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    z.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(z, expected)


@pytest.mark.gpu
def test_tensor_map_and_large_shared_memory(kernel_file: Path) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor maps need compute capability 9.0")
    kernel = cuda.load(kernel_file, {"OFFSET": 1}).kernel("copy_tile", "MPq")
    x = torch.randn(70, 36, device="cuda")[:, :32]
    out = torch.full((7 + 3 * 1024,), float("nan"), device="cuda")
    kernel.launch((3,), 64, 64 * 1024, (cuda.tensor_map(x, (32, 32)), out, 7))
    expected = torch.zeros(96, 32, device="cuda")
    expected[:70] = x
    torch.testing.assert_close(out[7:].view(96, 32), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        cuda.tensor_map(x[:, 1:], (32, 16))
