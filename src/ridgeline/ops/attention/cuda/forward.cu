// Forward of short-window attention (T <= 256). Each warpgroup of a persistent thread block takes heads of its own: K and V
// of a head lie whole in shared memory, the table is shared. Query blocks go from the last to the first, so that a key
// block is free once the first square of its own query block is done. With four blocks of wide heads the next queries wait
// there (slots below), and the next head's keys are copied when those are read; otherwise Q is read straight into
// registers, and a key block is copied one query block later.
//
// RL_HALVES, for four query blocks and so few heads that no warpgroup has a second one: two warpgroups share a head, one
// with the last and the first query block, the other with those between, five squares each.
#include "attention.cuh"
#include "softmax.cuh"

#ifndef RL_HALVES
#define RL_HALVES 0
#endif

namespace rl {

constexpr int GROUPS = WARPGROUPS, SHARES = 1 + RL_HALVES;  // warpgroups of a head
static_assert(!RL_HALVES || BLOCKS == 4, "only four query blocks fall into two equal halves");
constexpr bool STAGED = BLOCKS == 4 && D == 64;  // at D = 32, measured, rows straight to registers are faster
// Where query block i waits: K3, K2 and V2 for 2, 1 and 0, and V1 for the next head's 3.
RL_HD constexpr int query_slot(int i) { return 0x5326 >> (4 * i) & 15; }

constexpr int WINDOWS_AT = 0, KEYS_AT = RELATIVE ? BLOCKS * TILE : 0, HEAD_BYTES = 2 * BLOCKS * TILE;
// Barriers of a group: a key block is there; all warps are done with a query block; a query block is there; all warps are
// done with the first square of a query block. Then: the table is there.
constexpr int QUERY_DONE = BLOCKS, QUERIES_FULL = BLOCKS + 1, SQUARE_DONE = QUERIES_FULL + BLOCKS;
constexpr int GROUP_BARRIERS = STAGED ? SQUARE_DONE + 1 : QUERY_DONE + 1;
constexpr int BARRIERS_AT = KEYS_AT + GROUPS * HEAD_BYTES, BARRIERS = GROUPS * GROUP_BARRIERS + 1;

RL_HD constexpr bool is_arrival(int barrier) { return barrier == QUERY_DONE || barrier == SQUARE_DONE; }  // of four warps

struct Arguments {
  const TensorMap *queries, *k, *v;
  const u16* q;
  u16* o;
  float* lse;
  const i64* seed_step;
  i64 q_batch;
  int T, heads, heads_per_group, heads_in_all, q_row, q_head, o_pitch;
  float scale, kept;
  u32 site, stream, threshold;
};
struct Head {
  int unit, batch, index;
  RL_D Head(const Arguments& a, int unit) : unit(unit), batch(unit / a.heads), index(unit - batch * a.heads) {}
};

// Rows of Q on their way to being the A operand: 8 bytes a lane, four lanes a whole sector.
struct RawRows {
  uint2 v[D / 8];
  RL_D void load(const Arguments& a, Head head, int row, int lane) {
    const int r = row + (lane >> 2), column = lane & 1 ? 8 + 2 * ((lane & 3) - 1) : 2 * (lane & 3);
    const u16* from = a.q + head.batch * a.q_batch + static_cast<i64>(head.index) * a.q_head + static_cast<i64>(r) * a.q_row + column;
#pragma unroll
    for (int x = 0; x < D / 8; ++x) {
      v[x] = make_uint2(0, 0);
      if (r + 8 * (x & 1) < a.T) v[x] = load_global_8(from + 8 * (x & 1) * a.q_row + (x >> 1) * 16);
    }
  }
  RL_D void finish(u32 (&operand)[D / 16][4], int lane) const {
    const bool odd = lane & 1;
#pragma unroll
    for (int x = 0; x < D / 8; ++x) {
      const u32 other = shuffle_xor(odd ? v[x].x : v[x].y, 1);
      operand[x >> 1][x & 1] = odd ? other : v[x].x;
      operand[x >> 1][2 + (x & 1)] = odd ? v[x].y : other;
    }
  }
};
// d[64, 64] (+)= a · tileᵀ, a in registers
RL_D void multiply_rows(float (&d)[32], const u32 (&a)[D / 16][4], u32 tile, bool fresh) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) wgmma_registers<64, 0>(d, a[k], operand<ROW>(tile + 2 * k), k > 0 || !fresh);
}

