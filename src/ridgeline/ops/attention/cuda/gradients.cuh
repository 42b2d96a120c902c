// Two warpgroups of the backward kernel: `keys`, with dK and dV, and `queries`, with dQ and dE.
#pragma once
#include "schedule.cuh"

namespace rl {

// ---- keep decisions of dropout, drawn for `scores` square after square, two squares ahead of it
constexpr bool DRAWN_BY_KEYS = RELATIVE;  // `queries` has most to do there, and `keys` waits; otherwise the reverse
struct Keeper {
  DropoutKeys keys{};
  // Square n of `unit`, the `count`th of all: its decisions take the place of those of the square before the last.
  RL_D void draw(const Arguments& a, const Place& p, int unit, int n, u32 count) {
    if (!DROPOUT) return;
    if (n == 0) keys = dropout_stream(dropout_site(a.seed_step[0], a.seed_step[1], a.site), a.stream + unit);
    const Square q = square_at(n);
    const u32 counter = afresh(dropout_base(q.i, q.j, p.warp, p.lane, ceil_div(a.T, 16)));
    store_shared_4(p.smem + keep_at(count, p), keep_square(counter, keys, dropout_bias(a.threshold)));
    arrive_for_warp(p.barrier(KEEP_FULL + 4 * (count & 1) + p.warp), p.lane);
  }
  RL_D void start(const Arguments& a, const Place& p) {
    draw(a, p, a.first_unit(), 0, 0);
    draw(a, p, SQUARES > 1 ? a.first_unit() : a.next_unit(a.first_unit()), 1 % SQUARES, 1);
  }
  // Once square n of `unit` is there, the `count`th, `scores` has read its decisions: those of the next square but one.
  RL_D void draw_after(const Arguments& a, const Place& p, int unit, int n, u32 count) {
    const int next = n + 2 < SQUARES ? unit : a.next_unit(SQUARES > 1 ? unit : a.next_unit(unit));
    draw(a, p, next, n + 2 < SQUARES ? n + 2 : (n + 2) % SQUARES, count + 2);
  }
};

// ---- keys
// Rows of a visit: the log-sum-exp comes from memory, delta = rowsum(dO ∘ O) is computed here, a visit ahead of `scores`.
// Where the last query block has a second visit, its rows still lie in the stage whose turn it is.
struct Visits {
  float next_lse[2];
  u32 copies = 0, count = 0;
  RL_D void start(const Arguments& a, const Place& p, int unit, int i) {
    const Head head(a, unit);
    if (elected()) {
      const u32 barrier = p.barrier(O_FULL + p.warp);
      barrier_expect(barrier, TILE / 4);
      copy_4d(p.smem + O_AT + p.warp * (TILE / 4), a.o, 0, head.index, 64 * i + 16 * p.warp, head.batch, barrier);
    }
    const int row = 64 * i + 16 * p.warp + (p.lane >> 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) next_lse[h] = row + 8 * h < a.T ? a.lse[static_cast<i64>(unit) * a.T + row + 8 * h] : 0.f;
  }
  // Leaves the rows of the visit that begins with square n of `unit`, whose turn among the heads has this parity.
  RL_D void prepare(const Arguments& a, const Place& p, int unit, int n, u32 parity) {
    if (square_at(n).i == square_at(n).j) compute(a, p, unit, n, parity);
    arrive_for_warp(p.barrier(ROWS_FULL + 4 * (count & 1) + p.warp), p.lane);
    ++count;
  }
  // Also starts the copy of the next query block's rows of O.
  RL_D void compute(const Arguments& a, const Place& p, int unit, int n, u32 parity) {
    barrier_wait(p.barrier(QUERIES_FULL + square_at(n).i), parity);
    barrier_wait(p.barrier(O_FULL + p.warp), copies++ & 1);
    const int place = p.lane & 3;
    const u32 d_o = p.queries(square_at(n).i) + TILE;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * p.warp + (p.lane >> 2) + 8 * h;
      const float sum = dot_rows(p.smem + O_AT, d_o, row, place);
      if (place == 0) store_shared_8(p.smem + rows_at(count) + 8 * row, as_bits(next_lse[h] * LOG2_E), as_bits(sum * a.kept_inverse));
    }
    sync_warp();
    const int visit = static_cast<int>(SETS.next_diagonal >> (4 * n)) & 15, next = visit & 8 ? a.next_unit(unit) : unit;
    if (next < a.heads_in_all) start(a, p, next, visit & 3);
  }
};
// The bias gradient of the joint projection: columns of dQ, then dK, then dV. Those of dK are none: of each query the gradients of
// its scores add up to nothing.
RL_D float* column_sums(const Arguments& a, const Place& p, int column) {
  const int groups = a.heads / a.heads_per_group;
  return a.column_sums + static_cast<i64>(4 * blockIdx.x + p.warp) * ((a.heads + 2 * groups) * D) + column * D;
}
RL_D void store_key_rows(const Arguments& a, const Place& p, Head head, int j, float (&dk)[D / 2], float (&dv)[D / 2]) {
  const int row = 64 * j + 16 * p.warp, rows = a.T - row;
  const float kept = a.kept, scale = a.gradient_scale;
#if RL_COLUMN_SUMS
  const int group = head.index / a.heads_per_group, groups = a.heads / a.heads_per_group;
  add_column_sums(column_sums(a, p, a.heads + groups + group), dv, kept, p.lane);
#endif
#if RL_GROUPED == 1  // a second kernel sums them
  const i64 at = (static_cast<i64>(head.unit) * a.T + row) * D + 2 * (p.lane & 3);
  const int r = p.lane >> 2;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (r + 8 * h < rows) {
        const i64 here = at + (r + 8 * h) * D + 8 * n;
        store_global_8(a.dk_heads + here, as_bits(dk[4 * n + 2 * h] * scale), as_bits(dk[4 * n + 2 * h + 1] * scale));
        store_global_8(a.dv_heads + here, as_bits(dv[4 * n + 2 * h] * kept), as_bits(dv[4 * n + 2 * h + 1] * kept));
      }
#else
  const i64 at = (static_cast<i64>(head.batch) * a.T + row) * a.kv_pitch + head.index / a.heads_per_group * D;
  store_rows(a.dk + at, a.kv_pitch, dk, scale, scale, rows, p.lane);
  store_rows(a.dv + at, a.kv_pitch, dv, kept, kept, rows, p.lane);
#endif
}
RL_D void run_keys(const Arguments& a, const Place& p) {
  float dk[OPEN_KEYS][D / 2], dv[OPEN_KEYS][D / 2];
  u32 done = 0;
  int unit = a.first_unit();
  if (unit >= a.heads_in_all) return;
  Keeper keeper;
  if (DRAWN_BY_KEYS) keeper.start(a, p);
  Visits visits;
  visits.start(a, p, unit, square_at(0).i);
  visits.prepare(a, p, unit, 0, 0);
#pragma unroll 1
  for (; unit < a.heads_in_all; unit = a.next_unit(unit), ++done) {
#pragma unroll
    for (int n = 0; n < SQUARES; ++n) {
      const Square q = square_at(n);
      const bool fresh = opens_keys(n) && a.opens_group(unit);
      const int slot = q.j % OPEN_KEYS;
      const Stage stage(done * SQUARES + n);
      const auto prepare_next = [&] {
        const bool same_head = next_visit(n) < 16;
        const int for_unit = same_head ? unit : a.next_unit(unit);
        if (for_unit < a.heads_in_all) visits.prepare(a, p, for_unit, next_visit(n) & 15, (same_head ? done : ~done) & 1);
      };
      barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);
      const u32 operands = p.operands(), queries = operands + queries_operand(q.i);
      const u32 squares = operands + stage.index * units(SQUARE);
      wgmma_fence();
      multiply_square_transposed(dv[slot], squares + units(P_AT), queries + SECOND, fresh);
      multiply_square_transposed(dk[slot], squares + units(DS_AT), queries, fresh);
      wgmma_commit();
      if (DRAWN_BY_KEYS) keeper.draw_after(a, p, unit, n, done * SQUARES + n);
      wgmma_wait<0>();
      wgmma_touch(dv[slot]);
      wgmma_touch(dk[slot]);
      arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
      // The next visit's tiles may still be on their way, while `scores` waits for this stage, and then for those rows.
      if (q.first && q.last) prepare_next();
      if (q.i == q.j && a.closes_group(unit)) store_key_rows(a, p, Head(a, unit), q.j, dk[slot], dv[slot]);
      if (q.first && !q.last) prepare_next();
    }
  }
}

