// Weight gradients dW[M, K] = dYᵀ X of up to four layers in two launches, for sm_90a, with the layers' bias gradients.
//
// weight_parts: every block takes an equal share of the (tile of 128 × WIDTH, 64 tokens) units of all layers, in segments
// that each belong to one tile, and leaves a segment's fp32 sums. weight_totals adds a tile's segments in a fixed order.
//
// Macros: WIDTH (128 or 256: a tile's columns), STAGES (a multiple of the slots of 64 tokens), SPLIT 1, SHARE: 2 lets a
// pair of blocks work on 256 rows together, so that X comes from memory once for both.
#include "tile.cuh"

using namespace rl;

constexpr int SLOTS = 1 + HALVES, VECTORS = WIDTH / 8;  // slots of 64 tokens; 16-byte vectors of a thread's accumulators
constexpr int AREA = STAGES * SLOT_BYTES, BARRIERS = AREA + 2 * 4 * 64 * 4;
static_assert(STAGES % SLOTS == 0, "the halves of X must be neighbours in the ring");

struct Segment {  // of a block's share; `count` 0 ends it
  int layer, row, column, first, count, slot, sums;
  RL_D static Segment at(const int4* schedule) {
    const int4 a = schedule[0], b = schedule[1];
    return {a.x, a.y, a.z, b.x, b.y, a.w, b.z};
  }
};

struct Layers {
  const TensorMap *dy[4], *x[4];
};

RL_D void produce(const Layers& layers, const int4* schedule, u32 smem, Barriers bar, const Place& me) {
  Ring ring(smem, bar);
  for (;; schedule += 2) {
    const Segment s = Segment::at(schedule);
    if (s.count == 0) return;
    const TensorMap *dy = layers.dy[0], *x = layers.x[0];
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if (s.layer == i) dy = layers.dy[i], x = layers.x[i];
    for (int k = s.first; k < s.first + s.count; ++k) {
      ring.begin();
      for (int panel = 0; panel < 2; ++panel)
        copy_2d(ring.address() + panel * SLOT_BYTES / 2, dy, s.row + TILE_ROWS * me.share + 64 * panel, 64 * k,
                ring.bar.full(ring.slot));
      ring.advance();
      for (int half = 0; half < HALVES; ++half) fetch_columns(ring, x, 64 * k, s.column + 128 * half, me);
    }
  }
}

// Adds this warp's 16 tokens of 64 columns of dY, two columns a lane.
RL_D void add_tokens(float (&sums)[2], u32 dy, const Place& me) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u32 pair = load_shared_u32(dy + swizzle128(16 * me.warp + i, me.lane / 4) + me.lane % 4 * 4);
    sums[0] += pair_low(pair);
    sums[1] += pair_high(pair);
  }
}

