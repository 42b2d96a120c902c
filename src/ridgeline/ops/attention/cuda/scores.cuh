// Two warpgroups of the backward kernel: `scores`, which turns S and dP of a square into P and dS, and `relative`, which
// prepares the relative scores for it and carries their gradient back.
#pragma once
#include "schedule.cuh"

namespace rl {

struct Rows {  // what belongs to the two rows of a thread
  float lse[2], delta[2];
};

// ---- rows of a visit: the log-sum-exp comes from memory, delta = rowsum(dO ∘ O) is computed here. Where the last query
// block has a second visit, its rows are kept.
struct Visits {
  Rows kept;
  float next_lse[2];
  u32 count = 0;
  RL_D void start(const Arguments& a, const Place& p, int unit, int i) {
    const Head head(a, unit);
    if (p.lane == 0) {
      const u32 barrier = p.barrier(O_FULL + p.warp);
      barrier_expect(barrier, TILE / 4);
      copy_4d(p.smem + O_AT + p.warp * (TILE / 4), a.o, 0, head.index, 64 * i + 16 * p.warp, head.batch, barrier);
    }
    const int row = 64 * i + 16 * p.warp + (p.lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) next_lse[h] = row + 8 * h < a.T ? a.lse[static_cast<i64>(unit) * a.T + row + 8 * h] : 0.f;
  }
  // The rows of the visit that begins with square n of `unit`; starts the copy of the next query block's.
  RL_D Rows take(const Arguments& a, const Place& p, int unit, int n) {
    if (SPLIT && square_at(n).i != square_at(n).j) return kept;
    Rows rows;
    barrier_wait(p.barrier(O_FULL + p.warp), count++ & 1);
    const int place = p.lane & 3;
    const u32 d_o = p.queries(square_at(n).i) + TILE;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * p.warp + (p.lane >> 2) + 8 * h;
      float sum = 0.f;
#pragma unroll
      for (int part = 0; part < D / 32; ++part) {
        const u32 at = tile_offset(row, D == 64 ? place + 4 * ((row ^ part) & 1) : place);
        sum += dot_8(load_shared_16(p.smem + O_AT + at), load_shared_16(d_o + at));
      }
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      rows.delta[h] = sum * a.kept_inverse, rows.lse[h] = next_lse[h] * LOG2_E;
    }
    sync_warp();
    const int visit = static_cast<int>(SETS.next_diagonal >> (4 * n)) & 15, next = visit & 8 ? a.next_unit(unit) : unit;
    if (next < a.heads_in_all) start(a, p, next, visit & 3);
    if (SPLIT && square_at(n).i == BLOCKS - 1) kept = rows;
    return rows;
  }
  static RL_D float dot_8(uint4 a, uint4 b) {
    return pair_low(a.x) * pair_low(b.x) + pair_high(a.x) * pair_high(b.x) + pair_low(a.y) * pair_low(b.y) +
           pair_high(a.y) * pair_high(b.y) + pair_low(a.z) * pair_low(b.z) + pair_high(a.z) * pair_high(b.z) +
           pair_low(a.w) * pair_low(b.w) + pair_high(a.w) * pair_high(b.w);
  }
};

// ---- scores
// P (dropped) and dS of 16 columns b from S and dP, packed along columns.
template <int B>
RL_D void sixteen_columns(u32 (&pairs_p)[16], u32 (&pairs_ds)[16], const float (&s)[32], const float (&dp)[32],
                          const Rows& rows, float scale, u32 counter, DropoutKeys keys, u32 bias) {
  u32 word[2][2];
  if (DROPOUT) keep_words(word, counter + 64 * B, keys, bias);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float p[2], ds[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 4 * (2 * B + n) + 2 * h + e;
        const float full = exp2_fast(s[at] * scale - rows.lse[h]);
        p[e] = DROPOUT ? keep_float(full, keep_mask(word, n, h, e)) : full;
        ds[e] = p[e] * dp[at] - full * rows.delta[h];
      }
      pairs_p[2 * (2 * B + n) + h] = pack_pair(p[0], p[1]);
      pairs_ds[2 * (2 * B + n) + h] = pack_pair(ds[0], ds[1]);
    }
}

// Brings squares on their way: waits for what they need, begins S with the relative scores, starts S and dP.
struct ScoresStart {
  const Arguments& a;
  const Place& p;
  Rows next_rows;
  u32 count = 0;

