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
RL_D uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
RL_D void store_shared_4(u32 address, u32 a) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory"); }
RL_D u32 as_bits(float value) { return __float_as_uint(value); }
RL_D float from_bits(u32 bits) { return __uint_as_float(bits); }
RL_D void sync_warp() { __syncwarp(); }
// What is the same in all lanes, so that the compiler knows it: descriptors that are made of it stay in uniform registers.
RL_D int warp_uniform(int value) { return __shfl_sync(FULL, value, 0); }
RL_D u32 remote_address(u32 address, u32 rank) {  // where `address` lies in block `rank` of the cluster
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An arrival at another block's barrier that publishes no writes: a slot has been read. (A release to the whole cluster
// would cost a memory barrier.)
RL_D void remote_free(u32 remote_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}
RL_D void store_matrix_pair_transposed(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

}  // namespace rl
#endif
