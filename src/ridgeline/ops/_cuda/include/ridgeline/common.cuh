// Types and packing shared by every kernel; no CUDA header is needed. The parts marked RL_HD also compile as host C++.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define RL_HD __host__ __device__ __forceinline__
#define RL_D __device__ __forceinline__
#else
#define RL_HD inline
#endif

namespace rl {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

RL_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile with rows of 128 bytes under the 128-byte swizzle.
RL_HD constexpr u32 swizzle128(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
// The same with rows of 64 bytes under the 64-byte swizzle.
RL_HD constexpr u32 swizzle64(u32 row, u32 chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

// Operand tiles of wgmma under the 128-byte swizzle. A tile starts at a multiple of 1024 bytes.
//   K-major  (TRANSPOSED = 0): rows of 64 elements of K; the next 16 of K are 32 bytes further; operand_k_major.
//   MN-major (TRANSPOSED = 1): rows of one K, 64 elements of M or N; 64 more of M or N lie `stride` bytes further;
//            the next 16 of K are 16 · 128 bytes further; operand_mn_major.
RL_HD constexpr u64 operand_k_major(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// K-major under the 64-byte swizzle: rows of 32 elements of K.
RL_HD constexpr u64 operand_k_major_64(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (32ull << 32) | (2ull << 62);
}
RL_HD constexpr u64 operand_mn_major(u32 address, u32 stride) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | (static_cast<u64>(stride >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

#ifdef RL_D

constexpr int WARP = 32;
constexpr u32 FULL = 0xffffffffu;

// Storage type of activations: bf16, or fp16 with -DRL_FP16=1. A pair is two values in one register, low one first.
#ifndef RL_FP16
#define RL_FP16 0
#endif
#if RL_FP16
#define RL_MMA_TYPE "f16"
#else
#define RL_MMA_TYPE "bf16"
#endif

RL_D u32 pack_pair(float low, float high) {
  u32 pair;
#if RL_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
RL_D float pair_low(u32 pair) {
#if RL_FP16
  float value;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return __uint_as_float(pair << 16);
#endif
}
RL_D float pair_high(u32 pair) {
#if RL_FP16
  float value;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;}" : "=f"(value) : "r"(pair));
  return value;
#else
  return __uint_as_float(pair & 0xffff0000u);
#endif
}
RL_D u32 max_pair(u32 a, u32 b) {
  u32 pair;
  asm("max." RL_MMA_TYPE "x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
RL_D u16 pack_one(float value) { return static_cast<u16>(pack_pair(value, 0.f)); }
RL_D float unpack_one(u16 value) { return pair_low(value); }

RL_D float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
RL_D float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

RL_D u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// First 1024-byte boundary in dynamic shared memory: what swizzled tiles need.
RL_D u32 align_1024(u32 address) { return (address + 1023) & ~1023u; }

template <int THREADS>
RL_D void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
RL_D void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

#endif  // RL_D

}  // namespace rl
