// Single instructions that only attention needs.
#pragma once
#include "ridgeline/common.cuh"

#ifndef RL_EMULATED
namespace rl {

RL_D u32 shuffle(u32 value, int source) { return __shfl_sync(FULL, value, source); }
RL_D u32 shuffle_xor(u32 value, int mask) { return __shfl_xor_sync(FULL, value, mask); }
RL_D float shuffle_xor(float value, int mask) { return __shfl_xor_sync(FULL, value, mask); }
RL_D bool any_in_warp(bool value) { return __any_sync(FULL, value); }
RL_D void sync_warp() { __syncwarp(); }
RL_D void sync_block() { __syncthreads(); }
RL_D int warp_uniform(int value) { return __shfl_sync(FULL, value, 0); }
RL_D u32 as_bits(float value) { return __float_as_uint(value); }
RL_D float from_bits(u32 bits) { return __uint_as_float(bits); }

// Bytes picked by the nibbles of SELECT; 8 added to a nibble spreads that byte's sign bit over the byte.
template <u32 SELECT>
RL_D u32 permute(u32 a, u32 b) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(SELECT));
  return result;
}
RL_D u32 permute(u32 a, u32 b, u32 select) { return __byte_perm(a, b, select); }
RL_D float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
RL_D float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
RL_D uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
RL_D u32 load_shared_4(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
RL_D void store_shared_4(u32 address, u32 a) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory"); }
RL_D uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
RL_D void store_shared_8(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
RL_D void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
RL_D uint2 load_global_8(const void* pointer) { return *static_cast<const uint2*>(pointer); }
RL_D float4 load_global_16(const float* pointer) {  // past the first cache, which does not see what is added
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(pointer) : "memory");
  return v;
}
RL_D uint4 load_global_16(const u16* pointer) { return *reinterpret_cast<const uint4*>(pointer); }
RL_D void store_global_16(float* pointer, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(pointer) = make_float4(a, b, c, d);
}
RL_D void add_global_16(float* pointer, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
RL_D void add_global(float* pointer, float value) { atomicAdd(pointer, value); }
// Between thread blocks: all that the giver wrote, or knew to be written, is there for who has waited.
RL_D void give(u32* pointer, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
RL_D void wait_until_given(const u32* pointer) {
  while (true) {
    u32 found;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(pointer) : "memory");
    if (found) return;
    asm volatile("nanosleep.u32 100;");
  }
}
// The wait for the kernel before, behind what gave `known`, which is no negative number: what can be computed earlier is.
RL_D void wait_for_previous_knowing(int known) {
  asm volatile("{\n.reg .pred any;\nsetp.ge.s32 any, %0, 0;\n@any griddepcontrol.wait;\n}" ::"r"(known) : "memory");
}
RL_D void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
RL_D void store_global_8(void* pointer, u32 a, u32 b) { *static_cast<uint2*>(pointer) = make_uint2(a, b); }
RL_D u32 dynamic_smem() {  // its alignment is known to the linker: addresses fold into constants
  extern __shared__ __align__(1024) char bytes[];
  return smem_address(bytes);
}
// Over the 128 threads of a warpgroup, at named barrier `id`.
RL_D bool any_in_group(int id, bool value) {
  u32 any;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.u32 in, %1, 0;\nbar.red.or.pred out, %2, 128, in;\nselp.u32 %0, 1, 0, out;\n}"
      : "=r"(any) : "r"(static_cast<u32>(value)), "r"(id) : "memory");
  return any;
}

}  // namespace rl
#endif
