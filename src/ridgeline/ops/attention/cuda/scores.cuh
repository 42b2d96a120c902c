// Two warpgroups of the backward kernel: `scores`, which turns S and dP of a square into P and dS, and `relative`, which
// prepares the relative scores for it and carries their gradient back.
#pragma once
#include "schedule.cuh"

namespace rl {

// ---- scores
// P (dropped) and dS of a square from S and dP, to shared memory.
RL_D void exponentiate(u32 square_p, u32 square_ds, const float (&s)[32], const float (&dp)[32], const Rows& rows,
                       float scale, u32 keep, const Place& place) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    u32 pairs_p[4], pairs_ds[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int n = 2 * b + x / 2, h = x % 2;
      float p[2], ds[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 4 * n + 2 * h + e;
        const float full = exp2_fast(s[at] * scale - rows.lse[h]);
        p[e] = !DROPOUT || keep & keep_bit(n, h, e) ? full : 0.f;
        ds[e] = p[e] * dp[at] - full * rows.delta[h];
      }
      pairs_p[x] = pack_pair(p[0], p[1]), pairs_ds[x] = pack_pair(ds[0], ds[1]);
    }
    store_columns(square_p, b, pairs_p[0], pairs_p[1], pairs_p[2], pairs_p[3], place.warp, place.lane);
    store_columns(square_ds, b, pairs_ds[0], pairs_ds[1], pairs_ds[2], pairs_ds[3], place.warp, place.lane);
  }
}

// Brings squares on their way: waits for what they need, begins S with the relative scores, starts S and dP.
struct ScoresStart {
  const Arguments& a;
  const Place& p;
  u32 count = 0;

  RL_D ScoresStart(const Arguments& a, const Place& p) : a(a), p(p) {}
  RL_D void wait(int n, u32 parity) {
    if (opens_queries(n)) barrier_wait(p.barrier(QUERIES_FULL + square_at(n).i), parity);
    if (opens_keys(n)) barrier_wait(p.barrier(KEYS_FULL + square_at(n).j), parity);
    if (RELATIVE) barrier_wait(p.barrier(R_FULL + p.warp), count++ & 1);
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

// The rows of a visit, as `keys` leaves them.
RL_D Rows take_rows(const Place& p, u32 visit) {
  Rows rows;
  barrier_wait(p.barrier(ROWS_FULL + 4 * (visit & 1) + p.warp), visit >> 1 & 1);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint2 v = load_shared_8(p.smem + rows_at(visit) + 8 * (16 * p.warp + (p.lane >> 2) + 8 * h));
    rows.lse[h] = from_bits(v.x), rows.delta[h] = from_bits(v.y);
  }
  return rows;
}

RL_D void run_scores(const Arguments& a, const Place& p) {
  const float scale = a.scale * LOG2_E;
  float s[32], dp[32];
  Rows rows;
  ScoresStart start(a, p);
  u32 done = 0, squares = 0, visits = 0;
  int unit = a.first_unit();
  if (unit >= a.heads_in_all) return;
  start.run(s, dp, 0, 0, true);
#pragma unroll 1
  for (; unit < a.heads_in_all; unit = a.next_unit(unit), ++done) {
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      if (q.first) rows = take_rows(p, visits++);
      u32 keep = 0;
      if (DROPOUT) {
        barrier_wait(p.barrier(KEEP_FULL + 4 * (squares & 1) + p.warp), squares >> 1 & 1);
        keep = load_shared_4(p.smem + keep_at(squares, p));
      }
      wgmma_wait<0>();
      wgmma_touch(s);
      wgmma_touch(dp);
      if (q.i == q.j) mask_future(s, 0, p.warp, p.lane);
      const Stage stage(squares);
      barrier_wait(p.barrier(STAGE_EMPTY + stage.index), stage.phase ^ 1);
      exponentiate(p.smem + P_AT + stage.index * SQUARE, p.smem + DS_AT + stage.index * SQUARE, s, dp, rows, scale, keep, p);
      fence_async();
      arrive_for_warp(p.barrier(STAGE_FULL + stage.index), p.lane);
      const bool same_head = n + 1 < SQUARES, more = same_head || a.next_unit(unit) < a.heads_in_all;
      start.run(s, dp, same_head ? n + 1 : 0, (same_head ? done : ~done) & 1, more);
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
    fence_async();  // an arrival may overtake the reads: all is read before others write there
    arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
    if (q.first) keys.clear(), first = 0;
    take_keys(keys, first, pairs);
    if (q.i != q.j) send_window_gradient(keys, p, to_right, windows++);
    if (q.last) {  // nothing more to the left
#pragma unroll
      for (int m = 0; m < 16; ++m) pairs[m] = 0;
      take_keys(keys, first, pairs);
      send_window_gradient(keys, p, to_right, windows++);
    }
  }
};
RL_D void run_relative(const Arguments& a, const Place& p) {
  const Shift to_left(p.lane, 7 - (p.lane >> 2)), to_right(p.lane, (p.lane >> 2) + 1);
  float r[32], first[2] = {0.f, 0.f};
  Band windows;
  WayBack back;
  u32 squares = 0, done = 0;
  int unit = a.first_unit();
  if (unit >= a.heads_in_all) return;
  windows.clear(), back.keys.clear();
  barrier_wait(p.barrier(TABLE_FULL), 0);
  barrier_wait(p.barrier(QUERIES_FULL + square_at(0).i), 0);
  start_window(r, p.operands(), square_at(0).i, 0);
#pragma unroll 1
  for (; unit < a.heads_in_all; unit = a.next_unit(unit), ++done) {
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      wgmma_wait<0>();
      wgmma_touch(r);
      take_window(windows, first, r);
      u32 pairs[16];
      shift_band(pairs, windows, to_left, 3 - p.warp);
      barrier_wait(p.barrier(R_EMPTY + p.warp), ~squares & 1);
      store_square(p.smem + R_AT, pairs, p.warp, p.lane);
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
          take_window(windows, first, r);
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