// Scores to probabilities, packed along columns. Whether they suit the reference; if not, they are to be done again.
RL_D bool exponentiate(u32 (&pairs)[16], const float (&s)[32], Softmax& x, float scale, u32 counter, DropoutKeys keys,
                       u32 bias, int group) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    u32 word[2][2];
    if (DROPOUT) keep_words(word, counter + 64 * b, keys, bias);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 4 * (2 * b + n) + 2 * h;
        const float p = exp2_fast(s[at] * scale - x.reference[h]), q = exp2_fast(s[at + 1] * scale - x.reference[h]);
        sum[h] += p + q;
        pairs[4 * b + 2 * n + h] = pack_pair(p, q) & (DROPOUT ? keep_mask_pair(word, n, h) : FULL);
      }
  }
  if (any_in_group(1 + group, sum[0] > LIMIT || sum[1] > LIMIT)) return false;  // wgmma takes whole warpgroups
  x.sum[0] += sum[0], x.sum[1] += sum[1];
  return true;
}

struct Place {
  u32 smem;
  int group, warp, lane;
  RL_D u32 keys() const { return smem + KEYS_AT + group * HEAD_BYTES; }
  RL_D u32 barrier(int index) const { return smem + BARRIERS_AT + 8 * (group * GROUP_BARRIERS + index); }
  RL_D u32 keys_full(int j) const { return barrier(j); }
  RL_D u32 table_full() const { return smem + BARRIERS_AT + 8 * (BARRIERS - 1); }
  RL_D u32 operands() const { return afresh(operand_at(smem)); }
};

RL_D void load_keys(const Arguments& a, const Place& p, Head head, int j) {  // one lane
  const int kv_head = head.index / a.heads_per_group;
  barrier_expect(p.keys_full(j), 2 * TILE);
  copy_4d(p.keys() + j * TILE, a.k, 0, kv_head, 64 * j, head.batch, p.keys_full(j));
  copy_4d(p.keys() + (BLOCKS + j) * TILE, a.v, 0, kv_head, 64 * j, head.batch, p.keys_full(j));
}

RL_D void load_queries(const Arguments& a, const Place& p, Head head, int i) {  // one lane
  barrier_expect(p.barrier(QUERIES_FULL + i), TILE);
  copy_4d(p.keys() + query_slot(i) * TILE, a.queries, 0, head.index, 64 * i, head.batch, p.barrier(QUERIES_FULL + i));
}

// What a warpgroup holds in registers, and its steps.
struct Worker {
  const Arguments& a;
  const Place& p;
  const Shift to_left;
  const float scale;
  const u32 bias;
  const int tiles;  // of dropout: 16 positions
  DropoutKeys keys{};
  float r[32], s[32], o[D / 2], first[2] = {0.f, 0.f};
  Band band;
  RawRows raw;
  u32 aq[D / 16][4], pairs[16];
  Softmax x;

