// Backward of short-window attention (T <= 256): one persistent thread block an SM, a head at a time, three warpgroups:
//
//   scores   S = Q·Kᵀ, R = Q·Eᵀ, dP = dO·Vᵀ of one square of 64 × 64 after the other; P and dS = P ∘ (dP - delta) in
//            registers; dropout drawn again; P, dS and the unskewed G (gradient of R) to shared memory
//   keys     dV += Pᵀ·dO, dK += dSᵀ·Q; also starts the copies of the next head's tiles
//   queries  dQ += dS·K + G·E, dE += Gᵀ·Q, dE in registers over all heads of the block
//
// The order of the squares keeps at most two key blocks open at D = 64, so that dK and dV fit in registers; with four
// row blocks this visits the last query block twice, and dQ of the first visit waits in device memory (`carry`).
// All sums are in a fixed order: results repeat bit for bit.
#include "attention.cuh"

namespace rl {

constexpr int OPEN_KEYS = D == 64 ? 2 : 4;
constexpr bool AHEAD = BLOCKS > 1;  // with one block the next head's copies wait for this square's end, so cannot start before
constexpr bool SPLIT = BLOCKS == 4 && OPEN_KEYS == 2;

// The squares of a head in order, 6 bits each: i, j, first and last of a visit to query block i.
struct Square {
  int i, j;
  bool first, last;
};
constexpr int SQUARES = BLOCKS * (BLOCKS + 1) / 2;
RL_HD constexpr u64 square_bits(int i, int j, bool first, bool last) { return i | j << 2 | (first ? 16 : 0) | (last ? 32 : 0); }
RL_HD constexpr u64 make_order() {
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
// Whether square n is the first of its key block (the last one is always the diagonal), or the last of its query block.
RL_HD constexpr bool opens_keys(int n) {
  for (int m = 0; m < n; ++m)
    if (square_at(m).j == square_at(n).j) return false;
  return true;
}
RL_HD constexpr bool closes_queries(int n) {
  for (int m = n + 1; m < SQUARES; ++m)
    if (square_at(m).i == square_at(n).i) return false;
  return true;
}

// Shared memory
constexpr int WINDOWS_AT = 0;                                                // the table, smallest distances in window 0
constexpr int Q_AT = WINDOWS_AT + (RELATIVE ? BLOCKS * TILE : 0), K_AT = Q_AT + BLOCKS * TILE;
constexpr int V_AT = K_AT + BLOCKS * TILE, DO_AT = V_AT + BLOCKS * TILE, O_AT = DO_AT + BLOCKS * TILE;
constexpr int P_AT = O_AT + TILE, DS_AT = P_AT + 2 * SQUARE, G_AT = DS_AT + 2 * SQUARE;  // two stages of P and dS
constexpr int BARRIERS_AT = G_AT + (RELATIVE ? 2 * SQUARE : 0);
enum Barrier {
  QUERIES_FULL = 0,                    // Q and dO of a block, one barrier each
  KEYS_FULL = QUERIES_FULL + BLOCKS,   // K and V
  O_FULL = KEYS_FULL + BLOCKS,         // a warp's 16 rows of O
  STAGE_FULL = O_FULL + 4, STAGE_EMPTY = STAGE_FULL + 2, G_FULL = STAGE_EMPTY + 2, G_EMPTY = G_FULL + 2,
  TABLE_FULL = G_EMPTY + 2, BARRIERS
};

// Squares alternate between two stages; phases count the uses of a stage. Known at compile time where a head's squares
// are even in number.
struct Stage {
  u32 index, phase;
};
RL_D Stage stage_of(int n, u32 heads_done) {
  constexpr bool EVEN = SQUARES % 2 == 0;
  const u32 index = EVEN ? n & 1 : (n + heads_done) & 1;
  return {index, ((heads_done * SQUARES + n) >> 1) & 1};
}

struct Arguments {
  const TensorMap *q, *k, *v, *o, *d_o, *table;
  const float* lse;
  u16 *dq, *dk, *dv;
  float *dk_heads, *dv_heads, *d_table_parts, *carry;
  const i64* seed_step;
  int T, heads, heads_per_group, heads_in_all, q_pitch, kv_pitch;
  float scale, kept, kept_inverse, gradient_scale;  // kept: what a kept probability is multiplied by; scale · kept
  u32 site, stream, threshold;
};

struct Head {
  int unit, batch, index;
  RL_D Head(const Arguments& a, int unit) : unit(unit), batch(unit / a.heads), index(unit - batch * a.heads) {}
};
struct Place {  // of a thread
  u32 smem;
  int warp, lane;
  RL_D u32 barrier(int index) const { return smem + BARRIERS_AT + 8 * index; }
  RL_D u32 operands() const { return afresh(operand_at(smem)); }
};
RL_HD constexpr u32 units(int bytes) { return bytes >> 4; }  // of operand addresses

// One lane of a warp speaks for it, once all lanes are done.
RL_D void arrive_for_warp(u32 barrier, int lane) {
  sync_warp();
  if (lane == 0) barrier_arrive(barrier);
}

// ---- copies, one thread
RL_D void load_queries(const Arguments& a, const Place& p, Head head, int i) {
  const u32 barrier = p.barrier(QUERIES_FULL + i);
  barrier_expect(barrier, 2 * TILE);
  copy_4d(p.smem + Q_AT + i * TILE, a.q, 0, head.index, 64 * i, head.batch, barrier);
  copy_4d(p.smem + DO_AT + i * TILE, a.d_o, 0, head.index, 64 * i, head.batch, barrier);
}
RL_D void load_keys(const Arguments& a, const Place& p, Head head, int j) {
  const u32 barrier = p.barrier(KEYS_FULL + j);
  const int group = head.index / a.heads_per_group;
  barrier_expect(barrier, 2 * TILE);
  copy_4d(p.smem + K_AT + j * TILE, a.k, 0, group, 64 * j, head.batch, barrier);
  copy_4d(p.smem + V_AT + j * TILE, a.v, 0, group, 64 * j, head.batch, barrier);
}

// ---- scores
struct Rows {  // what belongs to the two rows of a thread
  float lse[2], delta[2];
};
RL_D float dot_8(uint4 a, uint4 b) {
  return pair_low(a.x) * pair_low(b.x) + pair_high(a.x) * pair_high(b.x) + pair_low(a.y) * pair_low(b.y) +
         pair_high(a.y) * pair_high(b.y) + pair_low(a.z) * pair_low(b.z) + pair_high(a.z) * pair_high(b.z) +
         pair_low(a.w) * pair_low(b.w) + pair_high(a.w) * pair_high(b.w);
}
// Reads and writes of S, R and dP alternate between tensor core and warps; this is everything kept between squares.
struct Scores {
  float s[32], r[32], dp[32], window_first[2];
  Band windows, keys;
  u32 keys_first;
};

RL_D void load_o(const Arguments& a, const Place& p, Head head, int i) {
  if (p.lane == 0) {
    barrier_expect(p.barrier(O_FULL + p.warp), TILE / 4);
    copy_4d(p.smem + O_AT + p.warp * (TILE / 4), a.o, 0, head.index, 64 * i + 16 * p.warp, head.batch,
            p.barrier(O_FULL + p.warp));
  }
}
RL_D void load_lse(float (&lse)[2], const Arguments& a, const Place& p, int unit, int i) {
  const int row = 64 * i + 16 * p.warp + (p.lane >> 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) lse[h] = row + 8 * h < a.T ? a.lse[static_cast<i64>(unit) * a.T + row + 8 * h] : 0.f;
}
// delta = rowsum(dO ∘ O), over the scale of kept probabilities
RL_D void compute_delta(Rows& rows, const Arguments& a, const Place& p, int i) {
  const int place = p.lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * p.warp + (p.lane >> 2) + 8 * h;
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < D / 32; ++part) {
      const u32 at = tile_offset(row, D == 64 ? place + 4 * ((row ^ part) & 1) : place);
      sum += dot_8(load_shared_16(p.smem + O_AT + at), load_shared_16(p.smem + DO_AT + i * TILE + at));
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    rows.delta[h] = sum * a.kept_inverse;
  }
}
RL_D void start_window(Scores& x, u32 operands, int i, int window) {
  wgmma_fence();
  multiply_tiles(x.r, operands + units(Q_AT + i * TILE), operands + units(WINDOWS_AT + window * TILE));
  wgmma_commit();
}
RL_D void wait_for_square(const Place& p, Square q, u32 parity) {
  barrier_wait(p.barrier(QUERIES_FULL + q.i), parity);
  barrier_wait(p.barrier(KEYS_FULL + q.j), parity);
}
// Starts S and dP of a square, and R: apart, since the registers of R are needed between.
RL_D void start_square(Scores& x, const Place& p, Square q) {
  const u32 operands = p.operands();
  wgmma_fence();
  multiply_tiles(x.s, operands + units(Q_AT + q.i * TILE), operands + units(K_AT + q.j * TILE));
  multiply_tiles(x.dp, operands + units(DO_AT + q.i * TILE), operands + units(V_AT + q.j * TILE));
  wgmma_commit();
}
// A visit that does not begin at the diagonal first needs the window to the right.
RL_D void start_relative(Scores& x, const Place& p, Square q, const Shift& to_left) {
  const u32 operands = p.operands();
  if (q.first && q.i != q.j) {
    start_window(x, operands, q.i, q.i - q.j - 1);
    wgmma_wait<0>();
    wgmma_touch(x.r);
    take_window(x.windows, x.window_first, x.r, to_left);
  }
  start_window(x, operands, q.i, q.i - q.j);
}

// P (dropped) and dS of 16 columns b from S and dP, packed along columns.
template <int B>
RL_D void sixteen_columns(u32 (&pairs_p)[16], u32 (&pairs_ds)[16], const Scores& x, const Rows& rows, float scale,
                          bool diagonal, int row, int column, u32 counter, DropoutKeys keys, u32 bias) {
  u32 word[2][2];
  if (DROPOUT) keep_words(word, counter, keys, bias);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float p[2], ds[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 4 * (2 * B + n) + 2 * h + e;
        float full = exp2_fast(x.s[at] * scale - rows.lse[h]);
        if (diagonal && column + 8 * n + e > row + 8 * h) full = 0.f;
        p[e] = DROPOUT ? keep_float(full, keep_mask(word, n, h, e)) : full;
        ds[e] = p[e] * x.dp[at] - full * rows.delta[h];
      }
      pairs_p[2 * (2 * B + n) + h] = pack_pair(p[0], p[1]);
      pairs_ds[2 * (2 * B + n) + h] = pack_pair(ds[0], ds[1]);
    }
}

