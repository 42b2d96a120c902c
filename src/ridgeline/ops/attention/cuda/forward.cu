// Forward of short-window attention (T <= 256). Each warpgroup of a persistent thread block takes heads of its own: K and V
// of a head lie whole in shared memory, the table is shared, Q is read straight into registers. Query blocks go from the
// last to the first, so that a key block is free for the next head's copy once its own query block is done.
//
// RL_HALVES, for four query blocks and so few heads that no warpgroup has a second one: two warpgroups share a head, one
// with the last and the first query block, the other with those between, five squares each.
#include "attention.cuh"

#ifndef RL_HALVES
#define RL_HALVES 0
#endif

namespace rl {

constexpr int GROUPS = WARPGROUPS, SHARES = 1 + RL_HALVES;  // warpgroups of a head
static_assert(!RL_HALVES || BLOCKS == 4, "only four query blocks fall into two equal halves");
// A row's reference is the largest score of its first key block, and stays so while its probabilities sum to less than this.
constexpr float LIMIT = RL_FP16 ? 16384.f : 1e18f;

constexpr int WINDOWS_AT = 0, KEYS_AT = RELATIVE ? BLOCKS * TILE : 0, HEAD_BYTES = 2 * BLOCKS * TILE;
// Barriers: a key block of a group is there; all warps of a group are done with one; the table is there.
constexpr int BARRIERS_AT = KEYS_AT + GROUPS * HEAD_BYTES, BARRIERS = GROUPS * (BLOCKS + 1) + 1;

struct Arguments {
  const TensorMap *k, *v;
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

struct Softmax {
  float reference[2], sum[2];  // of the thread's two rows; the sum is the thread's share
};
RL_D float largest(const float (&s)[32], int h) {
  float m = NOTHING;
#pragma unroll
  for (int n = 0; n < 8; ++n) m = fmaxf(m, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
  m = fmaxf(m, shuffle_xor(m, 1));
  return fmaxf(m, shuffle_xor(m, 2));
}
// Raises the reference to the largest of these scores and brings what was summed before in line.
RL_D void raise_reference(Softmax& x, float (&o)[D / 2], const float (&s)[32], float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float now = fmaxf(x.reference[h], largest(s, h) * scale), factor = exp2_fast(x.reference[h] - now);
    x.reference[h] = now, x.sum[h] *= factor;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) o[4 * n + 2 * h] *= factor, o[4 * n + 2 * h + 1] *= factor;
  }
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
  RL_D u32 keys_full(int j) const { return smem + BARRIERS_AT + 8 * (group * (BLOCKS + 1) + j); }
  RL_D u32 keys_empty() const { return keys_full(BLOCKS); }
  RL_D u32 table_full() const { return smem + BARRIERS_AT + 8 * (BARRIERS - 1); }
  RL_D u32 operands() const { return afresh(operand_at(smem)); }
};

RL_D void load_keys(const Arguments& a, const Place& p, Head head, int j) {  // one thread
  const int kv_head = head.index / a.heads_per_group;
  barrier_expect(p.keys_full(j), 2 * TILE);
  copy_4d(p.keys() + j * TILE, a.k, 0, kv_head, 64 * j, head.batch, p.keys_full(j));
  copy_4d(p.keys() + (BLOCKS + j) * TILE, a.v, 0, kv_head, 64 * j, head.batch, p.keys_full(j));
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
    bool raise = j == i;
    while (true) {
      if (RELATIVE) {
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] = 0.f;
        add_skewed(s, band, to_left, p.warp);
      }
      wgmma_fence();
      multiply_rows(s, aq, tile, !RELATIVE);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(s);
      if (j == i) mask_future(s, p.warp, p.lane);
      if (raise) raise_reference(x, o, s, scale);
      if (exponentiate(pairs, s, x, scale, dropout_base(i, j, p.warp, p.lane, tiles), keys, bias, p.group)) break;
      raise = true;  // a later block's scores are larger by far: rare
    }
  }
  RL_D void start_values(u32 tile, bool fresh) {
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const u32 part[4] = {pairs[4 * b], pairs[4 * b + 1], pairs[4 * b + 2], pairs[4 * b + 3]};
      wgmma_registers<D, 1>(o, part, operand<ROW>(tile + BLOCKS * (TILE >> 4) + ROW * b), b > 0 || !fresh);
    }
    wgmma_commit();
  }
  // One square; leaves its product with V and the next window's R under way.
  RL_D void square(int i, int j, int top, u32 phase) {
    const u32 operands = p.operands(), tile = operands + (KEYS_AT >> 4) + p.group * (HEAD_BYTES >> 4) + j * (TILE >> 4);
    if (i == top) barrier_wait(p.keys_full(j), phase);
    wgmma_wait<0>();
    wgmma_touch(o);
    if (RELATIVE) {
      wgmma_touch(r);
      take_window(band, first, r, to_left);
    }
    score(i, j, tile);
    if (j == 0) raw.finish(aq, p.lane);  // the last use of this block's Q is behind
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
    if (p.lane == 0) barrier_arrive(p.keys_empty());
    const int at = 64 * i + 16 * p.warp;
    store_rows(a.o + (static_cast<i64>(head.batch) * a.T + at) * a.o_pitch + head.index * D, a.o_pitch, o, share[0],
               share[1], a.T - at, p.lane);
  }
};