  RL_D Worker(const Arguments& a, const Place& p)
      : a(a), p(p), to_left(p.lane, 7 - (p.lane >> 2)), scale(a.scale * LOG2_E), bias(dropout_bias(a.threshold)),
        tiles(ceil_div(a.T, 16)) {
    band.clear();
  }
  RL_D void start_window(u32 operands, int window) {
    multiply_rows(r, aq, operands + (WINDOWS_AT >> 4) + window * (TILE >> 4), true);
    wgmma_commit();
  }
  // S of a square, from R where there is one, and from it the probabilities, against a reference that suits them.
  RL_D void score(int i, int j, u32 tile) {
    bool raise = RL_FP16 && j == i;  // where the limit is near, the largest score at once
    while (true) {
      if (RELATIVE) skewed(s, band, to_left, p.warp);
      wgmma_fence();
      multiply_rows(s, aq, tile, !RELATIVE);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(s);
      if (j == i) mask_future(s, 0, p.warp, p.lane);
      if (raise)
        raise_reference(x, o, s, scale);
      else if (j == i)
        refer_to_own(x, s, scale, p.warp, p.lane);
      if (exponentiate(pairs, s, x, scale, dropout_base(i, j, p.warp, p.lane, tiles), keys, bias, p.group)) break;
      raise = true;  // a later block's scores are larger by far: rare
    }
  }
  RL_D void start_values(u32 tile, bool fresh) {
    wgmma_fence();
    multiply_pairs(o, pairs, tile + BLOCKS * (TILE >> 4), fresh);
    wgmma_commit();
  }
  // The A operand of the next query block, i of a head whose turn has this parity.
  RL_D void take_queries(int i, u32 parity) {
    if (!STAGED) return raw.finish(aq, p.lane);
    barrier_wait(p.barrier(QUERIES_FULL + i), parity);
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      load_matrices(aq[k], p.keys() + query_slot(i) * TILE + tile_offset(16 * p.warp + (p.lane & 15), 2 * k + (p.lane >> 4)));
  }
  // One square; leaves its product with V and the next window's R under way.
  RL_D void square(int i, int j, int top, u32 phase, bool more) {
    const u32 operands = p.operands(), tile = operands + (KEYS_AT >> 4) + p.group * (HEAD_BYTES >> 4) + j * (TILE >> 4);
    if (i == top) barrier_wait(p.keys_full(j), phase);
    wgmma_wait<0>();
    wgmma_touch(o);
    if (STAGED && j == i - 1 && p.lane == 0) barrier_arrive(p.barrier(SQUARE_DONE));
    if (RELATIVE) {
      wgmma_touch(r);
      take_window(band, first, r);
    }
    score(i, j, tile);
    if (j == 0 && (!STAGED || i > 0 || more)) take_queries(i > 0 ? i - 1 : top, phase);  // the last use of this block's Q is behind
    start_values(tile, j == i);
    if (RELATIVE) start_window(operands, j == 0 ? 0 : i - j + 1);
  }
  // The end of a query block: log-sum-exp, and the output once its last product is there.
  RL_D void finish(const Head& head, int i) {
    float share[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x.sum[h] += shuffle_xor(x.sum[h], 1);
      x.sum[h] += shuffle_xor(x.sum[h], 2);
      share[h] = a.kept * reciprocal_fast(x.sum[h]);
      const int at = 64 * i + 16 * p.warp + (p.lane >> 2) + 8 * h;
      if ((p.lane & 3) == 0 && at < a.T)
        a.lse[static_cast<i64>(head.unit) * a.T + at] = (x.reference[h] + log2_fast(x.sum[h])) * LN_2;
    }
    if (RELATIVE) wgmma_wait<1>(); else wgmma_wait<0>();
    wgmma_touch(o);
    if (p.lane == 0) barrier_arrive(p.barrier(QUERY_DONE));
    const int at = 64 * i + 16 * p.warp;
    store_rows(a.o + (static_cast<i64>(head.batch) * a.T + at) * a.o_pitch + head.index * D, a.o_pitch, o, share[0],
               share[1], a.T - at, p.lane);
  }
};

// Starts the copies that the end of square (i, j) makes room for, once all warps are done with what they overwrite. A warp.
RL_D void copy_after(const Arguments& a, const Place& p, const Head& head, const Head& next_head, int i, int j, u32 done,
                     u32 blocks) {
  const bool more = next_head.unit < a.heads_in_all, first = i == BLOCKS - 1;
  if (STAGED && j == i - 1) {
    barrier_wait(p.barrier(SQUARE_DONE), (done + BLOCKS - 1 - i) & 1);  // three in a head
    if (elected()) {
      if (i > 1) load_queries(a, p, head, i - 1);
      if (i == 2) load_queries(a, p, head, 0);
      if (i == 1 && more) load_queries(a, p, next_head, BLOCKS - 1);
    }
  }
  if (j != i || !(first ? done > 0 : more) || (STAGED && i == 1)) return;
  barrier_wait(p.barrier(QUERY_DONE), (blocks - 1) & 1);
  if (!elected()) return;
  if (STAGED && first) load_keys(a, p, head, 1);
  load_keys(a, p, first ? head : next_head, first ? 0 : STAGED && i == 0 ? 2 : i + 1);
}