RL_D void send_window_gradient(Scores& x, const Place& p, const Shift& to_right, u32 count) {
  u32 g[16];
  unskew(g, x.keys, to_right, p.warp);
  const u32 stage = count & 1;
  barrier_wait(p.barrier(G_EMPTY + stage), (count >> 1 & 1) ^ 1);
  store_square(p.smem + G_AT + stage * SQUARE, g, p.warp, p.lane);
  fence_async();
  arrive_for_warp(p.barrier(G_FULL + stage), p.lane);
}

RL_D void run_scores(const Arguments& a, const Place& p) {
  const Shift to_left(p.lane, 7 - (p.lane >> 2)), to_right(p.lane, (p.lane >> 2) + 1);
  const int row = 16 * p.warp + (p.lane >> 2), column = 2 * (p.lane & 3), tiles = ceil_div(a.T, 16);
  const float scale = a.scale * LOG2_E;
  const u32 bias = dropout_bias(a.threshold);
  DropoutKeys site{}, keys{};
  if (DROPOUT) site = dropout_site(a.seed_step[0], a.seed_step[1], a.site);
  Scores x;
  x.windows.clear(), x.keys.clear();
  x.window_first[0] = x.window_first[1] = 0.f, x.keys_first = 0;
  Rows rows;
  float next_lse[2];
  u32 squares = 0, windows = 0, visits = 0, parity = 0;
  int unit = blockIdx.x;
  if (unit < a.heads_in_all) {
    load_o(a, p, Head(a, unit), square_at(0).i);
    load_lse(next_lse, a, p, unit, square_at(0).i);
    if (RELATIVE) barrier_wait(p.barrier(TABLE_FULL), 0);
    wait_for_square(p, square_at(0), 0);
    start_square(x, p, square_at(0));
    if (RELATIVE) start_relative(x, p, square_at(0), to_left);
  }
#pragma unroll 1
  for (; unit < a.heads_in_all; unit += gridDim.x, parity ^= 1) {
    if (DROPOUT) keys = dropout_stream(site, a.stream + unit);
#pragma unroll 1
    for (int n = 0; n < SQUARES; ++n, ++squares) {
      const Square q = square_at(n);
      const bool more = n + 1 < SQUARES || unit + gridDim.x < a.heads_in_all;
      const Square next = square_at(n + 1 < SQUARES ? n + 1 : 0);
      const int next_unit = n + 1 < SQUARES ? unit : unit + gridDim.x;
      if (q.first) {
        barrier_wait(p.barrier(O_FULL + p.warp), visits & 1);
        compute_delta(rows, a, p, q.i);
        rows.lse[0] = next_lse[0] * LOG2_E, rows.lse[1] = next_lse[1] * LOG2_E;
        ++visits;
        sync_warp();
        int m = n + 1;  // the next visit
        while (m < SQUARES && !square_at(m).first) ++m;
        const int visit_unit = m < SQUARES ? unit : unit + gridDim.x, visit_i = square_at(m < SQUARES ? m : 0).i;
        if (visit_unit < a.heads_in_all) {
          load_o(a, p, Head(a, visit_unit), visit_i);
          load_lse(next_lse, a, p, visit_unit, visit_i);
        }
        if (RELATIVE) x.keys.clear(), x.keys_first = 0;
      }
      wgmma_wait<0>();
      wgmma_touch(x.s);
      wgmma_touch(x.dp);
      if (RELATIVE) {
        wgmma_touch(x.r);
        take_window(x.windows, x.window_first, x.r, to_left);
        add_skewed(x.s, x.windows, to_left, p.warp);
      }
      u32 pairs_p[16], pairs_ds[16];
      const u32 counter = dropout_base(q.i, q.j, p.warp, p.lane, tiles);
      const bool diagonal = q.i == q.j;
      sixteen_columns<0>(pairs_p, pairs_ds, x, rows, scale, diagonal, row, column, counter, keys, bias);
      sixteen_columns<1>(pairs_p, pairs_ds, x, rows, scale, diagonal, row, column + 16, counter + 64, keys, bias);
      sixteen_columns<2>(pairs_p, pairs_ds, x, rows, scale, diagonal, row, column + 32, counter + 128, keys, bias);
      sixteen_columns<3>(pairs_p, pairs_ds, x, rows, scale, diagonal, row, column + 48, counter + 192, keys, bias);
      const u32 stage = squares & 1;
      barrier_wait(p.barrier(STAGE_EMPTY + stage), (squares >> 1 & 1) ^ 1);
      store_square(p.smem + P_AT + stage * SQUARE, pairs_p, p.warp, p.lane);
      store_square(p.smem + DS_AT + stage * SQUARE, pairs_ds, p.warp, p.lane);
      fence_async();
      arrive_for_warp(p.barrier(STAGE_FULL + stage), p.lane);
      const u32 next_parity = next_unit == unit ? parity : parity ^ 1;
      if (AHEAD && more) wait_for_square(p, next, next_parity);
      if (AHEAD) start_square(x, p, next);  // after the last square for nothing, which is cheaper than a branch
      if (RELATIVE) {
        take_keys(x.keys, x.keys_first, pairs_ds, to_right);
        if (q.i != q.j) send_window_gradient(x, p, to_right, windows++);
        if (q.last) {  // nothing more to the left
#pragma unroll
          for (int m = 0; m < 16; ++m) pairs_ds[m] = 0;
          take_keys(x.keys, x.keys_first, pairs_ds, to_right);
          send_window_gradient(x, p, to_right, windows++);
        }
      }
      if (!AHEAD && more) wait_for_square(p, next, next_parity);
      if (!AHEAD) start_square(x, p, next);
      if (RELATIVE) start_relative(x, p, next, to_left);
    }
  }
  wgmma_wait<0>();
}

