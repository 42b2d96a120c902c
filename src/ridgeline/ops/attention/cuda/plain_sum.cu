// Backward of plain attention where several thread blocks shared a head's keys: their dQ, added in their order.
#include "plain_spans.cuh"

// sums: (B · heads / heads_per_part, key_parts, heads_per_part, blocks, 64 · D) in the order of accumulators. Grid:
// blocks · B · heads, 128 threads each: tiles whose sums are there first come first. column_sums: (…, width), whose first
// 4 · B · blocks rows get the sums over 16 rows of dQ each. notes: as the kernel that leaves the sums writes them.
extern "C" __global__ void __launch_bounds__(128)
    attention_plain_sum(const float* sums, rl::u16* dq, float* column_sums, const rl::u32* notes, int T, int heads,
                        int heads_per_part, int key_parts, int q_pitch, int width, float scale) {
  using namespace rl;
  const int blocks = ceil_div(T, 64), all = gridDim.x / blocks, i = blockIdx.x / all, number = blockIdx.x - i * all;
  const int batch = number / heads, head = number - batch * heads;
  const int part = number / heads_per_part, in_part = number - part * heads_per_part;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, t = 64 * i + 16 * warp;
  float d[D / 2];
#pragma unroll
  for (int n = 0; n < D / 2; ++n) d[n] = 0.f;
  let_next_start();
  if (has_note(i, blocks)) {
#pragma unroll 1
    for (int k = lane; k < key_parts && SPAN * k <= i; k += WARP)
      wait_until_given(notes + note_of(part * key_parts + k, heads_per_part, in_part, i, blocks));
    sync_warp();
  } else {
    wait_for_previous();
  }
#pragma unroll 2
  for (int k = 0; k < key_parts && SPAN * k <= i; ++k) {
    const i64 tile = ((static_cast<i64>(part) * key_parts + k) * heads_per_part + in_part) * blocks + i;
    const float* from = sums + tile * (64 * D) + 4 * thread;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float4 x = load_global_16(from + 512 * n);
      d[4 * n] += x.x, d[4 * n + 1] += x.y, d[4 * n + 2] += x.z, d[4 * n + 3] += x.w;
    }
  }
  store_rows(dq + (static_cast<i64>(batch) * T + t) * q_pitch + head * D, q_pitch, d, scale, scale, T - t, lane);
#if RL_COLUMN_SUMS
  const int row = (batch * blocks + i) * 4 + warp;
  zero_column_sums(column_sums, row, 1, 0, row + 1, width, head * D, head * D + D, lane);
  add_column_sums(column_sums + static_cast<i64>(row) * width + head * D, d, scale, lane);
#endif
}
