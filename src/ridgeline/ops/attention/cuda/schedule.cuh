// The plan of the backward kernel: the order of a head's squares, where tiles lie in shared memory, and the barriers.
//
// The order keeps at most OPEN_KEYS key blocks open, so that their dK and dV fit in registers. At D = 64 and four row
// blocks that splits the last query block's squares into two visits. Within a visit, keys go down from the diagonal.
#pragma once
#include "attention.cuh"

namespace rl {

constexpr int OPEN_KEYS = D == 64 ? 2 : 4;
constexpr bool SPLIT = BLOCKS == 4 && OPEN_KEYS == 2;
constexpr int SQUARES = BLOCKS * (BLOCKS + 1) / 2;
// Whether `relative` carries gradients back one square behind.
constexpr bool BEHIND = BLOCKS > 1;

struct Square {
  int i, j;          // blocks of 64 queries and of 64 keys
  bool first, last;  // of a visit to the query block
};
RL_HD constexpr u64 square_bits(int i, int j, bool first, bool last) { return i | j << 2 | (first ? 16 : 0) | (last ? 32 : 0); }
RL_HD constexpr u64 make_order() {  // 6 bits a square
  u64 order = 0;
  int n = 0;
  if (SPLIT) {
    constexpr int VISITS[5][3] = {{3, 3, 2}, {2, 2, 0}, {3, 1, 0}, {1, 1, 0}, {0, 0, 0}};
    for (int v = 0; v < 5; ++v)
      for (int j = VISITS[v][1]; j >= VISITS[v][2]; --j)
        order |= square_bits(VISITS[v][0], j, j == VISITS[v][1], j == VISITS[v][2]) << (6 * n++);
  } else {
    for (int i = BLOCKS - 1; i >= 0; --i)
      for (int j = i; j >= 0; --j) order |= square_bits(i, j, j == i, j == 0) << (6 * n++);
  }
  return order;
}
constexpr u64 ORDER = make_order();
RL_HD constexpr Square square_at(int n) {
  const int bits = static_cast<int>(ORDER >> (6 * n)) & 63;
  return {bits & 3, bits >> 2 & 3, (bits & 16) != 0, (bits & 32) != 0};
}
// Sets of squares as bits: first of their key block (the last one is always the diagonal), first and last of their query
// block; and, 4 bits a square, the query block of the next diagonal square, plus 8 where that is the next head's.
struct Sets {
  u32 opens_keys, opens_queries, closes_queries;
  u64 next_diagonal;
};
RL_HD constexpr Sets make_sets() {
  Sets sets{0, 0, 0, 0};
  for (int n = 0; n < SQUARES; ++n) {
    bool keys = true, queries = true, close = true;
    u64 visit = square_at(0).i + 8;
    for (int m = SQUARES - 1; m >= 0; --m) {
      keys = keys && (m >= n || square_at(m).j != square_at(n).j);
      queries = queries && (m >= n || square_at(m).i != square_at(n).i);
      close = close && (m <= n || square_at(m).i != square_at(n).i);
      if (m > n && square_at(m).i == square_at(m).j) visit = square_at(m).i;
    }
    sets.opens_keys |= (keys ? 1u : 0u) << n, sets.opens_queries |= (queries ? 1u : 0u) << n;
    sets.closes_queries |= (close ? 1u : 0u) << n, sets.next_diagonal |= visit << (4 * n);
  }
  return sets;
}
constexpr Sets SETS = make_sets();
// The square with which the visit after square n's begins, plus 16 where that is the next head's.
RL_HD constexpr int next_visit(int n) {
  for (int m = n + 1; m < SQUARES; ++m)
    if (square_at(m).first) return m;
  return 16;
}
RL_HD constexpr bool opens_keys(int n) { return SETS.opens_keys >> n & 1; }
RL_HD constexpr bool opens_queries(int n) { return SETS.opens_queries >> n & 1; }
RL_HD constexpr bool closes_queries(int n) { return SETS.closes_queries >> n & 1; }

// Tiles come in pairs: Q and dO of a query block, K and V of a key block. With four row blocks at D = 64 five slots for
// pairs serve eight pairs in turn: 0 Q3 · 1 K0 · 2 K3 then K1 · 3 K2 then Q1 · 4 Q2 then Q0. Otherwise each has its own.
constexpr int PAIR = 2 * TILE, PAIRS = SPLIT ? 5 : 2 * BLOCKS;
RL_HD constexpr int query_slot(int i) { return SPLIT ? (0x0434 >> (4 * i) & 15) : i; }
RL_HD constexpr int key_slot(int j) { return SPLIT ? (0x2321 >> (4 * j) & 15) : BLOCKS + j; }
// What is copied once square n is done with: a query and a key block (-1 for none), of this head or of the next one.
struct Copies {
  int queries, keys;
  bool next_head;
};
RL_HD constexpr Copies copies_after(int n) {
  if (SPLIT) {  // K1 after 0, Q1 after 2, Q0 after 4; then the next head's Q3 after 6, K3 after 7, K2 after 8, Q2 and K0 after 9
    constexpr u64 QUERIES = 0x2FF3F0F1FFull, KEYS = 0x023FFFFFF1ull;  // 4 bits a square, F for none
    const int queries = static_cast<int>(QUERIES >> (4 * n)) & 15, keys = static_cast<int>(KEYS >> (4 * n)) & 15;
    return {queries == 15 ? -1 : queries, keys == 15 ? -1 : keys, n >= 5};
  }
  const Square q = square_at(n);
  return {closes_queries(n) ? q.i : -1, q.i == q.j ? q.j : -1, true};
}
// Whether a block is copied before the first square of a first head.
RL_HD constexpr bool queries_at_start(int i) { return !SPLIT || i >= 2; }
RL_HD constexpr bool keys_at_start(int j) { return !SPLIT || j != 1; }

// P and dS of a square wait in one of two stages, or in the only one where shared memory is full.
constexpr int STAGES = RELATIVE && D == 64 && BLOCKS > 2 ? 1 : 2;
struct Stage {
  u32 index, phase;
  RL_D explicit Stage(u32 squares) : index(STAGES == 2 ? squares & 1 : 0), phase(squares / STAGES & 1) {}
};

constexpr int WINDOWS_AT = 0;                                                    // of the table, window 0 first
constexpr int PAIRS_AT = WINDOWS_AT + (RELATIVE ? BLOCKS * TILE : 0), O_AT = PAIRS_AT + PAIRS * PAIR;
constexpr int P_AT = O_AT + TILE, DS_AT = P_AT + STAGES * SQUARE, G_AT = DS_AT + STAGES * SQUARE;  // G: gradient of a window of Q·Eᵀ
constexpr int R_AT = G_AT + (RELATIVE ? 2 * SQUARE : 0);                         // the relative scores of a square
constexpr int DE_AT = R_AT + (RELATIVE ? SQUARE : 0), WINDOW_SUM = 64 * D * 4;   // dE in fp32, a window after the other
constexpr int ROWS_AT = DE_AT + (RELATIVE ? BLOCKS * WINDOW_SUM : 0);            // log-sum-exp and delta of 64 rows, two stages
constexpr int KEEP_AT = ROWS_AT + 2 * 64 * 8;                                     // a word a thread of a square, two stages
constexpr int BARRIERS_AT = KEEP_AT + (DROPOUT ? 2 * 128 * 4 : 0);
enum Barrier {
  QUERIES_FULL = 0,                   // a block's pair
  KEYS_FULL = QUERIES_FULL + BLOCKS,
  O_FULL = KEYS_FULL + BLOCKS,        // a warp's 16 rows of O
  ROWS_FULL = O_FULL + 4,             // log-sum-exp and delta of a warp's 16 rows; of two stages
  KEEP_FULL = ROWS_FULL + 8,          // keep decisions for a warp's 16 rows; of two stages
  R_FULL = KEEP_FULL + 8,             // a warp's 16 rows of R
  R_EMPTY = R_FULL + 4,
  TABLE_FULL = R_EMPTY + 4,
  STAGE_FULL,                         // P and dS
  STAGE_EMPTY = STAGE_FULL + STAGES,
  G_FULL = STAGE_EMPTY + STAGES,      // two stages
  G_EMPTY = G_FULL + 2,
  BARRIERS = G_EMPTY + 2
};
RL_HD constexpr int arrivals(int barrier) {  // one arrival a warp, or one copy
  return barrier < STAGE_FULL ? 1 : barrier >= STAGE_EMPTY && barrier < G_FULL ? (RELATIVE ? 12 : 8) : 4;
}
constexpr int THREADS = RELATIVE ? 512 : 384;

// Query heads that share keys: 0 none; 1 any, dK and dV are left by query head; 2 a thread block takes the heads of a group
// one after the other and sums them itself.
constexpr int GROUPED = RL_GROUPED;
static_assert(GROUPED != 2 || OPEN_KEYS >= BLOCKS, "sums over a group need all key blocks open");

struct Arguments {
  const TensorMap *q, *k, *v, *o, *d_o, *table;
  const float* lse;
  u16 *dq, *dk, *dv;
  float *dk_heads, *dv_heads, *d_table_parts, *carry;
  float* column_sums;  // of the joint gradient, a row for each block and warp of a group; or null
  const i64* seed_step;
  int T, heads, heads_per_group, heads_in_all, q_pitch, kv_pitch;
  float scale, kept, kept_inverse, gradient_scale;  // kept: what a kept probability is multiplied by; scale · kept
  u32 site, stream, threshold;

