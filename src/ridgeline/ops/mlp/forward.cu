// The MLP half of a block for sm_90a: u = h Wupᵀ + b, a = gelu(u), z = a Wdownᵀ + b, then the join r, h' (join.cuh).
// u lives in registers only. gelu'(u) is kept (layout.cuh): the backward pass needs no more of it, and half precision holds
// it better than bf16 holds u. a leaves for Wdown's gradient.
//
// Macros: tile.cuh's, join.cuh's, GELU_TANH, UP_BIAS, BRANCH_BIAS (Wdown's).
#define MLP 1
#include "join.cuh"
#include "machine.cuh"
#include "panels.cuh"

#include "../linear/gelu.cuh"

using namespace rl;

constexpr int STATISTICS = STAGING + 2 * PANELS_BYTES, VECTORS = STATISTICS + (APART ? 0 : 2 * STATISTICS_BYTES);
constexpr int BIAS = VECTORS + 3 * VECTOR_BYTES;
constexpr int UP_SLOTS = K_BLOCKS / 2;  // of 64 inner columns; Wdown's are HALVES

RL_D void produce(const TensorMap* h, const TensorMap* up, const TensorMap* down, const u16* residual, int rows, int chunks,
                  u32 smem, Barriers bar) {
  Ring ring(smem + RING, bar);
  const auto fetch = [&](int chunk) {  // what a turn of each warpgroup reads
    for (int part = 0; part < WORKERS; ++part) {
      const int inner = 64 * (WORKERS * chunk + part);
      for (int half = 0; half < (chunk > 0 ? HALVES : 0); ++half)
        fetch_owned_rows(ring, down, inner - 64 * WORKERS, 128 * half);
      for (int k = 0; k < (chunk < chunks ? UP_SLOTS : 0); ++k) fetch_boxes(ring, up, 128 * k, inner, 64, 0);
    }
  };
  for (Tiles tiles(rows); tiles.valid(); tiles.advance()) {
    fetch(0);
    if (tiles.round == 0) wait_for_previous();
    fetch_rows(h, smem, bar, tiles.tile, tiles.round);
    if (RESIDUAL) prefetch_rows(residual, rows, tiles.tile);
    for (int chunk = 1; chunk <= chunks; ++chunk) fetch(chunk);
  }
  let_next_start();
}

// u = h Wupᵀ + b for 64 columns, under way.
RL_D void multiply_up(float (&u)[32], u32 rows, Ring& ring) {
#pragma unroll
  for (int k = 0; k < UP_SLOTS; ++k) {
    ring.wait();
    wgmma_fence();
    product_narrow<0>(u, rows + k * 2 * 8192, ring.address(), true);
    wgmma_commit();
    ring.advance();
  }
}

// z += a Wdownᵀ for 64 of the inner columns, under way.
RL_D void multiply_down(float (&z)[HALVES][64], const u32 (&a)[4][4], Ring& ring) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    ring.wait();
    wgmma_fence();
    product_registers<0>(z[half], a, ring.address());
    wgmma_commit();
    ring.advance();
  }
}

RL_D void load_bias(float (&u)[32], u32 bias, const Place& me) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 pair = 0;
    if (UP_BIAS) pair = load_shared_u32(bias + 16 * j + 4 * (me.lane % 4));
    u[4 * j] = u[4 * j + 2] = pair_low(pair);
    u[4 * j + 1] = u[4 * j + 3] = pair_high(pair);
  }
}

struct Inner {  // where gelu'(u) and gelu(u) go
  uint4* kept;
  const TensorMap* a;
  int chunks;
};

// a = gelu(u), packed and staged; slope = gelu'(u).
RL_D void activate_rows(u32 (&a)[4][4], u32 (&slope)[4][4], float (&u)[32], u32 panels, const Place& me) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float* x = u + 8 * step + 2 * k;
      slope[step][k] = activate<GELU_TANH, true>(x[0], x[1]);
      a[step][k] = pack_pair(x[0], x[1]);
    }
  stage(panels, a, me);
}

// gelu(u), which is staged, and gelu'(u) leave: columns 64 part … of the 64 rows 64 tile ….
RL_D void send_rows(const u32 (&slope)[4][4], const Inner& p, int part, int tile, u32 panels, const Place& me) {
  send(p.a, panels, 64 * part, 64 * tile, me);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32(&s)[4] = slope[step];
    p.kept[kept_index(tile, p.chunks, part / 2, part % 2 * 4 + step, me.thread())] = {s[0], s[1], s[2], s[3]};
  }
}

