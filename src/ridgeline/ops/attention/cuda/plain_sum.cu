// Backward of plain attention where several thread blocks shared a head's keys: their dQ, added in their order, and if they
// shared the query heads of a key head as well, its dK and dV.
#include "plain_spans.cuh"
#include "groups.cuh"

// sums: (B · heads / heads_per_part, key_parts, heads_per_part, blocks, 64 · D) in the order of accumulators. Blocks of 128
// threads, the first blocks · B · heads for a tile of dQ each: tiles whose sums are there first come first. column_sums:
// (…, width), whose first 4 · B · blocks rows get the sums over 16 rows of dQ each. notes: as the kernel that leaves the sums
// writes them. Where a key head's query heads were shared out too, a thread more for each four elements of dK, and of dV.
extern "C" __global__ void __launch_bounds__(128)
    attention_plain_sum(const float* sums, rl::u16* dq, float* column_sums, const rl::u32* notes, const float4* dk_parts,
                        const float4* dv_parts, rl::u16* dk, rl::u16* dv, int T, int heads, int heads_per_part, int parts,
                        int key_parts, int samples, int q_pitch, int kv_pitch, int width, float scale) {
  using namespace rl;
  const int blocks = ceil_div(T, 64), all = samples * heads, i = blockIdx.x / all, number = blockIdx.x - i * all;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  let_next_start();
  if (i >= blocks) {
    const int groups = heads / (heads_per_part * parts), each = samples * T * groups * (D / 4);
    const int index = (static_cast<int>(blockIdx.x) - blocks * all) * 128 + thread;
    wait_for_previous();
    if (index < each) sum_shares<D>(dk_parts, dk, index, T, groups, parts, kv_pitch);
    if (index >= each && index < 2 * each) sum_shares<D>(dv_parts, dv, index - each, T, groups, parts, kv_pitch);
    return;
  }
  const int batch = number / heads, head = number - batch * heads, t = 64 * i + 16 * warp;
  const int part = number / heads_per_part, in_part = number - part * heads_per_part;
  float d[D / 2];
#pragma unroll
  for (int n = 0; n < D / 2; ++n) d[n] = 0.f;
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
