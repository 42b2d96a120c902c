// Backward of plain attention: all gradients in one kernel. The plan is in plain_spans.cuh.
#include "plain_gradients.cuh"
#include "plain_spans.cuh"

namespace rl {

// ---- a warpgroup that computes: dK and dV of its block, dS for the last warpgroup

// dS of a step, keys as rows, to a square of 128-byte rows.
RL_D void store_step(u32 square, int part, const u32 (&pairs)[STEP / 4], int warp, int lane) {
#pragma unroll
  for (int b = 0; b < STEP / 16; ++b)
    store_matrices(square + swizzle128(16 * warp + (lane & 15), part * (STEP / 8) + 2 * b + (lane >> 4)), pairs[4 * b],
                   pairs[4 * b + 1], pairs[4 * b + 2], pairs[4 * b + 3]);
}
// S and dP of a step: the 64 keys of a block and their values, in registers, by STEP queries. (Beside so few columns an
// operand of 64 rows comes from shared memory more slowly than the tensor cores take it.)
struct Scores {
  u32 k[D / 16][4], v[D / 16][4];
  RL_D Scores(u32 own, int warp, int lane) {
#pragma unroll
    for (int b = 0; b < D / 16; ++b) {
      const u32 at = own + tile_offset(16 * warp + (lane & 15), 2 * b + (lane >> 4));
      load_matrices(k[b], at);
      load_matrices(v[b], at + TILE);
    }
  }
  RL_D void start(float (&s)[STEP / 2], float (&dp)[STEP / 2], u32 some) const {
#pragma unroll
    for (int b = 0; b < D / 16; ++b) {
      wgmma_registers<STEP, 0>(s, k[b], operand<ROW>(some + 2 * b), b > 0);
      wgmma_registers<STEP, 0>(dp, v[b], operand<ROW>(some + units(TILE) + 2 * b), b > 0);
    }
    wgmma_commit();
  }
};

// What a warpgroup holds. A step is STEP queries of a tile and one of the warpgroup's blocks of keys; its products run beside
// the arithmetic of the next step. Everything that a step starts it waits for: across the edge of the loop ptxas gives up.
constexpr int STEPS = KEYS * (64 / STEP);  // of a tile
static_assert(STEPS % 2 == 0);
struct Work {
  float s[STEP / 2], dp[STEP / 2], dk[KEYS][D / 2], dv[KEYS][D / 2];
  u32 pairs_p[2][STEP / 4], pairs_ds[2][STEP / 4];
  u32 before;  // the queries of the step before
  bool fresh;  // dk and dv are nothing yet

