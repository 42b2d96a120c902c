// Backward of plain attention, second kernel: dK and dV. The plan is in plain.cuh; a warpgroup's block are 64 keys, squares
// have keys as rows, and queries with their gradients stream by, of one head that uses the keys after the other.
#include "plain.cuh"
#include "plain_gradients.cuh"

namespace rl {

struct Arguments {
  const TensorMap *q, *k, *v, *d_o, *stats;
  u16 *dk, *dv;
  float *dk_parts, *dv_parts, *column_sums;
  int T, blocks, heads, heads_per_part, parts, units, kv_pitch, sum_rows;  // parts: of the heads that share keys
  float scale;
};
using Here = Place<2, true>;
// Whether the next scores begin while the products before them still run: where there are registers for both.
constexpr bool AHEAD = UNEVEN && STEP + D <= 96;

// GROUPS blocks of keys of one key head, for one part of its query heads; the first ones have the most queries.
struct Unit {
  int part, first_head, batch, group, first;  // part: its number among those of all samples and key heads
  RL_D Unit(const Arguments& a, int number) {
    const int blocks = ceil_div(a.blocks, GROUPS), head_parts = a.heads / a.heads_per_part;
    const Turn turn(number, blocks, a.units);
    first = GROUPS * turn.block, part = turn.whose, batch = part / head_parts;
    first_head = (part - batch * head_parts) * a.heads_per_part, group = (part - batch * head_parts) / a.parts;
  }
  // The key block of a warpgroup: a longer and a shorter one in turn. One that does not exist sees nothing.
  RL_D int block(int warpgroup, int round) const { return first + (warpgroup + round) % GROUPS; }
};

// Starts the copies of all units: keys with their values for the warpgroups, and queries with all that belongs to them. By a
// warp, one of whose lanes, elected, starts them.
RL_D void copy_all(const Arguments& a, const Here& p) {
  u32 tile = 0;
#pragma unroll 1
  for (int round = 0; unit_in(round) < a.units; ++round) {
    const Unit unit(a, unit_in(round));
#pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
      p.wait_own_empty(group, round);
      if (!elected()) continue;
      const u32 to = p.own(group, round), barrier = p.own_full(group, round);
      const int row = 64 * unit.block(group, round);
      barrier_expect(barrier, 2 * TILE);
      copy_4d(to, a.k, 0, unit.group, row, unit.batch, barrier);
      copy_4d(to + TILE, a.v, 0, unit.group, row, unit.batch, barrier);
    }
#pragma unroll 1
    for (int head = unit.first_head; head < unit.first_head + a.heads_per_part; ++head)
#pragma unroll 1
      for (int i = unit.first; i < a.blocks; ++i, ++tile) {
        p.wait_empty(tile);
        if (!elected()) continue;
        const u32 to = p.pair(tile), barrier = p.full(tile);
        barrier_expect(barrier, PAIR + Here::STATS_BYTES);
        copy_4d(to, a.q, 0, head, 64 * i, unit.batch, barrier);
        copy_4d(to + TILE, a.d_o, 0, head, 64 * i, unit.batch, barrier);
        copy_2d(p.stats(tile), a.stats, 256 * i, unit.batch * a.heads + head, barrier);
      }
  }
}
RL_D void end_products(float (&dk)[D / 2], float (&dv)[D / 2]) {
  if (!AHEAD) wgmma_wait<0>();
  wgmma_touch(dk);
  wgmma_touch(dv);
}

RL_D void run(const Arguments& a, const Here& p) {
  const float scale = a.scale * LOG2_E;
#if RL_COLUMN_SUMS
  const int groups = a.heads / (a.heads_per_part * a.parts), width = (a.heads + 2 * groups) * D;
  float* sums = start_column_sums(a.column_sums, p, a.sum_rows, width, a.heads * D, width) + a.heads * D;
#endif
  float s[STEP / 2], dp[STEP / 2], dk[D / 2], dv[D / 2];
  u32 pairs_p[STEP / 4], pairs_ds[STEP / 4], tile = 0;
#pragma unroll 1
  for (int round = 0; unit_in(round) < a.units; ++round) {
    const Unit unit(a, unit_in(round));
    const int j = unit.block(p.group, round);
    bool fresh = true;
    u32 held = 0;  // the tile whose products are under way, unless fresh
    p.wait_own(round);
    const u32 keys = operand_at(p.own(p.group, round));
#pragma unroll 1
    for (int h = 0; h < a.heads_per_part; ++h)
#pragma unroll 1
      for (int i = unit.first; i < a.blocks; ++i, ++tile) {
        p.wait_full(tile);
        if (i >= j) {
          const u32 queries = operand_at(p.pair(tile));
#pragma unroll
          for (int part = 0; part < 64 / STEP; ++part) {
            const u32 some = queries + part * units(STEP * ROW);
            if (!AHEAD) end_products(dk, dv);
            start_scores(s, dp, keys, keys + units(TILE), some);
            await_scores(s, dp);
            if (AHEAD) end_products(dk, dv);
            if (part == 0 && !fresh) p.release(held);
            if (i == j) mask_past(s, part * (STEP / 8), p.warp, p.lane);
            const u32 stats = p.stats(tile) + part * (8 * STEP);
            differentiate(pairs_p, pairs_ds, s, dp, scale, [=](int n) { return load_statistics(stats, n, p.lane); });
            wgmma_fence();
            multiply_pairs(dv, pairs_p, some + units(TILE), fresh);
            multiply_pairs(dk, pairs_ds, some, fresh);
            wgmma_commit();
            fresh = false;
          }
          held = tile;
        } else {
          p.release(tile);
        }
      }
    wgmma_wait<0>();
    wgmma_touch(dk);
    wgmma_touch(dv);
    p.release_own(round);
    if (j < a.blocks) {
      p.release(held);
      finish(a, unit, j, p.warp, p.lane, dk, dv);
#if RL_COLUMN_SUMS
      add_column_sums(sums + unit.group * D, dk, a.scale, p.lane);
      add_column_sums(sums + (groups + unit.group) * D, dv, 1.f, p.lane);
#endif
    }
  }
}

}  // namespace rl

// Grid: as many blocks as fit on the card, at most one for each unit. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D; of the rows' statistics as (B · heads, 256 · ceil(T / 64)) of 16 bits with boxes of 1 × 256.
// column_sums: (sum_rows, (heads + 2 · groups) · D), the columns of dK and dV.
extern "C" __global__ void __launch_bounds__(rl::THREADS, BLOCKS_PER_PROCESSOR)
    attention_plain_keys(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                         const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap d_o,
                         const __grid_constant__ rl::TensorMap stats, rl::u16* dk, rl::u16* dv, float* dk_parts,
                         float* dv_parts, float* column_sums, int T, int heads, int heads_per_part, int parts, int units,
                         int kv_pitch, int sum_rows, float scale) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &d_o, &stats, dk, dv, dk_parts, dv_parts, column_sums, T, ceil_div(T, 64), heads, heads_per_part,
                    parts, units, kv_pitch, sum_rows, scale};
  const Here p;
  p.start();
  await_previous();
  share_registers(p.copies());
  if (!p.copies())
    run(a, p);
  else if (p.warp == 0)
    copy_all(a, p);
}
