"""What a wgmma costs on a card: cycles of m64nNk16 by N, A in shared memory or in registers, and warpgroups that issue it.

About 6 s. Prints cycles an instruction and warpgroup; four schedulers share one tensor core each, so that with G warpgroups
an instruction's share of the tensor core is cycles / G. `wgmma_gpu.py compile` only compiles.
"""
import json, os, sys, tempfile
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp"))
SOURCE = r"""
#include "ridgeline/hopper.cuh"
using namespace rl;
extern "C" __global__ void __launch_bounds__(512, 1) rate(unsigned* cycles, int groups) {
  extern __shared__ __align__(1024) char bytes[];
  const int group = threadIdx.x >> 7;
  if (group >= groups) return;
  const u32 a_at = smem_address(bytes) + group * 8192, b_at = smem_address(bytes) + 65536;
  float d[WIDTH / 2];
  u32 a[4] = {threadIdx.x, 1, 2, 3};
#pragma unroll
  for (int x = 0; x < WIDTH / 2; ++x) d[x] = 0.f;
  u32 start = 0;
#pragma unroll 1
  for (int turn = 0; turn < 20; ++turn) {
    if (turn == 10) start = static_cast<u32>(clock64());
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if (REGISTERS) {
        wgmma_registers<WIDTH, TRANSPOSED>(d, a, TRANSPOSED ? operand_mn_major(b_at, 8192) : operand_k_major(b_at), 1);
      } else {
        wgmma<WIDTH, 0, TRANSPOSED>(d, operand_k_major(a_at), TRANSPOSED ? operand_mn_major(b_at, 8192) : operand_k_major(b_at), 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(d);
  }
  const u32 end = static_cast<u32>(clock64());
  float sum = 0.f;
#pragma unroll
  for (int x = 0; x < WIDTH / 2; ++x) sum += d[x];
  if ((threadIdx.x & 127) == 0) cycles[group] = end - start;
  if (sum == 12345.f) cycles[8] = 1;
}
"""
CASES = [(n, r, t) for n in (32, 64, 128) for r, t in ((0, 0), (1, 0), (1, 1))]

def main(only_compile):
    from ridgeline.ops import _cuda as cuda
    folder = Path(tempfile.mkdtemp()); file = folder / "rate.cu"; file.write_text(SOURCE); found = []
    for n, r, t in CASES:
        defines = {"WIDTH": n, "REGISTERS": r, "TRANSPOSED": t}
        if only_compile:
            c = cuda.build(file, defines, "sm_90a"); print(n, r, t, *c.resources().values(), "serialized" in c.log); continue
        import torch
        kernel = cuda.load(file, defines).kernel("rate", "Pi"); out = torch.zeros(16, dtype=torch.int32, device="cuda"); row = []
        for groups in (1, 2, 3, 4):
            kernel.launch((132,), 512, 160 * 1024, (out, groups)); torch.cuda.synchronize(); row.append(round(max(out[:groups].tolist()) / 160, 1))
        found.append((n, r, t, row))
        print(f"N {n:3d} A in {'registers' if r else 'shared   '} B {'across' if t else 'along '} cycles an instruction with 1, 2, 3, 4 warpgroups:", *row, "share:", round(row[3] / 4, 1), flush=True)
    if not only_compile: (OUT / "wgmma.json").write_text(json.dumps(found))

if __name__ == "__main__": main(sys.argv[1:] == ["compile"])