RL_D void run(const Arguments& a, const Place& p) {
  const int step = GROUPS * gridDim.x, work = blockIdx.x + p.group * gridDim.x, first_unit = work / SHARES;
  if (first_unit >= a.heads_in_all) return;
  const int top = BLOCKS - 1 - work % SHARES;  // the first query block
  DropoutKeys site{};
  if (DROPOUT) site = dropout_site(a.seed_step[0], a.seed_step[1], a.site);
  Head head(a, first_unit), next_head = head;
  if (p.warp == 0 && elected())
    for (int j = top; j >= 0; --j) load_keys(a, p, head, j);
  Worker w(a, p);
  w.raw.load(a, head, 64 * top + 16 * p.warp, p.lane);
  w.raw.finish(w.aq, p.lane);
  if (RELATIVE) {
    barrier_wait(p.table_full(), 0);
    wgmma_fence();
    w.start_window(p.operands(), 0);
  }
  u32 done = 0, blocks = 0;
#pragma unroll 1
  for (; head.unit < a.heads_in_all; head = next_head, ++done) {
    next_head = Head(a, RL_HALVES ? a.heads_in_all : head.unit + step);
    const bool more = next_head.unit < a.heads_in_all;
    if (DROPOUT) w.keys = dropout_stream(site, a.stream + head.unit);
#pragma unroll 1
    for (int i = top, next; i >= 0; i = next, ++blocks) {
      next = !RL_HALVES ? i - 1 : i == top ? BLOCKS - 1 - top : -1;
      if (!STAGED && (next >= 0 || more)) w.raw.load(a, next >= 0 ? head : next_head, 64 * (next >= 0 ? next : top) + 16 * p.warp, p.lane);
      w.x = {{NOTHING, NOTHING}, {0.f, 0.f}};
#pragma unroll 1
      for (int j = i; j >= 0; --j) {
        w.square(i, j, top, done & 1, more);
        if (p.warp == i % 4) copy_after(a, p, head, next_head, i, j, done, blocks);
        sync_warp();
      }
      w.finish(head, i);
    }
  }
  wgmma_wait<0>();
}

}  // namespace rl

// Grid: at most one block an SM, 128 * WARPGROUPS threads. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D, of the table's (R, D) with boxes of 64 × D.
extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
    attention_forward(const __grid_constant__ rl::TensorMap queries, const __grid_constant__ rl::TensorMap k, const __grid_constant__ rl::TensorMap v,
                      const __grid_constant__ rl::TensorMap table, const rl::u16* q, rl::u16* o, float* lse,
                      const rl::i64* seed_step, rl::i64 q_batch, int T, int table_rows, int heads, int heads_per_group,
                      int heads_in_all, int q_row, int q_head, int o_pitch, float scale, float kept, rl::u32 site,
                      rl::u32 stream, rl::u32 threshold) {
  using namespace rl;
  const Arguments a{&queries, &k, &v, q, o, lse, seed_step, q_batch, T, heads, heads_per_group, heads_in_all, q_row, q_head, o_pitch,
                    scale, kept, site, stream, threshold};
  const Place p{dynamic_smem(), warp_uniform(threadIdx.x >> 7), warp_uniform(threadIdx.x >> 5 & 3),
                static_cast<int>(threadIdx.x & 31)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < BARRIERS; ++b)
      barrier_init(p.smem + BARRIERS_AT + 8 * b, b < BARRIERS - 1 && is_arrival(b % GROUP_BARRIERS) ? 4 : 1);
    barrier_init_fence();
    fence_async();
  }
  wait_for_previous();
  let_next_start();
  if (RELATIVE && p.group == 0 && p.warp == 0 && elected()) {
    barrier_expect(p.table_full(), BLOCKS * TILE);
    for (int w = 0; w < BLOCKS; ++w)
      copy_2d(p.smem + WINDOWS_AT + w * TILE, &table, 0, table_rows - 64 * (w + 1), p.table_full());
  }
  sync_block();
  run(a, p);
}
