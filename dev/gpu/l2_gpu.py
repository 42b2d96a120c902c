"""How fast weights reach the multiprocessors: every block streams the same 1 MiB through a ring of eight slots of 16 KB,
alone or in clusters whose blocks fetch a share each for all. Also how many clusters a card holds at once.

PYTHONPATH=src python3 dev/gpu/l2_gpu.py        (10 s)
"""

import ctypes
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from ridgeline.ops import _cuda as cuda
from ridgeline.ops._cuda import driver

SOURCE = """
#include "ridgeline/hopper.cuh"
using namespace rl;
RL_D void copy_many(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<u16>((1 << CLUSTER) - 1))
      : "memory");
}
extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(CLUSTER, 1, 1)
    stream(const __grid_constant__ TensorMap map, int slots, float* out) {
  extern __shared__ __align__(1024) char bytes[];
  const u32 smem = smem_address(bytes), full = smem + 8 * 16384, empty = full + 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, CLUSTER);
    barrier_init_fence();
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  if (threadIdx.x == 0) {
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    for (int i = 0; i < slots; ++i) {
      const int slot = i % 8, row = i * 128 % 8192;
      barrier_wait(empty + 8 * slot, (i / 8 & 1) ^ 1);
      barrier_expect(full + 8 * slot, 16384);
      const u32 place = smem + slot * 16384 + rank * (16384 / CLUSTER);
      if (CLUSTER > 1) copy_many(place, &map, 0, row + rank * (128 / CLUSTER), full + 8 * slot);
      else copy_2d(place, &map, 0, row, full + 8 * slot);
    }
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < slots; ++i) {
      const int slot = i % 8;
      barrier_wait(full + 8 * slot, i / 8 & 1);
      for (int k = 0; k < CLUSTER; ++k)
        if (CLUSTER > 1) remote_arrive(empty + 8 * slot, k);
        else barrier_arrive(empty + 8 * slot);
    }
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
}
"""


class Cluster(ctypes.Structure):
    """CUlaunchAttribute with a cluster's dimensions."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_int * 13),
    )


def held(kernel, cluster, smem, processors):
    """Clusters that the card holds at once."""
    function, count = ctypes.c_void_p(), ctypes.c_int()
    lib = driver.library()
    lib.cuKernelGetFunction.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
    driver.check(lib.cuKernelGetFunction(ctypes.byref(function), kernel._handle), "cuKernelGetFunction")
    attribute = Cluster(4, 0, (ctypes.c_uint * 3)(cluster, 1, 1))
    config = driver.LaunchConfig(smem=smem, attribute_count=1)
    config.attributes = ctypes.cast(ctypes.pointer(attribute), ctypes.POINTER(driver.LaunchAttribute))
    config.grid[:], config.block[:] = (processors // cluster * cluster, 1, 1), (384, 1, 1)
    code = lib.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    return count.value if code == 0 else f"error {code}"


def main():
    """A line for each cluster size."""
    build = len(sys.argv) > 1
    folder = Path(tempfile.mkdtemp())
    (folder / "stream.cu").write_text(SOURCE)
    for cluster in (1, 2, 4):
        if build:
            print(cuda.build(folder / "stream.cu", {"CLUSTER": cluster}, "sm_90a").resources())
            continue
        weights = torch.randn(8192, 64, device="cuda").bfloat16()
        kernel = cuda.load(folder / "stream.cu", {"CLUSTER": cluster}).kernel("stream", "MiP")
        map_ = cuda.tensor_map(weights, (128 // cluster, 64))
        smem, slots = 200 * 1024, 1024
        blocks = 128
        times = []
        for _ in range(8):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(5):
                kernel.launch((blocks,), 384, smem, (map_, slots, None))
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) / 5 * 1e-3)
        seconds = statistics.median(times)
        each = slots * 16384 / seconds / 1e9
        print(
            f"clusters of {cluster}: {each:.1f} GB/s into each of {blocks} blocks, {each * blocks / cluster / 1e3:.2f} TB/s "
            f"from L2; the card holds {held(kernel, cluster, smem, 132)} clusters",
            flush=True,
        )


if __name__ == "__main__":
    main()
