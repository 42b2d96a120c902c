// Backward of plain attention: all gradients in one kernel. The plan is in plain_spans.cuh.
#include "plain_gradients.cuh"
#include "plain_spans.cuh"

namespace rl {

// ---- a warpgroup that computes: dK and dV of its blocks, dS for dQ's warpgroup

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
struct Work {
  float s[STEP / 2], dp[STEP / 2], dk[KEYS][D / 2], dv[KEYS][D / 2];
  u32 pairs_p[2][STEP / 4], pairs_ds[2][STEP / 4];
  u32 before;  // the queries of the step before

  RL_D void touch_gradients(int key) { wgmma_touch(dk[key]), wgmma_touch(dv[key]); }
  RL_D void start_products(int key, int n, bool first) {
    multiply_pairs(dv[key], pairs_p[n], before + units(TILE), first);
    multiply_pairs(dk[key], pairs_ds[n], before, first);
    wgmma_commit();
  }
  template <int KEY>
  RL_D void end() {  // after a head's last tile
    wgmma_fence();
    start_products(KEY, 1, false);
    wgmma_wait<0>();
    touch_gradients(KEY);
  }
};

// A tile whose queries see SEEN of the warpgroup's blocks of keys, of the last one those before themselves (DIAGONAL) or all.
// BEFORE: whose step was the one before, -1 for none. fresh: dK and dV are nothing yet.
template <int SEEN, bool DIAGONAL, int BEFORE>
RL_D void take_tile(Work& w, const Arguments& a, const Here& p, const Scores (&scores)[KEYS], u32 tile, const Places& places,
                    bool fresh) {
  constexpr int STEPS = SEEN * (64 / STEP);
  static_assert(STEPS % 2 == 0);
  p.wait_full(tile);
  const u32 queries = operand_at(p.pair(tile));
  uint4 stats[STEP / 8];
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    const int part = k / SEEN, key = k % SEEN, now = k & 1, last = k > 0 ? (k - 1) % SEEN : BEFORE;
    const bool products = last >= 0;
    const u32 some = queries + part * units(STEP * ROW);
    wgmma_fence();
    scores[key].start(w.s, w.dp, some);
    if (products) w.start_products(last, 1 - now, DIAGONAL && k == SEEN && fresh);
    w.before = some;
    if (k == 0) p.wait_ready(tile);
    if (key == 0)
#pragma unroll
      for (int n = 0; n < STEP / 8; ++n) stats[n] = load_statistics(p.stats(tile) + part * (8 * STEP), n, p.lane);
    if (products)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
    wgmma_touch(w.s);
    wgmma_touch(w.dp);
    if (DIAGONAL && key == SEEN - 1) mask_past(w.s, part * (STEP / 8), p.warp, p.lane);
    differentiate(w.pairs_p[now], w.pairs_ds[now], w.s, w.dp, a.scale * LOG2_E, [&](int n) { return stats[n]; });
    if (k == 0) p.wait_square_empty(tile);
    store_step(p.square(tile, places.of(key)), part, w.pairs_ds[now], p.warp, p.lane);
    if (products) {
      wgmma_wait<0>();
      w.touch_gradients(last);
    }
  }
  p.arrive(p.square_full(tile));
}

// All tiles of a head that a span meets. `tile`: the number of the first one.
RL_D void take_head(Work& w, const Arguments& a, const Here& p, const Scores (&scores)[KEYS], int first, const Places& places,
                    bool fresh, u32& tile) {
  static_assert(KEYS == 2);
  int i = first;
#pragma unroll 1
  for (; i < first + places.of(0) && i < a.blocks; ++i, ++tile) {  // queries that do not see these keys
    p.wait_square_empty(tile);                                     // or it would arrive twice at one phase of a barrier
    p.arrive(p.square_full(tile));
  }
  if (i == a.blocks) return;
  take_tile<1, true, -1>(w, a, p, scores, tile++, places, fresh);
#pragma unroll 1
  for (++i; i < first + places.of(1) && i < a.blocks; ++i) take_tile<1, false, 0>(w, a, p, scores, tile++, places, false);
  if (i == a.blocks) return w.end<0>();
  take_tile<2, true, 0>(w, a, p, scores, tile++, places, fresh);
#pragma unroll 1
  for (++i; i < a.blocks; ++i) take_tile<2, false, 1>(w, a, p, scores, tile++, places, false);
  w.end<1>();
}