  RL_D void touch_gradients(int key) { wgmma_touch(dk[key]), wgmma_touch(dv[key]); }
  RL_D void start_products(int key, int n, bool first) {
    multiply_pairs(dv[key], pairs_p[n], before + units(TILE), first);
    multiply_pairs(dk[key], pairs_ds[n], before, first);
    wgmma_commit();
  }
  RL_D void begin(u32 queries) {  // before a head's first tile: a step that adds nothing
    before = queries;
#pragma unroll
    for (int n = 0; n < STEP / 4; ++n) pairs_p[1][n] = pairs_ds[1][n] = 0;
  }
  RL_D void end() {  // after its last one
    wgmma_fence();
    start_products(KEYS - 1, 1, false);
    wgmma_wait<0>();
    touch_gradients(KEYS - 1);
  }
};

// Step k of a tile. age: how many blocks its queries come after the warpgroup's first keys.
RL_D void take_step(Work& w, const Arguments& a, const Here& p, const Scores (&scores)[KEYS], int k, u32 tile, int age,
                    int place) {
  const int part = k / KEYS, key = k % KEYS, now = k & 1, last = (k + STEPS - 1) % KEYS;
  if (k == 0) p.wait_full(tile);
  const u32 some = operand_at(p.pair(tile)) + part * units(STEP * ROW);
  wgmma_fence();
  scores[key].start(w.s, w.dp, some);
  w.start_products(last, 1 - now, w.fresh && k < KEYS);
  w.before = some;
  if (k == 0) p.wait_ready(tile);
  wgmma_wait<1>();
  wgmma_touch(w.s);
  wgmma_touch(w.dp);
  if (age == key) mask_past(w.s, part * (STEP / 8), p.warp, p.lane);
  if (age < key) {
    wgmma_touch(w.s);  // a branch, or ptxas selects in every square
#pragma unroll
    for (int n = 0; n < STEP / 2; ++n) w.s[n] = NOTHING;
  }
  differentiate(w.pairs_p[now], w.pairs_ds[now], w.s, w.dp, p.stats(tile) + part * (8 * STEP), a.scale * LOG2_E, p.lane);
  if (k == 0) p.wait_square_empty(tile);
  store_step(p.square(tile, place + key), part, w.pairs_ds[now], p.warp, p.lane);
  wgmma_wait<0>();
  w.touch_gradients(last);
}

// All tiles of a head that a span meets. `tile`: the number of the first one.
RL_D void take_head(Work& w, const Arguments& a, const Here& p, const Scores (&scores)[KEYS], int first, int place,
                    u32& tile) {
  int i = first;
#pragma unroll 1
  for (; i < first + place && i < a.blocks; ++i, ++tile) {  // queries that do not see these keys
    p.wait_square_empty(tile);                              // or it would arrive twice at one phase of a barrier
    p.arrive(p.square_full(tile));
  }
  if (i == a.blocks) return;
  p.wait_full(tile);
  w.begin(operand_at(p.pair(tile)));
#pragma unroll 1
  for (; i < a.blocks; ++i, ++tile) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) take_step(w, a, p, scores, k, tile, i - first - place, place);
    w.fresh = false;
    fence_async();
    p.arrive(p.square_full(tile));
  }
  w.end();
}

RL_D void run_keys(const Arguments& a, const Here& p) {
#if RL_COLUMN_SUMS
  const int groups = a.heads / (a.heads_per_part * a.parts), width = (a.heads + 2 * groups) * D;
  const int row = (static_cast<int>(blockIdx.x) * GROUPS + p.group) * 4 + p.warp;
  zero_column_sums(a.column_sums, row, gridDim.x * (GROUPS * 4), 0, a.sum_rows, width, a.heads * D, width, p.lane);
  float* sums = a.column_sums + static_cast<i64>(row) * width + a.heads * D;
#endif
  Work w;
  u32 tile = 0;
  int spans = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < a.units; number += gridDim.x) {
    const Unit unit(a, number);
#pragma unroll 1
    for (int turn = 0; unit.first(a, turn) < a.blocks; ++turn, ++spans) {
      const int first = unit.first(a, turn), place = place_of(p.group, spans);
      w.fresh = true;
      p.wait_own(spans);
      const Scores scores[KEYS] = {Scores(p.own(place, spans), p.warp, p.lane),
                                   Scores(p.own(place + 1, spans), p.warp, p.lane)};
#pragma unroll 1
      for (int h = 0; h < a.heads_per_part; ++h) take_head(w, a, p, scores, first, place, tile);
#pragma unroll
      for (int key = 0; key < KEYS; ++key)
        if (first + place + key < a.blocks) {
          finish(a, unit, first + place + key, p.warp, p.lane, w.dk[key], w.dv[key]);
#if RL_COLUMN_SUMS
          add_column_sums(sums + unit.group * D, w.dk[key], a.scale, p.lane);
          add_column_sums(sums + (groups + unit.group) * D, w.dv[key], 1.f, p.lane);
#endif
        }
    }
  }
}

// ---- the other warpgroups: statistics and copies, and dQ

