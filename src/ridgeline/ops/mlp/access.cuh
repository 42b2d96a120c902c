// Single instructions that only these kernels need.
#pragma once
#include "ridgeline/copy_5d.cuh"

#ifndef RL_EMULATED
namespace rl {

RL_D float shuffle_xor(float value, int mask) { return __shfl_xor_sync(FULL, value, mask); }
RL_D void sync_warp() { __syncwarp(); }
RL_D int warp_uniform(int value) { return __shfl_sync(FULL, value, 0); }
RL_D void sync_block() { __syncthreads(); }
RL_D uint4 load_stream(const uint4* pointer) { return __ldcs(pointer); }  // read once
// A load that stays where it is written, among products and stores.
RL_D uint4 load_here(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}
RL_D void prefetch_bytes(const void* pointer, u32 bytes) {  // into L2; both at multiples of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pointer), "r"(bytes) : "memory");
}
// A number that the compiler cannot know to be the same as before: what is made of it is made where it is used.
RL_D u32 afresh(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
RL_D float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
RL_D uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
RL_D u32 load_shared_u32(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
RL_D void store_shared_u32(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
RL_D float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
RL_D void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
RL_D void store_shared_4(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
RL_D void load_shared_4(float (&v)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address) : "memory");
}
RL_D void store_global_16(float* pointer, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
RL_D void add_global_16(float* pointer, float a, float b, float c, float d) {  // nobody waits for it
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
RL_D u32 dynamic_smem() {  // its alignment is known to the linker: addresses fold into constants
  extern __shared__ __align__(1024) char bytes[];
  return smem_address(bytes);
}

}  // namespace rl
#endif
