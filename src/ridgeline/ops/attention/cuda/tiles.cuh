// What every attention kernel shares: tiles of rows in shared memory, their products, the diagonal, rows to memory.
//
// A tile is 64 rows (positions, or rows of the position table) of one head, D columns. A square is 64 queries × 64 keys.
// A warp of a warpgroup holds 16 rows of a 64-row accumulator: lane l the rows l / 4 and l / 4 + 8, columns 2 (l % 4) and
// the next one of every tile of 8 columns.
#pragma once
#include "ridgeline/hopper.cuh"
#include "lanes.cuh"

namespace rl {

constexpr int D = HEAD_WIDTH;        // 32 or 64
constexpr int ROW = D * 2;           // bytes
constexpr int TILE = 64 * ROW;       // bytes
constexpr int SQUARE = 64 * 64 * 2;  // bytes
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile, swizzled as the copy engine leaves it.
RL_HD constexpr u32 tile_offset(u32 row, u32 chunk) {
  return D == 64 ? swizzle128(row, chunk) : row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// Before anything is read that a kernel before this one wrote, or written that it reads.
RL_D void await_previous() {
  wait_for_previous();
  let_next_start();
}

// number / divisor of numbers that are not negative, their product below 2^31, by the inverse: 2^31 / divisor, rounded up. A
// division of whole numbers takes 40 instructions in a row, and a unit of one tile takes some of them.
RL_D int quotient(int number, u32 inverse) { return static_cast<int>(static_cast<u64>(number) * inverse >> 31); }

// Operands of wgmma are named by the low word of their descriptor: 16-byte units, to which constants can be added.
RL_D u32 operand_at(u32 smem) { return ((smem & 0x3FFFF) >> 4) | 1u << 16; }
// Swizzled rows of 128 or 64 bytes, groups of 8 rows one after the other. Whether the product runs along the rows or
// across them is the instruction's affair: every operand here is one swizzle atom wide.
template <int ROW_BYTES>
RL_D u64 operand(u32 low) {
  constexpr u64 HIGH = ROW_BYTES == 128 ? 64u | 1u << 30 : 32u | 2u << 30;
  return HIGH << 32 | low;
}
// Keeps the compiler from holding on to what it computed from a value before.
RL_D u32 afresh(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// d[64, 2 · HALF] (+)= a · bᵀ of a tile and the first rows of another
template <int HALF>
RL_D void multiply_tiles(float (&d)[HALF], u32 a, u32 b, bool fresh) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) wgmma<2 * HALF, 0, 0>(d, operand<ROW>(a + 2 * k), operand<ROW>(b + 2 * k), k > 0 || !fresh);
}
// d[64, D] (+)= square · tile, in registers columns of a square as packed pairs, 4 b … 4 b + 3 the 16 from 16 b on; `tile`
// begins with their rows.
template <int PAIRS>
RL_D void multiply_pairs(float (&d)[D / 2], const u32 (&pairs)[PAIRS], u32 tile, bool fresh) {
#pragma unroll
  for (int b = 0; b < PAIRS / 4; ++b) {
    const u32 part[4] = {pairs[4 * b], pairs[4 * b + 1], pairs[4 * b + 2], pairs[4 * b + 3]};
    wgmma_registers<D, 1>(d, part, operand<ROW>(tile + ROW * b), b > 0 || !fresh);
  }
}

// The 16-bit values of 16 rows × D columns of accumulators, scaled, to rows of `pitch` elements in device memory.
// Lanes trade halves in pairs, so that a lane writes 8 bytes and four lanes a whole sector.
RL_D void store_rows(u16* out, int pitch, const float (&d)[D / 2], float scale_low, float scale_high, int rows,
                     int lane) {
  const int r = lane >> 2, odd = lane & 1;
  out += r * pitch + (odd ? 8 + 2 * ((lane & 3) - 1) : 2 * (lane & 3));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float scale = h ? scale_high : scale_low;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const u32 a = pack_pair(d[8 * k + 2 * h] * scale, d[8 * k + 2 * h + 1] * scale);
      const u32 b = pack_pair(d[8 * k + 4 + 2 * h] * scale, d[8 * k + 4 + 2 * h + 1] * scale);
      const u32 other = shuffle_xor(odd ? a : b, 1);
      if (r + 8 * h < rows) store_global_8(out + 16 * k, odd ? other : a, odd ? b : other);
    }
    out += 8 * pitch;
  }
}

// out[D] += scale · the sums over the 16 rows of a warp's accumulators. Of 8 values for 32 columns each exchange of halves
// leaves a lane with half as many, and at last one; nobody else adds to its place.
RL_D void add_column_sums(float* out, const float (&d)[D / 2], float scale, int lane) {
#pragma unroll
  for (int part = 0; part < D / 32; ++part) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = d[16 * part + k / 2 * 4 + k % 2] + d[16 * part + k / 2 * 4 + 2 + k % 2];
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
      const bool upper = lane & (4 * half);
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const float other = shuffle_xor(upper ? v[k] : v[k + half], 4 * half);
        v[k] = (upper ? v[k + half] : v[k]) + other;
      }
    }
    const int k = (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
    add_global(out + 32 * part + k / 2 * 8 + 2 * (lane & 3) + k % 2, v[0] * scale);
  }
}

// Of two times eight packed values.
RL_D float dot_8(uint4 a, uint4 b) {
  return pair_low(a.x) * pair_low(b.x) + pair_high(a.x) * pair_high(b.x) + pair_low(a.y) * pair_low(b.y) +
         pair_high(a.y) * pair_high(b.y) + pair_low(a.z) * pair_low(b.z) + pair_high(a.z) * pair_high(b.z) +
         pair_low(a.w) * pair_low(b.w) + pair_high(a.w) * pair_high(b.w);
}

// The sum over a row of the products of two tiles' values, by four neighbouring lanes of which this is number `place`.
RL_D float dot_rows(u32 a, u32 b, int row, int place) {
  float sum = 0.f;
#pragma unroll
  for (int part = 0; part < D / 32; ++part) {
    const u32 at = tile_offset(row, D == 64 ? place + 4 * ((row ^ part) & 1) : place);
    sum += dot_8(load_shared_16(a + at), load_shared_16(b + at));
  }
  sum += shuffle_xor(sum, 1);
  return sum + shuffle_xor(sum, 2);
}

// Scores of a diagonal square, its columns from 8 · `first` on: keys after the query count as nothing.
constexpr float NOTHING = -1e30f;
template <int HALF>
RL_D void mask_future(float (&s)[HALF], int first, int warp, int lane) {
  const int row = lane >> 2, column = 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < HALF / 4; ++n) {
    if (first + n < 2 * warp) continue;  // tiles 2 · warp and the next one hold the diagonal
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (first + n > 2 * warp + 1 || column + 8 * (n & 1) + (e & 1) > row + 8 * (e >> 1)) s[4 * n + e] = NOTHING;
  }
}
// The same with keys as rows.
template <int HALF>
RL_D void mask_past(float (&s)[HALF], int first, int warp, int lane) {
  const int row = lane >> 2, column = 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < HALF / 4; ++n) {
    if (first + n > 2 * warp + 1) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (first + n < 2 * warp || column + 8 * (n & 1) + (e & 1) < row + 8 * (e >> 1)) s[4 * n + e] = NOTHING;
  }
}

}  // namespace rl