// ---- keys
RL_D void store_key_rows(const Arguments& a, const Place& p, Head head, int j, float (&dk)[D / 2], float (&dv)[D / 2]) {
  const int row = 64 * j + 16 * p.warp, rows = a.T - row;
  const float kept = a.kept, scale = a.gradient_scale;
#if RL_GROUPED  // one gradient for each query head; a second kernel sums them
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
  const i64 at = (static_cast<i64>(head.batch) * a.T + row) * a.kv_pitch + head.index * D;
  store_rows(a.dk + at, a.kv_pitch, dk, scale, scale, rows, p.lane);
  store_rows(a.dv + at, a.kv_pitch, dv, kept, kept, rows, p.lane);
#endif
}
RL_D void run_keys(const Arguments& a, const Place& p) {
  float dk[OPEN_KEYS][D / 2], dv[OPEN_KEYS][D / 2];
  const bool copies = p.warp == 0 && p.lane == 0;
  u32 done = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < a.heads_in_all; unit += gridDim.x, ++done) {
#pragma unroll
    for (int n = 0; n < SQUARES; ++n) {
      const Square q = square_at(n);
      const Stage stage = stage_of(n, done);
      const int slot = q.j % OPEN_KEYS;
      barrier_wait(p.barrier(QUERIES_FULL + q.i), done & 1);
      barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);
      const u32 tiles = p.operands(), squares = tiles + stage.index * units(SQUARE);
      wgmma_fence();
      multiply_square_transposed(dv[slot], squares + units(P_AT), tiles + units(DO_AT + q.i * TILE), opens_keys(n));
      multiply_square_transposed(dk[slot], squares + units(DS_AT), tiles + units(Q_AT + q.i * TILE), opens_keys(n));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(dv[slot]);
      wgmma_touch(dk[slot]);
      arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
      if (q.i == q.j) store_key_rows(a, p, Head(a, unit), q.j, dk[slot], dv[slot]);
      if (copies && unit + gridDim.x < a.heads_in_all && (q.i == q.j || closes_queries(n))) {
        barrier_wait(p.barrier(STAGE_EMPTY + stage.index), stage.phase);
        const Head next(a, unit + gridDim.x);
        if (q.i == q.j) load_keys(a, p, next, q.j);
        if (closes_queries(n)) load_queries(a, p, next, q.i);
      }
      sync_warp();
    }
  }
}