RL_D void consume(const int4* schedule, float4* parts, float* sums, u32 smem, Barriers bar, const Place& me) {
  Ring ring(smem, bar);
  const u32 area = smem + AREA + me.group * 4 * 64 * 4;
  for (;; schedule += 2) {
    const Segment s = Segment::at(schedule);
    if (s.count == 0) return;
    float acc[WIDTH / 2], bias[2] = {};
    for (int k = 0; k < s.count; ++k) {
      const u32 dy = ring.address() + me.group * SLOT_BYTES / 2, x = ring.address() + SLOT_BYTES;
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) {
        ring.wait();
        ring.advance();
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<WIDTH, 1, 1>(acc, operand_mn_major(dy + step * 2048, SLOT_BYTES / 2), operand_mn_major(x + step * 2048, SLOT_BYTES / 2),
                           k + step > 0);
      wgmma_commit();
      if (s.sums) add_tokens(bias, dy, me);
      if (k > 0) {
        wgmma_wait<1>();
#pragma unroll
        for (int i = 1; i <= SLOTS; ++i) release(ring, SLOTS + i, me);
      }
    }
    wgmma_wait<0>();
    wgmma_touch(acc);
#pragma unroll
    for (int i = 1; i <= SLOTS; ++i) release(ring, i, me);
    float4* out = parts + (static_cast<i64>(s.slot * SHARE + me.share) * 2 + me.group) * VECTORS * 128 + me.thread();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) out[128 * i] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
    if (s.sums) {
      store_shared(area + (64 * me.warp + 2 * me.lane) * 4, bias[0]);
      store_shared(area + (64 * me.warp + 2 * me.lane + 1) * 4, bias[1]);
      named_barrier<128>(1 + me.group);
      if (me.thread() < 64) {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) sum += load_shared(area + (64 * warp + me.thread()) * 4);
        sums[(s.slot * SHARE + me.share) * 128 + 64 * me.group + me.thread()] = sum;
      }
      named_barrier<128>(1 + me.group);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    CLUSTER_DIMENSIONS
    weight_parts(const __grid_constant__ TensorMap dy_0, const __grid_constant__ TensorMap x_0,
                 const __grid_constant__ TensorMap dy_1, const __grid_constant__ TensorMap x_1,
                 const __grid_constant__ TensorMap dy_2, const __grid_constant__ TensorMap x_2,
                 const __grid_constant__ TensorMap dy_3, const __grid_constant__ TensorMap x_3, const int4* schedule,
                 int longest, float4* parts, float* sums) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Place me = Place::here();
  if (threadIdx.x == 0) bar.init();
  wait_for_previous();
  let_next_start();
  tile_sync();
  schedule += static_cast<i64>(blockIdx.x / SHARE) * longest * 2;
  if (me.group < 0) {
    registers_down<40>();
    const Layers layers{{&dy_0, &dy_1, &dy_2, &dy_3}, {&x_0, &x_1, &x_2, &x_3}};
    if (threadIdx.x == 0) produce(layers, schedule, smem, bar, me);
  } else {
    registers_up<232>();
    consume(schedule, parts, sums, smem, bar, me);
  }
  tile_sync();  // the partner may still arrive here
}

struct Target {  // of one layer
  float *weight, *bias;
  int rows, columns;
};

// Block 8 · tile + part: an eighth of the vectors of each of weight_parts' threads.
extern "C" __global__ void __launch_bounds__(256)
    weight_totals(const int4* tiles, const float4* parts, const float* sums, float* w_0, float* w_1, float* w_2, float* w_3,
                  float* b_0, float* b_1, float* b_2, float* b_3, int rows_0, int rows_1, int rows_2, int rows_3,
                  int columns_0, int columns_1, int columns_2, int columns_3, int accumulate) {
  constexpr int MINE = VECTORS / 8;
  wait_for_previous();
  let_next_start();
  const int4 a = tiles[blockIdx.x / 8 * 2], b = tiles[blockIdx.x / 8 * 2 + 1];  // layer, row, column, first slot; slots, sums, step
  Target t{w_0, b_0, rows_0, columns_0};
  if (a.x == 1) t = {w_1, b_1, rows_1, columns_1};
  if (a.x == 2) t = {w_2, b_2, rows_2, columns_2};
  if (a.x == 3) t = {w_3, b_3, rows_3, columns_3};
  const int thread = threadIdx.x % 128, group = threadIdx.x / 128, part = blockIdx.x % 8;
  float total[MINE][4] = {};
  for (int slot = 0; slot < b.x; ++slot) {
    const float4* from = parts + ((static_cast<i64>(a.w) + slot * b.z) * 2 + group) * VECTORS * 128 + thread;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const float4 v = from[128 * (part * MINE + i)];
      total[i][0] += v.x, total[i][1] += v.y, total[i][2] += v.z, total[i][3] += v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = a.y + 64 * group + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
      const int column = a.z + 8 * (part * MINE + i) + 2 * (thread % 4);
      if (row >= t.rows || column >= t.columns) continue;
      float* out = t.weight + static_cast<i64>(row) * t.columns + column;
      const float base_0 = accumulate ? out[0] : 0.f, base_1 = accumulate ? out[1] : 0.f;
      out[0] = base_0 + total[i][2 * h];
      out[1] = base_1 + total[i][2 * h + 1];
    }
  if (b.y && part == 0 && threadIdx.x < 128 && a.y + threadIdx.x < t.rows) {
    float sum = accumulate ? t.bias[a.y + threadIdx.x] : 0.f;
    for (int slot = 0; slot < b.x; ++slot) sum += sums[(a.w + slot * b.z) * 128 + threadIdx.x];
    t.bias[a.y + threadIdx.x] = sum;
  }
}