RL_D void run(const Arguments& a, const Place& p) {
  const int step = GROUPS * gridDim.x, work = blockIdx.x + p.group * gridDim.x, first_unit = work / SHARES;
  if (first_unit >= a.heads_in_all) return;
  const int top = BLOCKS - 1 - work % SHARES;  // the first query block
  DropoutKeys site{};
  if (DROPOUT) site = dropout_site(a.seed_step[0], a.seed_step[1], a.site);
  Head head(a, first_unit), next_head = head;
  if (p.warp == 0 && p.lane == 0)
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
      if (next >= 0 || more) w.raw.load(a, next >= 0 ? head : next_head, 64 * (next >= 0 ? next : top) + 16 * p.warp, p.lane);
      w.x = {{NOTHING, NOTHING}, {0.f, 0.f}};
#pragma unroll 1
      for (int j = i; j >= 0; --j) {
        w.square(i, j, top, done & 1);
        // A key block is free after its own query block; its next copy starts one query block later, when all warps are.
        const bool in_next = i < BLOCKS - 1;
        if (j == i && p.lane == 0 && p.warp == i % 4 && (in_next ? more : done > 0)) {
          barrier_wait(p.keys_empty(), (blocks - 1) & 1);
          load_keys(a, p, in_next ? next_head : head, in_next ? i + 1 : 0);
        }
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
    attention_forward(const __grid_constant__ rl::TensorMap k, const __grid_constant__ rl::TensorMap v,
                      const __grid_constant__ rl::TensorMap table, const rl::u16* q, rl::u16* o, float* lse,
                      const rl::i64* seed_step, rl::i64 q_batch, int T, int table_rows, int heads, int heads_per_group,
                      int heads_in_all, int q_row, int q_head, int o_pitch, float scale, float kept, rl::u32 site,
                      rl::u32 stream, rl::u32 threshold) {
  using namespace rl;
  const Arguments a{&k, &v, q, o, lse, seed_step, q_batch, T, heads, heads_per_group, heads_in_all, q_row, q_head, o_pitch,
                    scale, kept, site, stream, threshold};
  const Place p{dynamic_smem(), warp_uniform(threadIdx.x >> 7), warp_uniform(threadIdx.x >> 5 & 3),
                static_cast<int>(threadIdx.x & 31)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < BARRIERS; ++b)
      barrier_init(p.smem + BARRIERS_AT + 8 * b, b % (BLOCKS + 1) == BLOCKS && b < BARRIERS - 1 ? 4 : 1);
    barrier_init_fence();
    fence_async();
  }
  wait_for_previous();
  let_next_start();
  if (RELATIVE && threadIdx.x == 0) {
    barrier_expect(p.table_full(), BLOCKS * TILE);
    for (int w = 0; w < BLOCKS; ++w)
      copy_2d(p.smem + WINDOWS_AT + w * TILE, &table, 0, table_rows - 64 * (w + 1), p.table_full());
  }
  sync_block();
  run(a, p);
}
