// Second stages of attention's backward, in a fixed order of summation.
#include "groups.cuh"

namespace rl {
constexpr int D = HEAD_WIDTH, QUADS = D / 4, LANES = 256 / QUADS;
RL_D void wait_for_previous() {  // and let the next kernel start; see ops/early.py
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
}  // namespace rl

// out[R, D]: the sum over `parts` partial gradients [parts, rows, D] by distance; row R - 1 - distance; zero from T on.
// Grid: R blocks of 256 threads.
extern "C" __global__ void table_gradient(const float4* partials, float4* out, int parts, int rows, int T) {
  using namespace rl;
  __shared__ float4 sums[LANES][QUADS];
  wait_for_previous();
  const int distance = gridDim.x - 1 - blockIdx.x, quad = threadIdx.x % QUADS, lane = threadIdx.x / QUADS;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (distance < T)
    for (int part = lane; part < parts; part += LANES)
      add(sum, partials[(static_cast<i64>(part) * rows + distance) * QUADS + quad]);
  sums[lane][quad] = sum;
  __syncthreads();
  if (lane > 0) return;
  for (int other = 1; other < LANES; ++other) add(sum, sums[other][quad]);
  out[blockIdx.x * QUADS + quad] = sum;
}

// Gradients of K and V by query head, [B, H, T, D] each, summed over the heads of a group into rows of `pitch` elements.
// Grid: a thread for each four elements of [B, T, G, D], K in y = 0 and V in y = 1.
extern "C" __global__ void group_gradients(const float4* dk_heads, const float4* dv_heads, rl::u16* dk, rl::u16* dv, int total,
                                           int T, int groups, int heads_per_group, int pitch) {
  using namespace rl;
  wait_for_previous();
  const int index = blockIdx.x * 256 + threadIdx.x;
  if (index >= total) return;
  sum_shares<D>(blockIdx.y ? dv_heads : dk_heads, blockIdx.y ? dv : dk, index, T, groups, heads_per_group, pitch);
}
