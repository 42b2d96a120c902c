// What a norm needs where no pass of its own makes it (folded.py): W norm(r) + b = W' r / σ + b', so that the product takes
// W' and the residual stream as it is, and the rest is a number a row and a number a column.
#pragma once
#include "stationary_layout.cuh"

// The sums of a finished tile's rows over its 64 columns (those past the last are 0).
RL_D void sum_rows(const Rows& rows, u32 tile, int column, int row, int n, int lane) {
#pragma unroll 1
  for (int token = lane; token < ROWS; token += 32) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int chunk = 0; chunk < COLUMNS / 8; ++chunk) {
      const uint4 v = load_shared_16(tile + swizzle128(token, chunk));
      const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = pair_low(pairs[i]), high = pair_high(pairs[i]);
        sum += low + high;
        squares = fmaf(low, low, fmaf(high, high, squares));
      }
    }
    if (row + token < rows.count && column < n)
      rows.shares[static_cast<i64>(column / COLUMNS) * rows.count + row + token] = make_float2(sum, squares);
  }
}

// 1 / σ of two rows of this lane; loaded a tile before they are needed.
struct RowScales {
  float low, high;
  RL_D void load(const Rows& rows, int row, int lane) { low = one(rows, row + lane), high = one(rows, row + lane + 32); }
  RL_D static float one(const Rows& rows, int row) { return rows.rstd[row < rows.count ? row : 0]; }
  RL_D void store(u32 scales, int lane) const {
    store_shared_4(scales + 4 * lane, as_bits(low));
    store_shared_4(scales + 4 * (lane + 32), as_bits(high));
  }
};
