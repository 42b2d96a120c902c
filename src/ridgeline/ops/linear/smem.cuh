// Shared memory as the linear kernels use it; the emulation of the tests has its own.
#pragma once
#include "ridgeline/hopper.cuh"

#ifndef RL_EMULATED
namespace rl {

RL_D u32 dynamic_smem() {
  extern __shared__ __align__(1024) char bytes[];
  return smem_address(bytes);
}
RL_D uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
// An arrival at the barrier of block `rank` that publishes no writes: a slot has been read. (A release to the whole
// cluster would cost a memory barrier.)
RL_D void remote_free(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
RL_D void store_matrices_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d) : "memory");
}

}  // namespace rl
#endif