  RL_D ScoresStart(const Arguments& a, const Place& p) : a(a), p(p) {}
  RL_D void wait(int n, u32 parity) {
    if (opens_queries(n)) barrier_wait(p.barrier(QUERIES_FULL + square_at(n).i), parity);
    if (opens_keys(n)) barrier_wait(p.barrier(KEYS_FULL + square_at(n).j), parity);
    if (!RELATIVE) return;
    barrier_wait(p.barrier(R_FULL + p.warp), count++ & 1);
    if (!square_at(n).first) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint2 v = load_shared_8(p.smem + ROWS_AT + 8 * (16 * p.warp + (p.lane >> 2) + 8 * h));
      next_rows.lse[h] = from_bits(v.x), next_rows.delta[h] = from_bits(v.y);
    }
  }
  // With nothing to come the square is a repetition that nobody reads, which is cheaper than a branch.
  RL_D void run(float (&s)[32], float (&dp)[32], int n, u32 parity, bool more) {
    if (more) wait(n, parity);
    if (RELATIVE) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        u32 m[4];
        load_matrices(m, p.smem + R_AT + swizzle128(16 * p.warp + (p.lane & 15), 2 * b + (p.lane >> 4)));
#pragma unroll
        for (int x = 0; x < 4; ++x) s[8 * b + 2 * x] = pair_low(m[x]), s[8 * b + 2 * x + 1] = pair_high(m[x]);
      }
    }
    const Square q = square_at(n);
    const u32 operands = p.operands(), queries = operands + queries_operand(q.i), keys = operands + keys_operand(q.j);
    wgmma_fence();
    multiply_tiles(s, queries, keys, !RELATIVE);
    multiply_tiles(dp, queries + SECOND, keys + SECOND, true);
    wgmma_commit();
    if (RELATIVE && more) arrive_for_warp(p.barrier(R_EMPTY + p.warp), p.lane);
  }
};

RL_D void run_scores(const Arguments& a, const Place& p) {
  const int tiles = ceil_div(a.T, 16);
  const float scale = a.scale * LOG2_E;
  const u32 bias = dropout_bias(a.threshold);
  DropoutKeys site{}, keys{};
  if (DROPOUT) site = dropout_site(a.seed_step[0], a.seed_step[1], a.site);
  float s[32], dp[32];
  Rows rows;
  ScoresStart start(a, p);
  Visits visits;
  u32 done = 0, squares = 0;
  int unit = a.first_unit();
  if (unit >= a.heads_in_all) return;
  if (!RELATIVE) visits.start(a, p, unit, square_at(0).i);
  start.run(s, dp, 0, 0, true);
#pragma unroll 1
  for (; unit < a.heads_in_all; unit = a.next_unit(unit), ++done) {
    if (DROPOUT) keys = dropout_stream(site, a.stream + unit);
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      if (q.first) {
        if (RELATIVE) rows = start.next_rows; else rows = visits.take(a, p, unit, n);
      }
      wgmma_wait<0>();
      wgmma_touch(s);
      wgmma_touch(dp);
      if (q.i == q.j) mask_future(s, p.warp, p.lane);
      u32 pairs_p[16], pairs_ds[16];
      const u32 counter = dropout_base(q.i, q.j, p.warp, p.lane, tiles);
      sixteen_columns<0>(pairs_p, pairs_ds, s, dp, rows, scale, counter, keys, bias);
      sixteen_columns<1>(pairs_p, pairs_ds, s, dp, rows, scale, counter, keys, bias);
      sixteen_columns<2>(pairs_p, pairs_ds, s, dp, rows, scale, counter, keys, bias);
      sixteen_columns<3>(pairs_p, pairs_ds, s, dp, rows, scale, counter, keys, bias);
      const bool same_head = n + 1 < SQUARES, more = same_head || a.next_unit(unit) < a.heads_in_all;
      const int next = same_head ? n + 1 : 0;
      const u32 parity = (same_head ? done : ~done) & 1;
      if (AHEAD) start.run(s, dp, next, parity, more);
      const Stage stage(squares);
      barrier_wait(p.barrier(STAGE_EMPTY + stage.index), stage.phase ^ 1);
      store_square(p.smem + P_AT + stage.index * SQUARE, pairs_p, p.warp, p.lane);
      store_square(p.smem + DS_AT + stage.index * SQUARE, pairs_ds, p.warp, p.lane);
      fence_async();
      arrive_for_warp(p.barrier(STAGE_FULL + stage.index), p.lane);
      if (!AHEAD) start.run(s, dp, next, parity, more);
    }
  }
  wgmma_wait<0>();
}

