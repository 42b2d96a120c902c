// What all kernels for many rows of width 256 share: who a thread is, the tiles that a cluster of two blocks works on, the sum
// of a row, and the norm's vectors.
#pragma once
#include "access.cuh"

using namespace rl;

constexpr int WIDTH = 256, VECTOR_BYTES = WIDTH * 2;

struct Place {
  int group, warp, lane;  // consumer warpgroup (the producers' is -1), warp in it, lane
  u32 rank;               // in the cluster
  // The same for a whole warp, as the compiler has to know: operands' descriptors are made of it.
  RL_D static Place here() {
    const int thread = threadIdx.x;
    return {warp_uniform(thread / 128) - 1, warp_uniform(thread / 32 % 4), thread % 32, cluster_rank()};
  }
  RL_D Place afresh() const {  // see rl::afresh
    Place place = *this;
    place.lane = static_cast<int>(rl::afresh(lane));
    return place;
  }
};

// The pairs of tiles that a cluster works on; `row`: the first of this block's tile. With LAST_FIRST the last rows come first:
// the kernel before, which goes the other way, has left them in L2, as this one leaves the first rows to the one behind it.
template <bool LAST_FIRST>
struct TilesOf {
  int pair, pairs, rank, round = 0;
  RL_D TilesOf(int rows, u32 rank) : pair(blockIdx.x / 2), pairs(ceil_div(rows, 256)), rank(static_cast<int>(rank)) {}
  RL_D bool valid() const { return pair < pairs; }
  RL_D int row() const { return 256 * (LAST_FIRST ? pairs - 1 - pair : pair) + 128 * rank; }
  RL_D void advance() { pair += gridDim.x / 2, ++round; }
};

// The four lanes of a row have its sum each.
RL_D float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// acc holds this lane's parts of two rows of r, `mean` their sums: acc −= μ, and 1 / σ, both noted by one of a row's lanes.
// `row`: the warp's first.
RL_D void centre(float (&acc)[WIDTH / 2], float (&mean)[2], float (&rstd)[2], float eps, float* means, float* rstds, int row,
                 int rows, int lane) {
  float squares[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) mean[h] = RMS ? 0.f : row_sum(mean[h]) * (1.f / WIDTH);
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) {
    acc[i] -= mean[i / 2 % 2];
    squares[i / 2 % 2] += acc[i] * acc[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rstd[h] = 1.f / sqrtf(row_sum(squares[h]) * (1.f / WIDTH) + eps);
    const int here = row + lane / 4 + 8 * h;
    if (lane % 4 == 0 && here < rows) {
      if (!RMS) means[here] = mean[h];
      rstds[here] = rstd[h];
    }
  }
}

// The norm's scale and forward its shift and the branch's bias, one after the other: what a warpgroup's thread copies.
RL_D void copy_vectors(u32 vectors, const u16* weight, const u16* shift, const u16* bias, int thread) {
  const u16* sources[3] = {weight, shift, bias};
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (sources[i] && thread < WIDTH / 2)
      store_shared_u32(vectors + i * VECTOR_BYTES + 4 * thread, reinterpret_cast<const u32*>(sources[i])[thread]);
}
