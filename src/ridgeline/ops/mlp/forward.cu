// The MLP half of a block for sm_90a: u = h Wupᵀ + b, a = gelu(u), z = a Wdownᵀ + b, then the join r, h' (join.cuh).
// u lives in registers only. gelu'(u) is kept (layout.cuh): the backward pass needs no more of it, and half precision holds
// it better than bf16 holds u. a leaves for Wdown's gradient.
//
// Macros: tile.cuh's, join.cuh's, GELU_TANH, UP_BIAS, BRANCH_BIAS (Wdown's).
#include "join.cuh"
#include "panels.cuh"

#include "../linear/gelu.cuh"

using namespace rl;

constexpr int K_BLOCKS = WIDTH / 64, ROWS_BYTES = K_BLOCKS * 8192;  // a warpgroup's rows of h: [K block][64][64]
constexpr int RING = 2 * ROWS_BYTES, STAGING = RING + STAGES * SLOT_BYTES, VECTORS = STAGING + 2 * panels_bytes(2);
constexpr int BIAS = VECTORS + 3 * VECTOR_BYTES;
static_assert(STAGES >= K_BLOCKS + 2 * HALVES, "a turn does not fit the ring");
static_assert(SPLIT == 1 || ROWS_BYTES >= EXCHANGE_BYTES, "the exchange happens where h was");

RL_D void produce(const TensorMap* h, const TensorMap* up, const TensorMap* down, const u16* residual, int rows, int first,
                  int last, u32 smem, Barriers bar) {
  Ring ring(smem + RING, bar);
  const auto fetch = [&](int chunk) {
    for (int k = 0; k < K_BLOCKS; ++k) fetch_rows(ring, up, 64 * k, 128 * chunk);
    for (int k = 0; k < 2; ++k)
      for (int half = 0; half < HALVES; ++half) fetch_owned_rows(ring, down, 128 * chunk + 64 * k, 128 * half);
  };
  for (Tiles tiles(rows); tiles.valid(); tiles.advance()) {
    fetch(first);
    if (tiles.round == 0) begin_reading();
    for (int group = 0; group < 2; ++group) {
      barrier_wait(bar.rows_empty(group), (tiles.round & 1) ^ 1);
      barrier_expect(bar.rows_full(group), ROWS_BYTES);
      for (int k = 0; k < K_BLOCKS; ++k)
        copy_2d(smem + group * ROWS_BYTES + k * 8192, h, 64 * k, tiles.tile * TILE_ROWS + 64 * group, bar.rows_full(group));
    }
    if (RESIDUAL) prefetch_rows(residual, rows, tiles.tile);
    for (int chunk = first + 1; chunk < last; ++chunk) fetch(chunk);
  }
}

// u = h Wupᵀ + b for 128 columns; the last group is still under way.
RL_D void multiply_up(float (&u)[64], u32 rows, u32 bias, Ring& ring, const Place& me) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    u32 pair = 0;
    if (UP_BIAS) pair = load_shared_u32(bias + 16 * j + 4 * (me.lane % 4));
    u[4 * j] = u[4 * j + 2] = pair_low(pair);
    u[4 * j + 1] = u[4 * j + 3] = pair_high(pair);
  }
#pragma unroll
  for (int k = 0; k < K_BLOCKS; ++k) {
    ring.wait();
    wgmma_fence();
    product<0>(u, rows + k * 8192, ring.address(), true);
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      release(ring, 1, me);
    }
    ring.advance();
  }
}

// z += a Wdownᵀ for 128 of the inner columns.
RL_D void multiply_down(float (&z)[HALVES][64], const u32 (&a)[8][4], Ring& ring, const Place& me) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      ring.wait();
      wgmma_fence();
      product_registers<0>(z[half], a + 4 * k, ring.address());
      wgmma_commit();
      if (k + half > 0) {
        wgmma_wait<1>();
        release(ring, 1, me);
      }
      ring.advance();
    }
  wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) wgmma_touch(z[half]);
  release(ring, 1, me);
}

struct Inner {  // where gelu'(u) and gelu(u) go
  uint4* kept;
  const TensorMap* a;
  int chunks;
};