// ---- queries
RL_D void add_window_gradient(float (&dq)[D / 2], float (&de)[D / 2], const Place& p, int i, int window, u32 count) {
  const u32 stage = count & 1;
  barrier_wait(p.barrier(G_FULL + stage), count >> 1 & 1);
  const u32 tiles = p.operands(), square = tiles + units(G_AT) + stage * units(SQUARE);
  wgmma_fence();
  multiply_square(dq, square, tiles + units(WINDOWS_AT + window * TILE), false);
  multiply_square_transposed(de, square, tiles + units(Q_AT + i * TILE), false);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_touch(dq);
  wgmma_touch(de);
  arrive_for_warp(p.barrier(G_EMPTY + stage), p.lane);
}
RL_D void run_queries(const Arguments& a, const Place& p) {
  float dq[D / 2], de[RELATIVE ? BLOCKS : 1][D / 2];
#pragma unroll
  for (int w = 0; w < (RELATIVE ? BLOCKS : 1); ++w)
#pragma unroll
    for (int x = 0; x < D / 2; ++x) de[w][x] = 0.f;
  float4* carry = reinterpret_cast<float4*>(a.carry) + blockIdx.x * (16 * D) + 32 * p.warp + p.lane;
  u32 windows = 0, done = 0;
  if (RELATIVE) barrier_wait(p.barrier(TABLE_FULL), 0);
#pragma unroll 1
  for (int unit = blockIdx.x; unit < a.heads_in_all; unit += gridDim.x, ++done) {
#pragma unroll
    for (int n = 0; n < SQUARES; ++n) {
      const Square q = square_at(n);
      const Stage stage = stage_of(n, done);
      barrier_wait(p.barrier(QUERIES_FULL + q.i), done & 1);
      barrier_wait(p.barrier(KEYS_FULL + q.j), done & 1);
      barrier_wait(p.barrier(STAGE_FULL + stage.index), stage.phase);
      const u32 tiles = p.operands();
      wgmma_fence();
      multiply_square(dq, tiles + units(DS_AT) + stage.index * units(SQUARE), tiles + units(K_AT + q.j * TILE), q.first);
      wgmma_commit();
      if (RELATIVE && q.i != q.j) add_window_gradient(dq, de[RELATIVE ? q.i - q.j - 1 : 0], p, q.i, q.i - q.j - 1, windows++);
      if (RELATIVE && q.last) add_window_gradient(dq, de[RELATIVE ? q.i - q.j : 0], p, q.i, q.i - q.j, windows++);
      wgmma_wait<0>();
      wgmma_touch(dq);
      arrive_for_warp(p.barrier(STAGE_EMPTY + stage.index), p.lane);
      if (q.last && q.j > 0) {
#pragma unroll
        for (int x = 0; x < D / 8; ++x) carry[128 * x] = make_float4(dq[4 * x], dq[4 * x + 1], dq[4 * x + 2], dq[4 * x + 3]);
      } else if (q.last) {
        if (SPLIT && q.i == BLOCKS - 1) {
#pragma unroll
          for (int x = 0; x < D / 8; ++x) {
            const float4 before = carry[128 * x];
            dq[4 * x] += before.x, dq[4 * x + 1] += before.y, dq[4 * x + 2] += before.z, dq[4 * x + 3] += before.w;
          }
        }
        const int row = 64 * q.i + 16 * p.warp;
        const float scale = a.gradient_scale;
        const Head head(a, unit);
        store_rows(a.dq + (static_cast<i64>(head.batch) * a.T + row) * a.q_pitch + head.index * D, a.q_pitch, dq, scale,
                   scale, a.T - row, p.lane);
      }
    }
  }
  if (RELATIVE) {
    const float scale = a.gradient_scale;
#pragma unroll
    for (int w = 0; w < (RELATIVE ? BLOCKS : 1); ++w)
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int distance = 64 * w + 63 - (16 * p.warp + (p.lane >> 2) + 8 * h);
          store_global_8(a.d_table_parts + (static_cast<i64>(blockIdx.x) * (64 * BLOCKS) + distance) * D + 8 * n + 2 * (p.lane & 3),
                         as_bits(de[w][4 * n + 2 * h] * scale), as_bits(de[w][4 * n + 2 * h + 1] * scale));
        }
  }
}

}  // namespace rl