RL_D void run_keys(const Arguments& a, const Here& p) {
  Unit unit(a, blockIdx.x);
#if RL_COLUMN_SUMS
  const int groups = quotient(a.head_parts, a.by_parts), width = (a.heads + 2 * groups) * D;
  const int row = (static_cast<int>(blockIdx.x) * GROUPS + p.group) * 4 + p.warp;
  wait_for_previous_knowing(unit.all() | groups);
  zero_column_sums(a.column_sums, row, gridDim.x * (GROUPS * 4), 0, a.sum_rows, width, a.heads * D, width, p.lane);
  float* sums = a.column_sums + static_cast<i64>(row) * width + a.heads * D;
#else
  wait_for_previous_knowing(unit.all());
#endif
  Work w;
  u32 tile = 0;
  int spans = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < a.units; number += gridDim.x, unit = Unit(a, number)) {
#pragma unroll 1
    for (int turn = 0; unit.first(a, turn) < a.blocks; ++turn, ++spans) {
      const int first = unit.first(a, turn);
      const Places places(p.group, spans);
      p.wait_own(spans);
      const Scores scores[KEYS] = {Scores(p.own(places.of(0), spans), p.warp, p.lane),
                                   Scores(p.own(places.of(1), spans), p.warp, p.lane)};
#pragma unroll 1
      for (int h = 0; h < a.heads_per_part; ++h) take_head(w, a, p, scores, first, places, h == 0, tile);
#pragma unroll
      for (int key = 0; key < KEYS; ++key)
        if (first + places.of(key) < a.blocks) finish(a, unit, first + places.of(key), p.warp, p.lane, w.dk[key], w.dv[key]);
#if RL_COLUMN_SUMS
      if (first + places.of(1) < a.blocks)
#pragma unroll
        for (int n = 0; n < D / 2; ++n) w.dk[0][n] += w.dk[1][n], w.dv[0][n] += w.dv[1][n];
      if (first + places.of(0) < a.blocks) {
        add_column_sums(sums + unit.group * D, w.dk[0], a.scale, p.lane);
        add_column_sums(sums + (groups + unit.group) * D, w.dv[0], 1.f, p.lane);
      }
#endif
    }
  }
}

// ---- the other warpgroups: statistics and copies, and dQ. Each of their instructions takes its turn from those that compute.

// What belongs to the two rows of a thread whose statistics are next: outputs in columns from 8 · (lane % 4) on, and the
// log-sum-exp of the first row in even lanes, of the second in odd ones. Rows beyond the last have probabilities of nothing.
struct Rows {
  const u16* o_at;
  const float* lse_at;
  int t;  // the first row
  float lse;
  uint4 o[2];
  RL_D void start(const Arguments& a, const Here& p, const Position& at) {  // at the first tile of a head
    const int head = at.unit.first_head + at.head;
    t = 64 * at.i + 16 * p.warp + (p.lane >> 2);
    o_at = a.o + (static_cast<i64>(at.unit.batch) * a.T + t) * a.o_pitch + head * D + 8 * (p.lane & 3);
    lse_at = a.lse + (static_cast<i64>(at.unit.batch) * a.heads + head) * a.T + t + 8 * (p.lane & 1);
  }
  RL_D void next(const Arguments& a) { t += 64, o_at += static_cast<i64>(64) * a.o_pitch, lse_at += 64; }
  RL_D void load(const Arguments& a, const Here& p) {
    lse = t + 8 * (p.lane & 1) < a.T ? *lse_at : -NOTHING;  // and nothing that waits for it
    o[0] = t < a.T ? load_global_16(o_at) : uint4{0, 0, 0, 0};
    o[1] = t + 8 < a.T ? load_global_16(o_at + static_cast<i64>(8) * a.o_pitch) : uint4{0, 0, 0, 0};
  }
  RL_D void store(const Here& p, u32 d_o, u32 stats) const {
    const int row = 16 * p.warp + (p.lane >> 2);
    const u32 at = d_o + tile_offset(row, p.lane & 3);
    float delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      delta[h] = dot_8(o[h], load_shared_16(at + 8 * ROW * h));
      delta[h] += shuffle_xor(delta[h], 1);
      delta[h] += shuffle_xor(delta[h], 2);
    }
    if ((p.lane & 2) == 0)
      store_shared_8(stats + 8 * (row + 8 * (p.lane & 1)), as_bits(lse * LOG2_E), as_bits(p.lane & 1 ? delta[1] : delta[0]));
  }
};