RL_D void consume(const JoinForward& join, u32 down_bias, const Inner& p, int first, int last, u32 smem, Barriers bar,
                  const Place& me) {
  Ring ring(smem + RING, bar);
  const u32 rows = smem + me.group * ROWS_BYTES, panels = smem + STAGING + me.group * panels_bytes(2);
  if (me.group == 1) end_turn(me);  // the first turn is warpgroup 0's
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const u32 phase = tiles.round & 1;
    const int row = tiles.tile * TILE_ROWS + 64 * me.group;
    float z[HALVES][64];
    begin_sums<BRANCH_BIAS>(z, down_bias, me);
    barrier_wait(bar.rows_full(me.group), phase);
    u32 a[8][4];
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      float u[64];
      begin_turn(me);
      if (chunk > first) multiply_down(z, a, ring, me);
      multiply_up(u, rows, smem + BIAS + 256 * chunk, ring, me);
      end_turn(me);
      wgmma_wait<0>();
      wgmma_touch(u);
      release(ring, 1, me);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        float* x = u + 8 * step;
        u32 slope[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          slope[k] = activate<GELU_TANH, true>(x[2 * k], x[2 * k + 1]);
          a[step][k] = pack_pair(x[2 * k], x[2 * k + 1]);
        }
        p.kept[kept_index(row / 64, p.chunks, chunk, step, me.thread())] = {slope[0], slope[1], slope[2], slope[3]};
        send_step(p.a, panels, step, a[step], 128 * chunk, row + 16 * me.warp, me);
      }
    }
    Residual ahead;
    if (SPLIT == 2) {
      let_peer_send(bar, me);
    } else {
      if (me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
      ahead.load(join, row + first_row(me), me);
    }
    begin_turn(me);
    multiply_down(z, a, ring, me);
    end_turn(me);
    float v[OWN_ROWS][LANE];
    if (SPLIT == 2) {
      exchange(v, z, rows, bar, phase, me, [&] { ahead.load(join, row + first_row(me), me); });
      fence_async();
      sync_warp();
      if (me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
    } else {
      take_rows(v, z);
    }
    join_forward(join, v, ahead, row + first_row(me), me);
  }
  if (me.lane == 0) store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    CLUSTER_DIMENSIONS
        mlp_forward(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap up,
                    const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap a, const u16* up_bias,
                    const u16* down_bias, uint4* kept, const u16* residual, const u16* weight, const u16* bias, u16* r, u16* next, float* mean, float* rstd,
                    const i64* seed_step, int rows, int inner, float eps, u32 site, u32 threshold, float scale,
                    int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const int chunks = ceil_div(inner, 128);
  const Barriers bar{smem + BIAS + chunks * 256};
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&h), prefetch_map(&up), prefetch_map(&down), prefetch_map(&a);
  begin(bar);
  const int share = ceil_div(chunks, SPLIT), first = me.split * share, last = first + share < chunks ? first + share : chunks;
  if (me.group < 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(&h, &up, &down, residual, rows, first, last, smem, bar);
  } else {
    registers_up<232>();
    const int thread = threadIdx.x - 128;
    const u32 vectors = smem + VECTORS;  // scale and shift of the norm, bias of Wdown
    copy_vectors<3>(vectors, weight, NORM_BIAS ? bias : nullptr, BRANCH_BIAS ? down_bias : nullptr, thread, [&] {
#pragma unroll 4
      for (int i = thread; i < UP_BIAS * chunks * 64; i += CONSUMERS)
        store_shared_u32(smem + BIAS + 4 * i, 2 * i < inner ? reinterpret_cast<const u32*>(up_bias)[i] : 0);
    });
    wait_for_previous();
    const JoinForward join{residual, vectors, vectors + VECTOR_BYTES, r, next, mean, rstd, eps, rows,
                           Mask::make(seed_step, site, threshold, scale, rows_per_sample, first_sample), 0};
    consume(join, vectors + 2 * VECTOR_BYTES, {kept, &a, chunks}, first, last, smem, bar, me);
  }
}