// What belongs to the two rows of a thread whose statistics are next: the log-sum-exp, and the outputs in columns from
// 8 · (lane % 4) on. Rows beyond the last have probabilities of nothing.
struct Rows {
  float lse[2];
  uint4 o[2];
  RL_D static int row(const Here& p, int h) { return 16 * p.warp + (p.lane >> 2) + 8 * h; }
  RL_D void load(const Arguments& a, const Here& p, const Position& at) {
    if (!at.exists(a)) return;
    const int head = at.unit.first_head + at.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = 64 * at.i + row(p, h);
      const i64 sample = static_cast<i64>(at.unit.batch) * a.T + t;
      lse[h] = t < a.T ? a.lse[(static_cast<i64>(at.unit.batch) * a.heads + head) * a.T + t] * LOG2_E : -NOTHING;
      o[h] = t < a.T ? load_global_16(a.o + sample * a.o_pitch + head * D + 8 * (p.lane & 3)) : uint4{0, 0, 0, 0};
    }
  }
  RL_D void store(const Here& p, u32 d_o, u32 stats) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float delta = dot_8(o[h], load_shared_16(d_o + tile_offset(row(p, h), p.lane & 3)));
      delta += shuffle_xor(delta, 1);
      delta += shuffle_xor(delta, 2);
      if ((p.lane & 3) == 0) store_shared_8(stats + 8 * row(p, h), as_bits(lse[h]), as_bits(delta));
    }
  }
};

// Starts the copies of tiles before `end`, and of the keys of spans up to number `spans` with their first tile. A thread takes
// long to start one: each warp starts those of one tensor. `now`: the tile whose dS is there; a span's keys go to the place
// of the last but one's, which dQ of the tile before `now` may still read.
RL_D void copy_tiles(const Arguments& a, const Here& p, Position& at, u32& tile, u32 end, int spans, u32 now) {
#pragma unroll 1
  for (; tile < end && at.spans <= spans && at.exists(a); ++tile, at.next(a)) {
    if (p.lane != 0) continue;
    if (p.warp < 2) {
      const u32 barrier = p.full(tile);
      if (p.warp == 0) barrier_expect(barrier, PAIR);
      copy_4d(p.pair(tile) + p.warp * TILE, p.warp == 0 ? a.q : a.d_o, 0, at.unit.first_head + at.head, 64 * at.i,
              at.unit.batch, barrier);
    } else if (at.begins()) {
      const u32 barrier = p.own_full(at.spans), to = p.own(0, at.spans) + (p.warp - 2) * TILE;
      if (at.spans >= 2) p.wait_square_empty(now - 1 + SQUARES);
      if (p.warp == 2) barrier_expect(barrier, SPAN * PAIR);
#pragma unroll 1
      for (int place = 0; place < SPAN; ++place)
        copy_4d(to + place * PAIR, p.warp == 2 ? a.k : a.v, 0, at.unit.group, 64 * (at.first + place), at.unit.batch, barrier);
    }
  }
}

// dQ of a tile by a span, added to what is there: its dS in shared memory with keys as rows, of the blocks that the tile sees.
RL_D void multiply_span(float (&dq)[D / 2], const Here& p, const Position& at, u32 tile) {
  const int seen = at.i - at.first < SPAN ? at.i - at.first + 1 : SPAN;
#pragma unroll 1
  for (int place = 0; place < seen; ++place) {
    const u32 square = operand_at(p.square(tile, place)), keys = operand_at(p.own(place, at.spans));
#pragma unroll
    for (int b = 0; b < 4; ++b) wgmma<D, 1, 1>(dq, operand<128>(square + 128 * b), operand<ROW>(keys + ROW * b), true);
  }
}

// Copies and statistics. What says that a tile's dS is there also says that who made it is done with the tile before.
RL_D void prepare(const Arguments& a, const Here& p) {
  Position at(a), copied(a), known(a);  // known: its statistics
  u32 tile = 0, copies = 0, statistics = 0;
  Rows rows;
  rows.load(a, p, known);
  const auto advance = [&](u32 free, u32 needed, int spans) {
    copy_tiles(a, p, copied, copies, free, spans, tile);
#pragma unroll 1
    for (; statistics < needed && statistics < copies; ++statistics) {
      p.wait_full(statistics);
      rows.store(p, p.pair(statistics) + TILE, p.stats(statistics));
      p.arrive(p.ready(statistics));
      known.next(a);
      rows.load(a, p, known);
    }
  };
  advance(STAGES, 2, 1);
#pragma unroll 1
  for (; at.exists(a); at.next(a), ++tile) {
    p.wait_square(tile);
    p.arrive(p.square_empty(tile));  // so that nobody is more than SQUARES tiles ahead of this
    advance(tile + STAGES, tile + 3, at.spans + 1);
  }
}

