// Backward of plain attention, first kernel: dQ, and for the second one each row's log-sum-exp and delta = rowsum(dO ∘ O).
// The plan is in plain.cuh; a warpgroup's block are 64 queries, and keys with their values stream by from the diagonal down.
#include "plain_queries.cuh"

namespace rl {

struct Arguments {
  const TensorMap *q, *k, *v, *o, *d_o;
  const float* lse;
  u16* dq;
  float* stats;  // a pair for each row
  float* column_sums;
  int T, blocks, heads, heads_per_group, units, q_pitch, sum_rows;
  float scale;
  RL_D Turn turn(int number) const { return Turn(number, ceil_div(blocks, GROUPS), units); }
  RL_D int sample(int head) const { return head / heads; }
  RL_D int key_head(int index) const { return index / heads_per_group; }
};
using Here = Place<3, false>;
constexpr int D_O = TILE, O = 2 * TILE;  // of a warpgroup's own tiles, after Q

// What belongs to the two rows of a thread. Rows beyond the last have probabilities of nothing.
struct Rows {
  float lse[2], delta[2];
  RL_D void load(const Arguments& a, const Here& p, int round) {
    const int number = unit_in(round);
    if (number >= a.units) return;
    const Unit unit(a, number);
    const int row = 64 * unit.block(p.group, round) + 16 * p.warp + (p.lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      lse[h] = row + 8 * h < a.T ? a.lse[static_cast<i64>(unit.head) * a.T + row + 8 * h] * LOG2_E : -NOTHING;
  }
  RL_D void compute(const Arguments& a, const Here& p, const Unit& unit, int i, u32 own) {
    const int place = p.lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * p.warp + (p.lane >> 2) + 8 * h;
      delta[h] = dot_rows(own + O, own + D_O, row, place);
      if (place == 0 && i < a.blocks)
        store_global_8(a.stats + 2 * ((static_cast<i64>(unit.head) * a.blocks + i) * 64 + row), as_bits(lse[h]), as_bits(delta[h]));
    }
  }
};
// dS from S and dP, packed along columns.
RL_D void differentiate(u32 (&pairs)[STEP / 4], const float (&s)[STEP / 2], const float (&dp)[STEP / 2], const Rows& rows,
                        float scale) {
#pragma unroll
  for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * n + 2 * h;
      const float p = exp2_fast(s[at] * scale - rows.lse[h]), q = exp2_fast(s[at + 1] * scale - rows.lse[h]);
      pairs[2 * n + h] = pack_pair(p * (dp[at] - rows.delta[h]), q * (dp[at + 1] - rows.delta[h]));
    }
}

// Whether the next scores begin while the product before them still runs: where there are registers for both.
constexpr bool AHEAD = UNEVEN || STEP + D <= 64;
RL_D void end_product(float (&dq)[D / 2]) {
  if (!AHEAD) wgmma_wait<0>();
  wgmma_touch(dq);
}

RL_D void run(const Arguments& a, const Here& p) {
  await_previous();
  const float scale = a.scale * LOG2_E;
  float s[STEP / 2], dp[STEP / 2], dq[D / 2];
  u32 pairs[STEP / 4], tile = 0;
  Rows next;
  next.load(a, p, 0);
#if RL_COLUMN_SUMS
  const int groups = a.heads / a.heads_per_group;
  float* sums = start_column_sums(a.column_sums, p, a.sum_rows, (a.heads + 2 * groups) * D, 0, a.heads * D);
#endif
#pragma unroll 1
  for (int round = 0; unit_in(round) < a.units; ++round) {
    const Unit unit(a, unit_in(round));
    const int i = unit.block(p.group, round);
    const u32 own = p.own(p.group, round);
    Rows rows = next;
    next.load(a, p, round + 1);
    p.wait_own(round);
    rows.compute(a, p, unit, i, own);
#pragma unroll 1
    for (int j = unit.top; j >= 0; --j, ++tile) {
      p.wait_full(tile);
      if (j <= i && i < a.blocks) {
        const u32 keys = operand_at(p.pair(tile)), queries = operand_at(own);
#pragma unroll
        for (int part = 0; part < 64 / STEP; ++part) {
          const u32 some = keys + part * units(STEP * ROW);
          if (!AHEAD) end_product(dq);
          start_scores(s, dp, queries, queries + units(D_O), some);
          await_scores(s, dp);
          if (AHEAD) end_product(dq);
          if (part == 0 && j < i) p.release(tile - 1);
          if (j == i) mask_future(s, part * (STEP / 8), p.warp, p.lane);
          differentiate(pairs, s, dp, rows, scale);
          wgmma_fence();
          multiply_pairs(dq, pairs, some, j == i && part == 0);
          wgmma_commit();
        }
      } else {
        p.release(tile);
      }
    }
    wgmma_wait<0>();
    wgmma_touch(dq);
    p.release_own(round);
    if (i < a.blocks) {
      p.release(tile - 1);
      const int at = 64 * i + 16 * p.warp;
      store_rows(a.dq + (static_cast<i64>(unit.batch) * a.T + at) * a.q_pitch + unit.index * D, a.q_pitch, dq, a.scale, a.scale,
                 a.T - at, p.lane);
#if RL_COLUMN_SUMS
      add_column_sums(sums + unit.index * D, dq, a.scale, p.lane);
#endif
    }
  }
}

}  // namespace rl

// Grid: as many blocks as fit on the card, at most one for each unit. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D. stats: (B, heads, 64 · ceil(T / 64)) pairs. column_sums: (sum_rows, (heads + 2 · groups) · D), the columns
// of dQ.
extern "C" __global__ void __launch_bounds__(rl::THREADS, BLOCKS_PER_PROCESSOR)
    attention_plain_queries(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                            const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap o,
                            const __grid_constant__ rl::TensorMap d_o, const float* lse, rl::u16* dq, float* stats,
                            float* column_sums, int T, int heads, int heads_per_group, int units, int q_pitch, int sum_rows,
                            float scale) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &o, &d_o, lse, dq, stats, column_sums, T, ceil_div(T, 64), heads, heads_per_group, units,
                    q_pitch, sum_rows, scale};
  const Here p;
  p.start();
  share_registers(p.copies());
  if (!p.copies())
    run(a, p);
  else
    copy_all(a, p, [&](const Unit& unit, int row, u32 to, u32 barrier) {
      barrier_expect(barrier, 3 * TILE);
      copy_4d(to, a.q, 0, unit.index, row, unit.batch, barrier);
      copy_4d(to + D_O, a.d_o, 0, unit.index, row, unit.batch, barrier);
      copy_4d(to + O, a.o, 0, unit.index, row, unit.batch, barrier);
    });
}
