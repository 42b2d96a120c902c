// Who holds what: rows, columns and the order in which the pre-activation is kept. Also compiles as host C++.
#pragma once
#include "ridgeline/common.cuh"

namespace rl {

// A thread of a warpgroup (lane l = 4 (l / 4) + q) holds rows l / 4 and l / 4 + 8 of its warp's 16 and, of every group of
// 32 columns, eight values: value 2 j + e (j < 4, e < 2) lies at position 8 j + 2 q + e of the product's result.
//
// `owned` is the column at which that value should lie, so that a lane's eight are neighbours in memory. Forward, the
// weight's rows come into shared memory in this order; backward, the four lanes of a row transpose what they hold.
RL_HD constexpr int owned(int position) {
  const int j = position / 8 % 4, q = position / 2 % 4, e = position % 2;
  return position / 32 * 32 + 8 * q + 2 * j + e;
}

// The pre-activation u is kept in the order in which the forward pass's threads hold it, because only the backward pass,
// whose threads hold the same elements, reads it: 16 bytes a thread at a time. It is stored for 64 rows × 128 columns at
// once; step s < 8 holds columns 16 s … 16 s + 15 of them. In units of 16 bytes:
RL_HD i64 kept_index(i64 row_group, int chunks, int chunk, int step, int thread) {
  return ((row_group * chunks + chunk) * 8 + step) * 128 + thread;
}
// Row and column in the 64 × 128 of element `element` < 8 of those 16 bytes: the order of an A fragment.
RL_HD constexpr int kept_row(int thread, int element) { return thread / 32 * 16 + thread % 32 / 4 + 8 * (element / 2 % 2); }
RL_HD constexpr int kept_column(int step, int thread, int element) {
  return 16 * step + 8 * (element / 4) + 2 * (thread % 4) + element % 2;
}

}  // namespace rl
