// GELU's derivative in 8 bits, beside bf16: round(195 s) + 32, read as 42 / 8192 (code - 32) in half precision, where 0 and
// 1 are exact. Sums in half precision round to whole numbers above 1024; decoding's terms are exact.
//
// In memory codes lie as the kernel's threads have them: tiles of 64 rows × 64 columns one after another, an even number
// of tiles for 64 rows; in a tile 1024 bytes of each of four warps, of which each lane has 16 in either half. Of four codes
// of two pairs the first of each come first, so that ldmatrix can hand them out the other way (ops/mlp).
#pragma once
#include "gelu.cuh"

namespace rl {

constexpr u32 CODES_A_UNIT = 0x5a185a18u, CODE_ORIGIN = 0x64206420u;  // (195, 195), (1024 + 32, 1024 + 32)
constexpr u32 CODE_STEP = 0x1d401d40u, ORIGIN_STEPS = 0xc56ac56au;    // (42 / 8192, …), (-1056 · 42 / 8192, …)

constexpr int CODE_TILE_BYTES = 4096, WARP_CODES = 1024, HALF_CODES = 512;  // bytes
// The line of 128 bytes where the tile of column x and row y begins.
RL_HD int code_line(int x, int y, int columns) {
  return (y / 64 * (2 * ceil_div(columns, 128)) + x / 64) * (CODE_TILE_BYTES / 128);
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
RL_D void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
#endif

// Four codes of two pairs of slopes in half precision: the first slopes of both pairs, then the second ones.
RL_HD u32 encode_slopes(u32 first, u32 second) {
  const u32 a = half_multiply_add(first, CODES_A_UNIT, CODE_ORIGIN);
  const u32 b = half_multiply_add(second, CODES_A_UNIT, CODE_ORIGIN);
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __byte_perm(a, b, 0x6240);
#else
  return (a & 255) | (b & 255) << 8 | (a & 255 << 16) | (b >> 16 & 255) << 24;
#endif
}

// The first or second pair of slopes of four codes, in half precision.
template <int PAIR>
RL_HD u32 decode_slopes(u32 codes) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  const u32 raised = __byte_perm(codes, 0x64646464u, PAIR ? 0x4341 : 0x4240);  // 1024 + code
#else
  const u32 raised = 0x64006400u | (codes >> (8 * PAIR) & 0xff00ffu);
#endif
  return half_multiply_add(raised, CODE_STEP, ORIGIN_STEPS);
}

}  // namespace rl
