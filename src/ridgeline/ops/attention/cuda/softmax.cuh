// A row's running reference and sum, for scores whose warp holds 16 rows of a square.
#pragma once
#include "tiles.cuh"

namespace rl {

// A row's reference is its score of its own key, and stays so while its probabilities sum to less than this.
constexpr float LIMIT = RL_FP16 ? 16384.f : 1e18f;

struct Softmax {
  float reference[2], sum[2];  // of the thread's two rows; the sum is the thread's share
};
RL_D float largest(const float (&s)[32], int h) {
  float m = NOTHING;
#pragma unroll
  for (int n = 0; n < 8; ++n) m = fmaxf(m, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
  m = fmaxf(m, shuffle_xor(m, 1));
  return fmaxf(m, shuffle_xor(m, 2));
}
// The scores of their own keys, in a diagonal square of scores: each is there in one lane of four.
RL_D void refer_to_own(Softmax& x, const float (&s)[32], float scale, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float own = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = 4 * (2 * w + h) + 2 * h;
      if (w == warp) own = lane & 4 ? s[at + 1] : s[at];
    }
    x.reference[h] = from_bits(shuffle(as_bits(own), (lane & 28) | lane >> 3)) * scale;
  }
}
// Raises the reference to the largest of these scores and brings what was summed before in line.
RL_D void raise_reference(Softmax& x, float (&o)[D / 2], const float (&s)[32], float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float now = fmaxf(x.reference[h], largest(s, h) * scale), factor = exp2_fast(x.reference[h] - now);
    x.reference[h] = now, x.sum[h] *= factor;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) o[4 * n + 2 * h] *= factor, o[4 * n + 2 * h + 1] *= factor;
  }
}

}  // namespace rl