// dQ.
RL_D void run_queries(const Arguments& a, const Here& p) {
  Position at(a);
  u32 tile = 0;
  float dq[D / 2];
  const int thread = threadIdx.x & 127;
#if RL_COLUMN_SUMS
  const int groups = a.heads / (a.heads_per_part * a.parts), width = (a.heads + 2 * groups) * D;
  const int row = static_cast<int>(blockIdx.x) * 4 + p.warp, samples = a.units / a.key_parts / (a.heads / a.heads_per_part);
  const int elsewhere = a.key_parts > 1 ? 4 * samples * a.blocks : 0;  // rows that another kernel fills
  zero_column_sums(a.column_sums, row, gridDim.x * 4, elsewhere, a.sum_rows, width, 0, a.heads * D, p.lane);
  float* sums = a.column_sums + static_cast<i64>(row) * width;
#endif
#pragma unroll 1
  for (; at.exists(a); at.next(a), ++tile) {
    const int slot = a.key_parts > 1 ? at.number : blockIdx.x;
    const i64 number = (static_cast<i64>(slot) * a.heads_per_part + at.head) * a.blocks + at.i;  // of the tile
    float* place = a.dq_sums + number * (64 * D) + 4 * thread;
    const bool last = a.key_parts == 1 && at.i < at.first + SPAN;  // no later span sees these queries
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float4 x = last && at.turn > 0 ? load_global_16(place + 512 * n) : make_float4(0.f, 0.f, 0.f, 0.f);
      dq[4 * n] = x.x, dq[4 * n + 1] = x.y, dq[4 * n + 2] = x.z, dq[4 * n + 3] = x.w;
    }
    if (at.begins()) p.wait_own(at.spans);
    p.wait_square(tile);
    wgmma_fence();
    multiply_span(dq, p, at, tile);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(dq);
    p.arrive(p.square_empty(tile));
    if (last) {
      const int head = at.unit.first_head + at.head, t = 64 * at.i + 16 * p.warp;
      store_rows(a.dq + (static_cast<i64>(at.unit.batch) * a.T + t) * a.q_pitch + head * D, a.q_pitch, dq, a.scale, a.scale,
                 a.T - t, p.lane);
#if RL_COLUMN_SUMS
      add_column_sums(sums + head * D, dq, a.scale, p.lane);
#endif
    } else if (at.turn == 0) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        store_global_16(place + 512 * n, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
    } else {  // nobody waits for what was there; the order is this thread's
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        add_global_16(place + 512 * n, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
    }
  }
}

}  // namespace rl

// Grid: as many blocks as fit on the card, at most one for each unit. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D. dq_sums: (key_parts > 1 ? units : grid, heads_per_part, ceil(T / 64), 64 · D), in the order of accumulators;
// of one span nothing. column_sums: (sum_rows, (heads + 2 · groups) · D); of dQ zeros alone with key_parts > 1, and its first
// 4 · B · ceil(T / 64) rows are left to the kernel that adds the parts.
extern "C" __global__ void __launch_bounds__(rl::THREADS, 1)
    attention_plain_backward(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                             const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap d_o,
                             const rl::u16* o, const float* lse, rl::u16* dq, rl::u16* dk, rl::u16* dv, float* dq_sums,
                             float* dk_parts, float* dv_parts, float* column_sums, int T, int heads, int heads_per_part,
                             int parts, int key_parts, int units, int o_pitch, int q_pitch, int kv_pitch, int sum_rows,
                             float scale) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &d_o, o, lse, dq, dk, dv, dq_sums, dk_parts, dv_parts, column_sums, T, ceil_div(T, 64),
                    heads, heads_per_part, parts, key_parts, units, o_pitch, q_pitch, kv_pitch, sum_rows, scale};
  const Here p;
  p.start();
  if (p.group < GROUPS) {
    registers_up<MANY_REGISTERS>();
    run_keys(a, p);
  } else if (p.group == GROUPS) {
    registers_down<FEW_REGISTERS>();
    prepare(a, p);
  } else {
    registers_down<FEW_REGISTERS>();
    run_queries(a, p);
  }
}