// ---- relative
RL_D void start_window(float (&r)[32], u32 operands, int i, int window) {
  wgmma_fence();
  multiply_tiles(r, operands + queries_operand(i), operands + units(WINDOWS_AT) + window * units(TILE), true);
  wgmma_commit();
}
RL_D void send_window_gradient(const Band& keys, const Place& p, const Shift& to_right, u32 count) {
  u32 g[16];
  shift_band(g, keys, to_right, p.warp);
  const u32 stage = count & 1;
  barrier_wait(p.barrier(G_EMPTY + stage), ~(count >> 1) & 1);
  store_square(p.smem + G_AT + stage * SQUARE, g, p.warp, p.lane);
  fence_async();
  arrive_for_warp(p.barrier(G_FULL + stage), p.lane);
}
struct WayBack {  // from dS to the gradients of windows
  Band keys;
  u32 first = 0, squares = 0, windows = 0;
  RL_D void run(const Place& p, Square q, const Shift& to_right) {
    u32 pairs[16];
    const Stage stage(squares++);
    barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      u32 m[4];
      load_matrices(m, p.smem + DS_AT + stage.index * SQUARE + swizzle128(16 * p.warp + (p.lane & 15), 2 * b + (p.lane >> 4)));
#pragma unroll
      for (int x = 0; x < 4; ++x) pairs[4 * b + x] = m[x];
    }
    arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
    if (q.first) keys.clear(), first = 0;
    take_keys(keys, first, pairs, to_right);
    if (q.i != q.j) send_window_gradient(keys, p, to_right, windows++);
    if (q.last) {  // nothing more to the left
#pragma unroll
      for (int m = 0; m < 16; ++m) pairs[m] = 0;
      take_keys(keys, first, pairs, to_right);
      send_window_gradient(keys, p, to_right, windows++);
    }
  }
};
RL_D void run_relative(const Arguments& a, const Place& p) {
  const Shift to_left(p.lane, 7 - (p.lane >> 2)), to_right(p.lane, (p.lane >> 2) + 1);
  float r[32], first[2] = {0.f, 0.f};
  Band windows;
  WayBack back;
  Visits visits;
  u32 squares = 0, done = 0;
  int unit = a.first_unit();
  if (unit >= a.heads_in_all) return;
  windows.clear(), back.keys.clear();
  visits.start(a, p, unit, square_at(0).i);
  barrier_wait(p.barrier(TABLE_FULL), 0);
  barrier_wait(p.barrier(QUERIES_FULL + square_at(0).i), 0);
  start_window(r, p.operands(), square_at(0).i, 0);
#pragma unroll 1
  for (; unit < a.heads_in_all; unit = a.next_unit(unit), ++done) {
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      Rows rows;
      if (q.first) rows = visits.take(a, p, unit, n);
      wgmma_wait<0>();
      wgmma_touch(r);
      take_window(windows, first, r, to_left);
      u32 pairs[16];
      shift_band(pairs, windows, to_left, 3 - p.warp);
      barrier_wait(p.barrier(R_EMPTY + p.warp), ~squares & 1);
      store_square(p.smem + R_AT, pairs, p.warp, p.lane);
      if (q.first && (p.lane & 3) == 0)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store_shared_8(p.smem + ROWS_AT + 8 * (16 * p.warp + (p.lane >> 2) + 8 * h), as_bits(rows.lse[h]), as_bits(rows.delta[h]));
      arrive_for_warp(p.barrier(R_FULL + p.warp), p.lane);
      const int next = n + 1 < SQUARES ? n + 1 : 0;
      const bool more = n + 1 < SQUARES || a.next_unit(unit) < a.heads_in_all;
      const auto begin_next = [&] {
        if (more && opens_queries(next)) barrier_wait(p.barrier(QUERIES_FULL + square_at(next).i), n + 1 < SQUARES ? done & 1 : ~done & 1);
        const Square to = square_at(next);
        const u32 operands = p.operands();
        if (to.first && to.i != to.j) {  // a visit that does not begin at the diagonal needs the window to the right
          start_window(r, operands, to.i, to.i - to.j - 1);
          wgmma_wait<0>();
          wgmma_touch(r);
          take_window(windows, first, r, to_left);
        }
        start_window(r, operands, to.i, to.i - to.j);
      };
      if (BLOCKS > 2) begin_next();
      if (!BEHIND)
        back.run(p, q, to_right);
      else if (squares > 0)
        back.run(p, square_at(n > 0 ? n - 1 : SQUARES - 1), to_right);
      if (BLOCKS <= 2) begin_next();
    }
  }
  if (BEHIND) back.run(p, square_at(SQUARES - 1), to_right);
  wgmma_wait<0>();
}

}  // namespace rl
