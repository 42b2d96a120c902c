"""What an fp64 mma.sync costs on a card: cycles by shape, warps a scheduler, and conversions from fp32 beside it.

About 5 s. Prints products of two numbers a cycle and multiprocessor (an H200's peak is 128). `dmma_gpu.py compile` only compiles.
"""
import json, os, sys, tempfile
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
SOURCE = r"""
#include "ridgeline/hopper.cuh"
using namespace rl;
template <int K> struct Mma;
#define D "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
template <> struct Mma<4> {
  static RL_D void run(double (&d)[4], const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : D : "d"(a[0]), "d"(a[1]), "d"(b[0]));
  }
};
template <> struct Mma<8> {
  static RL_D void run(double (&d)[4], const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : D : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
  }
};
template <> struct Mma<16> {
  static RL_D void run(double (&d)[4], const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
                 "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
                 : D : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
                   "d"(b[1]), "d"(b[2]), "d"(b[3]));
  }
};
template <> struct Mma<1> {  // m8n8k4, two of them: 16 rows
  static RL_D void run(double (&d)[4], const double* a, const double* b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%4}, {%6}, {%0, %1};\n"
                 "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%2, %3}, {%5}, {%6}, {%2, %3};"
                 : D : "d"(a[0]), "d"(a[1]), "d"(b[0]));
  }
};
extern "C" __global__ void __launch_bounds__(256, 1) rate(unsigned* cycles, const float* numbers) {
  constexpr int ROUNDS = 16;
  double d[16][4] = {}, a[8], b[2][4];
  float raw[4];
#pragma unroll
  for (int n = 0; n < 8; ++n) a[n] = numbers[threadIdx.x + n];
#pragma unroll
  for (int n = 0; n < 4; ++n) b[0][n] = b[1][n] = numbers[threadIdx.x + 8 + n], raw[n] = numbers[threadIdx.x + 12 + n];
  u32 start = 0;
#pragma unroll 1
  for (int turn = 0; turn < 2 * ROUNDS; ++turn) {
    if (turn == ROUNDS) __syncthreads(), start = static_cast<u32>(clock64());
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if (CONVERSIONS && n % 2 == 0)
#pragma unroll
        for (int e = 0; e < 4; ++e) raw[e] += 1.f, b[n / 2 % 2][e] = raw[e];
      Mma<SHAPE>::run(d[n], a, b[n / 2 % 2]);
    }
  }
  __syncthreads();
  const u32 end = static_cast<u32>(clock64());
  double sum = 0.;
#pragma unroll
  for (int n = 0; n < 16; ++n) sum += d[n][0] + d[n][1] + d[n][2] + d[n][3];
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
  if (sum == 12345.) cycles[0] = 1;
}
"""
CASES = [(1, 0), (4, 0), (8, 0), (16, 0), (16, 1), (8, 1)]


def main(only_compile):
    from ridgeline.ops import _cuda as cuda

    folder, found = Path(tempfile.mkdtemp()), []
    file = folder / "rate.cu"
    file.write_text(SOURCE)
    for shape, conversions in CASES:
        defines = {"SHAPE": shape, "CONVERSIONS": conversions}
        name = f"m{8 if shape == 1 else 16}n8k{4 if shape == 1 else shape}{', a conversion a number of B for two' * conversions}"
        if only_compile:
            print(name, *cuda.build(file, defines, "sm_90a").resources().values())
            continue
        import torch

        kernel = cuda.load(file, defines).kernel("rate", "PP")
        out, numbers, row = torch.zeros(132, dtype=torch.int32, device="cuda"), torch.randn(1024, device="cuda"), []
        for warps in (4, 8):
            kernel.launch((132,), 32 * warps, 0, (out, numbers))
            torch.cuda.synchronize()
            products = 16 * 16 * warps * 16 * 8 * (4 if shape == 1 else shape)
            row.append(round(products / out.float().median().item(), 1))
        found.append((name, row))
        print(f"{name}: products a cycle with 1 and 2 warps a scheduler", *row, flush=True)
    if not only_compile:
        (OUT / "dmma.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] == ["compile"])