RL_D void consume(const JoinForward& join, u32 down_bias, const Inner& p, int chunks, u32 smem, Barriers bar,
                  const Place& me) {
  Ring ring(smem + RING, bar);
  const u32 rows = block_place(smem, row_block(me));
  const u32 panels = smem + STAGING + me.group * PANELS_BYTES;
  begin_turns(ring, UP_SLOTS, me);
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const int row = tiles.tile * TILE_ROWS + block_row(row_block(me));
    float z[HALVES][64], u[32];
    u32 a[4][4], slope[4][4];
    begin_sums<BRANCH_BIAS>(z, down_bias, APART || me.group == 0, me);
    load_bias(u, smem + BIAS + 128 * first_part(me), me);
    barrier_wait(bar.rows_full(row_block(me)), tiles.round & 1);
    begin_turn(me);
    multiply_up(u, rows, ring);
    end_turn(me);
    wgmma_wait<0>();
    wgmma_touch(u);
    release_all<UP_SLOTS>(ring, 0, me);
    skip_turn(ring, me.group * HALVES + (me.group < chunks ? UP_SLOTS : 0));
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
      const int part = WORKERS * chunk + first_part(me);
      activate_rows(a, slope, u, panels, me);
      if (chunk + 1 == chunks) break;
      load_bias(u, smem + BIAS + 128 * (part + WORKERS), me);
      begin_turn(me);
      multiply_down(z, a, ring);
      multiply_up(u, rows, ring);
      end_turn(me);
      send_rows(slope, p, part, row / 64, panels, me);
      wgmma_wait<UP_SLOTS>();
      release_all<HALVES>(ring, UP_SLOTS, me);
      wgmma_wait<0>();
      wgmma_touch(u);
      release_all<UP_SLOTS>(ring, 0, me);
      skip_turn(ring, HALVES + (chunk + 1 + me.group < chunks ? UP_SLOTS : 0));
    }
    if (!APART && me.group == 1) named_arrive<256>(6);  // h has been read
    if (APART && me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
    begin_turn(me);
    multiply_down(z, a, ring);
    end_turn(me);
    send_rows(slope, p, WORKERS * (chunks - 1) + first_part(me), row / 64, panels, me);
    Residual ahead;
    ahead.load(join, row + first_row(me), me);
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) wgmma_touch(z[half]);
    release_all<HALVES>(ring, 0, me);
    skip_turn(ring, me.group == 0 ? HALVES : UP_SLOTS);
    float v[OWN_ROWS][LANE];
    finish_sums(v, z, rows, bar, me);
    join_forward(join, v, ahead, row + first_row(me), me);
  }
  if (elected()) store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlp_forward(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap up,
                const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap a, const u16* up_bias,
                const u16* down_bias, uint4* kept, const u16* residual, const u16* weight, const u16* bias, u16* r, u16* next,
                float* mean, float* rstd, const i64* seed_step, int rows, int inner, float eps, u32 site, u32 threshold,
                float scale, int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const int chunks = ceil_div(inner, 128);
  const u32 barriers = smem + BIAS + chunks * 256;
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&h), prefetch_map(&up), prefetch_map(&down), prefetch_map(&a);
  begin({barriers});
  if (me.group < 0) {
    registers_down<24>();
    if (me.warp == 0) produce(&h, &up, &down, residual, rows, 2 * chunks / WORKERS, smem, {barriers});
  } else {
    registers_up<240>();
    const int thread = threadIdx.x - 128;
    const u32 vectors = smem + VECTORS;  // scale and shift of the norm, bias of Wdown
    copy_vectors<3>(vectors, weight, NORM_BIAS ? bias : nullptr, BRANCH_BIAS ? down_bias : nullptr, thread, [&] {
#pragma unroll 4
      for (int i = thread; i < UP_BIAS * chunks * 64; i += CONSUMERS)
        store_shared_u32(smem + BIAS + 4 * i, 2 * i < inner ? reinterpret_cast<const u32*>(up_bias)[i] : 0);
    });
    wait_for_previous();
    const JoinForward join{residual, vectors, vectors + VECTOR_BYTES, r, next, mean, rstd, eps, rows,
                           Mask::make(seed_step, site, threshold, scale, rows_per_sample, first_sample), smem + STATISTICS};
    consume(join, vectors + 2 * VECTOR_BYTES, {kept, &a, chunks}, 2 * chunks / WORKERS, smem, {barriers},
            me);
  }
}
