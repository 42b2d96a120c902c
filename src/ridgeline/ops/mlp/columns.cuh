// Sums of a warp's columns in the order of wgmma's results.
#pragma once
#include "access.cuh"

namespace rl {

// Sums of eight values over the eight rows of a warp's lanes; lane l returns value l / 4's.
RL_D float column_sum(const float (&x)[8], int lane) {
  float four[4], two[2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float other = shuffle_xor(lane & 16 ? x[k] : x[k + 4], 16);
    four[k] = (lane & 16 ? x[k + 4] : x[k]) + other;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float other = shuffle_xor(lane & 8 ? four[k] : four[k + 2], 8);
    two[k] = (lane & 8 ? four[k + 2] : four[k]) + other;
  }
  const float other = shuffle_xor(lane & 4 ? two[0] : two[1], 4);
  return (lane & 4 ? two[1] : two[0]) + other;
}

}  // namespace rl