// ---- queries
// dq += G·window, and the window's dE, kept in shared memory by the thread that holds it, += Gᵀ·Q.
RL_D void add_window_gradient(float (&dq)[D / 2], const Place& p, int i, int window, u32 count) {
  const u32 stage = count & 1, at = p.smem + DE_AT + window * WINDOW_SUM + 16 * (32 * p.warp + p.lane);
  float de[D / 2];
#pragma unroll
  for (int x = 0; x < D / 8; ++x) {
    const uint4 sum = load_shared_16(at + 2048 * x);
    de[4 * x] = from_bits(sum.x), de[4 * x + 1] = from_bits(sum.y), de[4 * x + 2] = from_bits(sum.z), de[4 * x + 3] = from_bits(sum.w);
  }
  barrier_wait(p.barrier(G_FULL + stage), count >> 1 & 1);
  const u32 operands = p.operands(), g = operands + units(G_AT) + stage * units(SQUARE);
  wgmma_fence();
  multiply_square_transposed(de, g, operands + queries_operand(i), false);
  multiply_square(dq, g, operands + units(WINDOWS_AT + window * TILE), false);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_touch(dq);
  wgmma_touch(de);
  arrive_for_warp(p.barrier(G_EMPTY + stage), p.lane);
#pragma unroll
  for (int x = 0; x < D / 8; ++x)
    store_shared_16(at + 2048 * x, as_bits(de[4 * x]), as_bits(de[4 * x + 1]), as_bits(de[4 * x + 2]), as_bits(de[4 * x + 3]));
}
RL_D void store_query_rows(const Arguments& a, const Place& p, Head head, int i, const float (&dq)[D / 2]) {
  const int row = 64 * i + 16 * p.warp;
#if RL_COLUMN_SUMS
  add_column_sums(column_sums(a, p, head.index), dq, a.gradient_scale, p.lane);
#endif
  store_rows(a.dq + (static_cast<i64>(head.batch) * a.T + row) * a.q_pitch + head.index * D, a.q_pitch, dq,
             a.gradient_scale, a.gradient_scale, a.T - row, p.lane);
}
// dE of this block to its part of device memory, by distance.
RL_D void store_table_part(const Arguments& a, const Place& p) {
#pragma unroll 1
  for (int w = 0; w < BLOCKS; ++w)
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const uint4 sum = load_shared_16(p.smem + DE_AT + w * WINDOW_SUM + 2048 * n + 16 * (32 * p.warp + p.lane));
      const int distance = 64 * w + 63 - (16 * p.warp + (p.lane >> 2));
      float* to = a.d_table_parts + (static_cast<i64>(blockIdx.x) * (64 * BLOCKS) + distance) * D + 8 * n + 2 * (p.lane & 3);
      store_global_8(to, as_bits(from_bits(sum.x) * a.gradient_scale), as_bits(from_bits(sum.y) * a.gradient_scale));
      store_global_8(to - 8 * D, as_bits(from_bits(sum.z) * a.gradient_scale), as_bits(from_bits(sum.w) * a.gradient_scale));
    }
}
// Starts the copies that square n's end makes room for, once nobody reads what they overwrite. A warp.
RL_D void copy_after(const Arguments& a, const Place& p, const Head& this_head, const Head& next, int n, u32 squares, u32 windows) {
  const Copies copies = copies_after(n);
  const Head head = copies.next_head ? next : this_head;
  if ((copies.queries < 0 && copies.keys < 0) || head.unit >= a.heads_in_all) return;
  const Stage stage(squares);  // all are done with P and dS, so `keys` with its tiles, and `queries` with the last window
  barrier_wait(p.barrier(STAGE_EMPTY + stage.index), stage.phase);
  if (windows > 0) barrier_wait(p.barrier(G_EMPTY + (windows - 1 & 1)), windows - 1 >> 1 & 1);
  if (!elected()) return;
  if (copies.keys >= 0) load_keys(a, p, head, copies.keys);
  if (copies.queries >= 0) load_queries(a, p, head, copies.queries);
}
RL_D void run_queries(const Arguments& a, const Place& p) {
  Keeper keeper;
  if (!DRAWN_BY_KEYS) keeper.start(a, p);
  float dq[D / 2];
  float4* carry = reinterpret_cast<float4*>(a.carry) + blockIdx.x * (16 * D) + 32 * p.warp + p.lane;
  u32 squares = 0, windows = 0, done = 0;
  Head head(a, a.first_unit()), before = head, next = head;
  if (RELATIVE) {
#pragma unroll 1
    for (int x = 0; x < BLOCKS * (D / 8); ++x) store_shared_16(p.smem + DE_AT + 2048 * x + 16 * (32 * p.warp + p.lane), 0, 0, 0, 0);
    barrier_wait(p.barrier(TABLE_FULL), 0);
  }
#pragma unroll 1
  for (; head.unit < a.heads_in_all; before = head, head = next, ++done) {
    next = head.next(a);
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      const bool resumes = SPLIT && q.first && q.i == BLOCKS - 1 && q.j < q.i;  // what the first visit left, and more
      if (resumes)
#pragma unroll
        for (int x = 0; x < D / 8; ++x) {
          const float4 sum = carry[128 * x];
          dq[4 * x] = sum.x, dq[4 * x + 1] = sum.y, dq[4 * x + 2] = sum.z, dq[4 * x + 3] = sum.w;
        }
      if (RELATIVE && opens_queries(n)) barrier_wait(p.barrier(QUERIES_FULL + q.i), done & 1);
      if (opens_keys(n)) barrier_wait(p.barrier(KEYS_FULL + q.j), done & 1);
      const Stage stage(squares);
      barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);
      const u32 operands = p.operands();
      wgmma_fence();
      multiply_square(dq, operands + units(DS_AT) + stage.index * units(SQUARE), operands + keys_operand(q.j), q.first && !resumes);
      wgmma_commit();
      if (!DRAWN_BY_KEYS) keeper.draw_after(a, p, head.unit, n, squares);
      // A square late, when nobody is still busy with it; where blocks are many there is time until the tiles are needed.
      if (BLOCKS > 2 && squares > 0 && p.warp == 0)
        copy_after(a, p, n > 0 ? head : before, n > 0 ? next : head, n > 0 ? n - 1 : SQUARES - 1, squares - 1, windows);
      wgmma_wait<0>();
      wgmma_touch(dq);
      arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
      if (RELATIVE && q.i != q.j) add_window_gradient(dq, p, q.i, q.i - q.j - 1, windows++);
      if (RELATIVE && q.last) add_window_gradient(dq, p, q.i, q.i - q.j, windows++);
      if (BLOCKS <= 2 && p.warp == 0) copy_after(a, p, head, next, n, squares, windows);
      sync_warp();
      if (q.last && q.j > 0) {
#pragma unroll
        for (int x = 0; x < D / 8; ++x) carry[128 * x] = make_float4(dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]);
      } else if (q.last) {
        store_query_rows(a, p, head, q.i, dq);
      }
    }
  }
  if (RELATIVE) store_table_part(a, p);
}

}  // namespace rl