// Grid: at most one block an SM, 384 threads. Tensor maps of (B, T, heads, D) tensors with boxes of 1 × 64 × 1 × D
// (16 rows for O), of the table's (R, D) with boxes of 64 × D.
extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                       const __grid_constant__ rl::TensorMap v, const __grid_constant__ rl::TensorMap o,
                       const __grid_constant__ rl::TensorMap d_o, const __grid_constant__ rl::TensorMap table,
                       const float* lse, rl::u16* dq, rl::u16* dk, rl::u16* dv, float* dk_heads, float* dv_heads,
                       float* d_table_parts, float* carry, const rl::i64* seed_step, int T, int table_rows, int heads,
                       int heads_per_group, int units, int q_pitch, int kv_pitch, float scale, float kept, rl::u32 site,
                       rl::u32 stream, rl::u32 threshold) {
  using namespace rl;
  const Arguments a{&q, &k, &v, &o, &d_o, &table, lse, dq, dk, dv, dk_heads, dv_heads, d_table_parts, carry, seed_step,
                    T, heads, heads_per_group, units, q_pitch, kv_pitch, scale, kept, 1.f / kept, scale * kept, site, stream, threshold};
  const u32 smem = dynamic_smem();
  const int group = warp_uniform(threadIdx.x >> 7);
  const Place p{smem, warp_uniform(threadIdx.x >> 5 & 3), static_cast<int>(threadIdx.x & 31)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < BARRIERS; ++b) {
      const bool full = (b >= STAGE_FULL && b < STAGE_EMPTY) || b >= G_FULL;  // four warps of one group, or two groups
      barrier_init(p.barrier(b), b < STAGE_FULL || b == TABLE_FULL ? 1 : full ? 4 : 8);
    }
    barrier_init_fence();
    fence_async();
  }
  sync_block();
  if (threadIdx.x == 128 && static_cast<int>(blockIdx.x) < units) {
    if (RELATIVE) {
      barrier_expect(p.barrier(TABLE_FULL), BLOCKS * TILE);
      for (int w = 0; w < BLOCKS; ++w)
        copy_2d(smem + WINDOWS_AT + w * TILE, a.table, 0, table_rows - 64 * (w + 1), p.barrier(TABLE_FULL));
    }
    const Head first(a, blockIdx.x);
#pragma unroll
    for (int n = 0; n < SQUARES; ++n) {
      if (square_at(n).first && (n == 0 || !SPLIT || square_at(n).i == square_at(n).j)) load_queries(a, p, first, square_at(n).i);
      if (opens_keys(n)) load_keys(a, p, first, square_at(n).j);
    }
  }
  // Of 504 registers for a thread of each group. Two accumulators of dK and two of dV are open, or D = 32 and all of them.
  if (group == 0) {
    if (RELATIVE) registers_down<152>(); else registers_up<208>();
    run_scores(a, p);
  } else if (group == 1) {
    registers_down<160>();
    run_keys(a, p);
  } else {
    if (RELATIVE) registers_up<192>(); else registers_down<136>();
    run_queries(a, p);
  }
}