// Starts the copies of a tile, and before a span's first one those of its keys. A thread takes long to start one: each warp
// starts those of one tensor.
RL_D void copy_tile(const Arguments& a, const Here& p, const Position& at, u32 tile) {
  if (p.warp >= 2 && at.begins()) p.wait_own_empty(at.spans);
  if (!elected()) return;
  if (p.warp < 2) {
    const u32 barrier = p.full(tile);
    if (p.warp == 0) barrier_expect(barrier, PAIR);
    copy_4d(p.pair(tile) + p.warp * TILE, p.warp == 0 ? a.q : a.d_o, 0, at.unit.first_head + at.head, 64 * at.i, at.unit.batch,
            barrier);
  } else if (at.begins()) {
    const u32 barrier = p.own_full(at.spans), to = p.own(0, at.spans) + (p.warp - 2) * TILE;
    if (p.warp == 2) barrier_expect(barrier, SPAN * PAIR);
#pragma unroll 1
    for (int place = 0; place < SPAN; ++place)
      copy_4d(to + place * PAIR, p.warp == 2 ? a.k : a.v, 0, at.unit.group, 64 * (at.first + place), at.unit.batch, barrier);
  }
}

// Nothing of dQ is there yet; who is let in may look.
RL_D void begin_notes(const Arguments& a, int lane) {
  const int count = a.heads_per_part * ceil_div(a.blocks, SPAN);
#pragma unroll 1
  for (int number = blockIdx.x; number < a.units; number += gridDim.x)
#pragma unroll 1
    for (int n = lane; n < count; n += WARP) a.notes[number * count + n] = 0;
  sync_warp();
  if (lane == 0) fence_gpu();
  sync_warp();
  let_next_start();
}
// Once a tile's share of dQ is there. What a later span adds would come later.
RL_D void note(const Arguments& a, const Position& at, int lane) {
  if (lane == 0 && at.i % SPAN == SPAN - 1 && has_note(at.i, a.blocks) && at.unit.first(a, at.turn + 1) > at.i)
    give(a.notes + note_of(at.number, a.heads_per_part, at.head, at.i, a.blocks), 1);
}

// Copies and statistics, and notes by the last warp. What says that a tile's dS is there also says that those who compute are done with the tile before.
RL_D void prepare(const Arguments& a, const Here& p) {
  Position copied(a);
  Position known = copied, stored = copied;  // known: its statistics; stored: its share of dQ
  int copies = 1, statistics = 0, begun = 0;  // begun: the first tile of the span copied last
  if (elected()) prefetch_map(p.warp == 0 ? a.q : p.warp == 1 ? a.d_o : p.warp == 2 ? a.k : a.v);
  wait_for_previous_knowing(copied.unit.all());
  copy_tile(a, p, copied, 0);
  copied.next(a);
  if (a.key_parts == 1) let_next_start();
  Rows rows;
  rows.start(a, p, known);
  rows.load(a, p);
  const auto advance = [&](int done, int copies_to) {  // once dS of a tile is there
#pragma unroll 1
    for (; copies < copies_to && copied.exists(a); ++copies, copied.next(a)) {
      if (copied.begins()) {
        if (copied.spans >= 2 && done < begun) break;  // its keys have no place
        begun = copies;
      }
      copy_tile(a, p, copied, copies);
    }
#pragma unroll 1
    for (; statistics < done + STATISTICS && statistics < copies; ++statistics) {
      p.wait_full(statistics);
      rows.store(p, p.pair(statistics) + TILE, p.stats(statistics));
      p.arrive(p.ready(statistics));
      known.next(a);
      if (!known.exists(a)) continue;
      if (known.i == known.first)
        rows.start(a, p, known);
      else
        rows.next(a);
      rows.load(a, p);
    }
  };
  const bool notes = a.key_parts > 1 && p.warp == 3;
#pragma unroll 1
  for (int tile = -2; tile < copies; ++tile) {
    if (tile >= 0) {
      p.wait_square(tile);
      p.arrive(p.square_empty(tile));  // so that nobody is more than SQUARES tiles ahead of this
    }
    advance(tile, tile < -1 ? 2 : tile + STAGES);  // two tiles with their statistics before all others
    if (notes && tile == -2) begin_notes(a, p.lane);
    if (notes && tile >= BEHIND) {
      note(a, stored, p.lane);
      stored.next(a);
    }
  }
}

