// Backward of short-window attention (T <= 256): one persistent thread block an SM, a head at a time, a warpgroup for each
// kind of work:
//
//   scores    S = Q·Kᵀ + R and dP = dO·Vᵀ of one square of 64 × 64 after the other; P and dS = P ∘ (dP - delta) to shared
//             memory
//   relative  R, the skew of Q·Eᵀ, to shared memory for `scores`; the way back from dS to G, the gradient of Q·Eᵀ
//   keys      dV += Pᵀ·dO, dK += dSᵀ·Q; delta and the log-sum-exp of a query block's rows, a block ahead of `scores`; draws
//             dropout again, two squares ahead of it (without `relative` that is done by `queries`)
//   queries   dQ += dS·K + G·E, dE += Gᵀ·Q, dE in shared memory over all heads of the block; starts the copies of tiles
//
// All sums are in a fixed order: results repeat bit for bit.
#include "gradients.cuh"
#include "scores.cuh"

// Grid: at most one block an SM, THREADS threads. Tensor maps of (B, T, heads, D) tensors with boxes of 1 × 64 × 1 × D
// (16 rows for O), of the table's (R, D) with boxes of 64 × D.
extern "C" __global__ void __launch_bounds__(rl::THREADS, 1)
    attention_backward(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                       const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap o,
                       const __grid_constant__ rl::TensorMap d_o, const __grid_constant__ rl::TensorMap table,
                       const float* lse, rl::u16* dq, rl::u16* dk, rl::u16* dv, float* dk_heads, float* dv_heads,
                       float* d_table_parts, float* carry, float* column_sums, const rl::i64* seed_step, int T,
                       int table_rows, int heads, int heads_per_group, int heads_in_all, int q_pitch, int kv_pitch, float scale, float kept,
                       rl::u32 site, rl::u32 stream, rl::u32 threshold) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &o, &d_o, &table, lse, dq, dk, dv, dk_heads, dv_heads, d_table_parts, carry, column_sums,
                    seed_step, T, heads, heads_per_group, heads_in_all, q_pitch, kv_pitch, scale, kept, 1.f / kept, scale * kept,
                    site, stream, threshold};
  const int group = warp_uniform(threadIdx.x >> 7);
  const Place p{dynamic_smem(), warp_uniform(threadIdx.x >> 5 & 3), static_cast<int>(threadIdx.x & 31)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < BARRIERS; ++b) barrier_init(p.barrier(b), arrivals(b));
    barrier_init_fence();
    fence_async();
  }
  wait_for_previous();
  let_next_start();
#if RL_COLUMN_SUMS
  const int width = 4 * (heads + 2 * (heads / heads_per_group)) * D;
  for (int x = threadIdx.x; x < width; x += THREADS) column_sums[static_cast<i64>(blockIdx.x) * width + x] = 0.f;
#endif
  sync_block();
  if (group == 0 && p.warp == 0 && a.first_unit() < heads_in_all && elected()) {
    const Head head(a, a.first_unit());
    for (int n = 0; n < SQUARES; ++n) {
      const Square s = square_at(n);
      if (opens_queries(n) && queries_at_start(s.i)) load_queries(a, p, head, s.i);
      if (opens_keys(n) && keys_at_start(s.j)) load_keys(a, p, head, s.j);
      if (RELATIVE && n == 0) {
        barrier_expect(p.barrier(TABLE_FULL), BLOCKS * TILE);
        for (int w = 0; w < BLOCKS; ++w)
          copy_2d(p.smem + WINDOWS_AT + w * TILE, a.table, 0, table_rows - 64 * (w + 1), p.barrier(TABLE_FULL));
      }
    }
  }
  sync_warp();
  if (RELATIVE) {  // of 512 registers for a thread of each group
    if (group == 0) {
      registers_down<112>();
      run_scores(a, p);
    } else if (group == 1) {
      registers_up<184>();
      run_keys(a, p);
    } else if (group == 2) {
      registers_down<96>();
      run_queries(a, p);
    } else {
      registers_down<120>();
      run_relative(a, p);
    }
  } else {  // of 504
    if (group == 0) {
      registers_up<184>();
      run_scores(a, p);
    } else if (group == 1) {
      registers_up<184>();
      run_keys(a, p);
    } else {
      registers_down<136>();
      run_queries(a, p);
    }
  }
}