  // The units, one head of one sample each, that this thread block takes.
  RL_D int first_unit() const { return blockIdx.x * (GROUPED == 2 ? heads_per_group : 1); }
  RL_D int next_unit(int unit) const {
    if (GROUPED != 2) return unit + gridDim.x;
    return closes_group(unit) ? unit + 1 + (gridDim.x - 1) * heads_per_group : unit + 1;
  }
  RL_D bool opens_group(int unit) const { return GROUPED != 2 || unit % heads_per_group == 0; }
  RL_D bool closes_group(int unit) const { return GROUPED != 2 || unit % heads_per_group == heads_per_group - 1; }
};
struct Head {
  int unit, batch, index;
  RL_D Head(const Arguments& a, int unit) : unit(unit), batch(unit / a.heads), index(unit - batch * a.heads) {}
  RL_D Head next(const Arguments& a) const {  // without a division where units are gridDim.x apart
    if (GROUPED == 2) return Head(a, a.next_unit(unit));
    const int samples = gridDim.x / a.heads;
    Head head = *this;
    head.unit += gridDim.x, head.batch += samples, head.index += gridDim.x - samples * a.heads;
    if (head.index >= a.heads) head.index -= a.heads, ++head.batch;
    return head;
  }
};
struct Place {  // of a thread
  u32 smem;
  int warp, lane;  // in the warpgroup
  RL_D u32 barrier(int index) const { return smem + BARRIERS_AT + 8 * index; }
  RL_D u32 operands() const { return afresh(operand_at(smem)); }
  RL_D u32 queries(int i) const { return smem + PAIRS_AT + query_slot(i) * PAIR; }
};
RL_HD constexpr u32 units(int bytes) { return bytes >> 4; }  // of operand addresses
RL_HD constexpr u32 queries_operand(int i) { return units(PAIRS_AT) + query_slot(i) * units(PAIR); }
RL_HD constexpr u32 keys_operand(int j) { return units(PAIRS_AT) + key_slot(j) * units(PAIR); }
constexpr u32 SECOND = units(TILE);  // dO after Q, V after K

struct Rows {  // what belongs to the two rows of a thread
  float lse[2], delta[2];
};
RL_HD constexpr u32 rows_at(u32 visit) { return ROWS_AT + (visit & 1) * 512; }

RL_D u32 keep_at(u32 square, const Place& p) { return KEEP_AT + (square & 1) * 512 + 4 * (32 * p.warp + p.lane); }

// One lane of a warp speaks for it, once all lanes are done.
RL_D void arrive_for_warp(u32 barrier, int lane) {
  sync_warp();
  if (lane == 0) barrier_arrive(barrier);
}

// Copies, one lane
RL_D void load_queries(const Arguments& a, const Place& p, Head head, int i) {
  const u32 barrier = p.barrier(QUERIES_FULL + i), to = p.queries(i);
  barrier_expect(barrier, PAIR);
  copy_4d(to, a.q, 0, head.index, 64 * i, head.batch, barrier);
  copy_4d(to + TILE, a.d_o, 0, head.index, 64 * i, head.batch, barrier);
}
RL_D void load_keys(const Arguments& a, const Place& p, Head head, int j) {
  const u32 barrier = p.barrier(KEYS_FULL + j), to = p.smem + PAIRS_AT + key_slot(j) * PAIR;
  const int group = GROUPED ? head.index / a.heads_per_group : head.index;
  barrier_expect(barrier, PAIR);
  copy_4d(to, a.k, 0, group, 64 * j, head.batch, barrier);
  copy_4d(to + TILE, a.v, 0, group, 64 * j, head.batch, barrier);
}

}  // namespace rl