// dQ of a tile by a span, added to `dq` or in its place: dS of the blocks that the tile sees, keys as rows, which is turned on
// its way into registers. square, keys: the first ones; square with what belongs to the lane.
RL_D void multiply_span(float (&dq)[D / 2], u32 square, u32 keys, int seen, bool fresh) {
#pragma unroll 1
  for (int n = 0; n < seen; ++n, square += SQUARE, keys += units(PAIR))
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 ds[2][4];
#pragma unroll
      for (int b = 0; b < 2; ++b) load_matrices_transposed(ds[b], square + 16 * 128 * (2 * half + b));
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < 2; ++b)
        wgmma_registers<D, 1>(dq, ds[b], operand<ROW>(keys + ROW * (2 * half + b)), half + b > 0 || n > 0 || !fresh);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(dq);
    }
}
// dQ.
RL_D void run_queries(const Arguments& a, const Here& p) {
  wait_for_previous();
  u32 tile = 0;
  int spans = 0;
  float dq[D / 2];
  const int thread = threadIdx.x & 127;
  const u32 lane_at = swizzle128((p.lane & 7) + (p.lane >> 4) * 8, 2 * p.warp + (p.lane >> 3 & 1));
#if RL_COLUMN_SUMS
  const int groups = quotient(a.head_parts, a.by_parts), width = (a.heads + 2 * groups) * D;
  const int row = static_cast<int>(blockIdx.x) * 4 + p.warp, samples = quotient(quotient(a.units, a.by_key_parts), a.by_head_parts);
  const int elsewhere = a.key_parts > 1 ? 4 * samples * a.blocks : 0;  // rows that another kernel fills
  zero_column_sums(a.column_sums, row, gridDim.x * 4, elsewhere, a.sum_rows, width, 0, a.heads * D, p.lane);
  float* sums = a.column_sums + static_cast<i64>(row) * width;
#endif
#pragma unroll 1
  for (int number = blockIdx.x; number < a.units; number += gridDim.x) {
    const Unit unit(a, number);
    const i64 slot = static_cast<i64>(a.key_parts > 1 ? number : blockIdx.x) * a.heads_per_part;
#pragma unroll 1
    for (int turn = 0; unit.first(a, turn) < a.blocks; ++turn, ++spans) {
      const int first = unit.first(a, turn);
      const u32 keys = operand_at(p.own(0, spans));
      p.wait_own(spans);
#pragma unroll 1
      for (int h = 0; h < a.heads_per_part; ++h) {
        float* place = a.dq_sums + ((slot + h) * a.blocks + first) * (64 * D) + 4 * thread;
#pragma unroll 1
        for (int i = first; i < a.blocks; ++i, ++tile, place += 64 * D) {
          const bool near = i < first + SPAN, last = near && a.key_parts == 1;  // no later span sees these queries
          if (last && turn > 0) {
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
              const float4 x = load_global_16(place + 512 * n);
              dq[4 * n] = x.x, dq[4 * n + 1] = x.y, dq[4 * n + 2] = x.z, dq[4 * n + 3] = x.w;
            }
          }
          p.wait_square(tile);
          multiply_span(dq, p.square(tile, 0) + lane_at, keys, near ? i - first + 1 : SPAN, !last || turn == 0);
          p.arrive(p.square_empty(tile));
          if (last) {
            const int head = unit.first_head + h, t = 64 * i + 16 * p.warp;
            store_rows(a.dq + (static_cast<i64>(unit.batch) * a.T + t) * a.q_pitch + head * D, a.q_pitch, dq, a.scale, a.scale,
                       a.T - t, p.lane);
#if RL_COLUMN_SUMS
            add_column_sums(sums + head * D, dq, a.scale, p.lane);
#endif
          } else if (turn == 0) {
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
      p.arrive(p.own_empty(spans));
    }
  }
}

}  // namespace rl

// Grid: as many blocks as fit on the card, at most one for each unit. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D. dq_sums: (key_parts > 1 ? units : grid, heads_per_part, ceil(T / 64), 64 · D), in the order of accumulators;
// of one span nothing. notes: (units, heads_per_part, ceil(T / (64 · SPAN))) with key_parts > 1. column_sums: (sum_rows, (heads + 2 · groups) · D); of dQ zeros alone with key_parts > 1, and its first
// 4 · B · ceil(T / 64) rows are left to the kernel that adds the parts.
extern "C" __global__ void __launch_bounds__(rl::THREADS, 1)
    attention_plain_backward(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                             const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap d_o,
                             const rl::u16* o, const float* lse, rl::u16* dq, rl::u16* dk, rl::u16* dv, float* dq_sums,
                             float* dk_parts, float* dv_parts, float* column_sums, rl::u32* notes, int T, int heads,
                             int heads_per_part, int parts, int key_parts, int units, int o_pitch, int q_pitch, int kv_pitch,
                             int sum_rows, float scale, int head_parts, rl::u32 by_key_parts, rl::u32 by_head_parts,
                             rl::u32 by_parts) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &d_o, o, lse, dq, dk, dv, dq_sums, dk_parts, dv_parts, column_sums, notes, T, ceil_div(T, 64),
                    heads, heads_per_part, parts, key_parts, units, o_pitch, q_pitch, kv_pitch, sum_rows, scale,
                    head_parts, by_key_parts, by_head_parts, by_parts};
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
