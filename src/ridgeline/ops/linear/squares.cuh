// Sums of squares that a kernel leaves of the gradients it writes.
#pragma once

namespace rl {

// Over the lanes of a warp, in the same order every time; every lane has it.
RL_D float sum_of_warp(float value) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
  return value;
}

}  // namespace rl
