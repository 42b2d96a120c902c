// Gradient of the MLP half of a block for sm_90a: da = dz Wdown, du = da · gelu'(u), dh = du Wup, then the gradient of the
// join before it (join.cuh). gelu'(u) is what the forward pass kept; du is stored for Wup's gradient.
//
// Macros: tile.cuh's, join.cuh's (of the join before the MLP), UP_BIAS (sums of du are wanted).
#include "join.cuh"
#include "panels.cuh"

#include "../linear/gelu.cuh"

using namespace rl;

constexpr int K_BLOCKS = WIDTH / 64, ROWS_BYTES = K_BLOCKS * 8192;  // a warpgroup's rows of dz: [K block][64][64]
constexpr int STAGING_BYTES = panels_bytes(4);        // du's, then the join's sums
constexpr int DU_SUMS_BYTES = UP_BIAS ? 2 * 128 * 4 : 0;                              // a warpgroup's: [pair of warps][column]
constexpr int RING = 2 * ROWS_BYTES, STAGING = RING + STAGES * SLOT_BYTES;
constexpr int DU_SUMS = STAGING + 2 * STAGING_BYTES, VECTOR = DU_SUMS + 2 * DU_SUMS_BYTES;
constexpr int BARRIERS = VECTOR + VECTOR_BYTES;
static_assert(STAGES >= K_BLOCKS + 2 * HALVES, "a turn does not fit the ring");
static_assert(STAGING_BYTES >= SUMS_BYTES, "the join's sums are taken where du was staged");
static_assert(SPLIT == 1 || ROWS_BYTES >= EXCHANGE_BYTES, "the exchange happens where dz was");

RL_D void produce(const TensorMap* dz, const TensorMap* up, const TensorMap* down, const JoinBackward& join, const uint4* kept,
                  int chunks, int first, int last, u32 smem, Barriers bar) {
  Ring ring(smem + RING, bar);
  const auto fetch = [&](int chunk) {
    for (int k = 0; k < K_BLOCKS; ++k) fetch_columns(ring, down, 64 * k, 128 * chunk);
    for (int k = 0; k < 2; ++k)
      for (int half = 0; half < HALVES; ++half) fetch_columns(ring, up, 128 * chunk + 64 * k, 128 * half);
  };
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const auto prefetch_kept = [&](int chunk) {
      for (int group = 2 * tiles.tile; group < 2 * tiles.tile + 2; ++group)
        if (64 * group < join.rows) prefetch_bytes(kept + kept_index(group, chunks, chunk, 0, 0), 64 * 128 * 2);
    };
    fetch(first);
    if (tiles.round == 0) begin_reading();
    for (int group = 0; group < 2; ++group) {
      barrier_wait(bar.rows_empty(group), (tiles.round & 1) ^ 1);
      barrier_expect(bar.rows_full(group), ROWS_BYTES);
      for (int k = 0; k < K_BLOCKS; ++k)
        copy_2d(smem + group * ROWS_BYTES + k * 8192, dz, 64 * k, tiles.tile * TILE_ROWS + 64 * group, bar.rows_full(group));
    }
    prefetch_kept(first);
    prefetch_rows(join.r, join.rows, tiles.tile);
    if (RESIDUAL) prefetch_rows(join.dresidual, join.rows, tiles.tile);
    for (int chunk = first + 1; chunk < last; ++chunk) {
      prefetch_kept(chunk);
      fetch(chunk);
    }
  }
}

struct Inner {  // the inner columns: where gelu'(u) comes from and du goes
  const uint4* kept;
  const TensorMap* du;
  float* sums;  // [tile and warpgroup][column], or null
  int inner, chunks;
};

// One step (16 columns) of what the forward pass kept; zeros for rows it may not have had.
RL_D uint4 load_kept(const uint4* source, int step, bool inside) {
  return inside ? load_stream(source + 128 * step) : uint4{0, 0, 0, 0};
}

// du = da · gelu'(u), as A fragments. `kept` holds the first four steps of what lies at `source`;
// each makes way for the one four steps on. sums[i]: over the warp's rows, of column 32 i + 8 (l / 8) + 2 q + l / 4 % 2.
RL_D void differentiate(u32 (&pairs)[8][4], float (&sums)[4], const float (&da)[64], uint4 (&kept)[4], const uint4* source,
                        bool inside, const Place& me) {
  float sum[8];
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const u32 slope[4] = {kept[step % 4].x, kept[step % 4].y, kept[step % 4].z, kept[step % 4].w};
    if (step < 4) kept[step] = load_kept(source, step + 4, inside);
    float d[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      d[2 * k] = da[8 * step + 2 * k] * half_low(slope[k]), d[2 * k + 1] = da[8 * step + 2 * k + 1] * half_high(slope[k]);
      pairs[step][k] = pack_pair(d[2 * k], d[2 * k + 1]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // rows l / 4 and l / 4 + 8
      sum[4 * (step % 2) + e] = d[e] + d[2 + e];
      sum[4 * (step % 2) + 2 + e] = d[4 + e] + d[6 + e];
    }
    if (UP_BIAS && step % 2) sums[step / 2] = column_sum(sum, me.lane);
  }
}

// The warpgroup's sums of 128 columns, its warps' added in a fixed order, to `out`.
RL_D void write_sums(const float (&sums)[4], float* out, int columns, u32 area, const Place& me) {
  const u32 mine = area + (me.warp / 2 * 128 + 8 * (me.lane / 8) + 2 * (me.lane % 4) + me.lane / 4 % 2) * 4;
  if (me.warp % 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(mine + 128 * i, sums[i]);
  named_barrier<128>(1 + me.group);
  if (me.warp % 2 == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(mine + 128 * i, sums[i] + load_shared(mine + 128 * i));
  named_barrier<128>(1 + me.group);
  const u32 column = me.thread();
  if (me.thread() < columns) out[column] = load_shared(area + 4 * column) + load_shared(area + 512 + 4 * column);
}

// da = dz Wdown for 128 columns; the last group is still under way.
RL_D void multiply_down(float (&da)[64], u32 rows, Ring& ring, const Place& me) {
#pragma unroll
  for (int k = 0; k < K_BLOCKS; ++k) {
    ring.wait();
    wgmma_fence();
    product<1>(da, rows + k * 8192, ring.address(), k > 0);
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      release(ring, 1, me);
    }
    ring.advance();
  }
}

// dh += du Wup for 128 of the inner columns.
RL_D void multiply_up(float (&dh)[HALVES][64], const u32 (&du)[8][4], Ring& ring, const Place& me) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      ring.wait();
      wgmma_fence();
      product_registers<1>(dh[half], du + 4 * k, ring.address());
      wgmma_commit();
      if (k + half > 0) {
        wgmma_wait<1>();
        release(ring, 1, me);
      }
      ring.advance();
    }
  wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) wgmma_touch(dh[half]);
  release(ring, 1, me);
}

RL_D void consume(const JoinBackward& join, const Inner& p, int first, int last, u32 smem, Barriers bar, const Place& me) {
  Ring ring(smem + RING, bar);
  const u32 rows = smem + me.group * ROWS_BYTES, staging = smem + STAGING + me.group * STAGING_BYTES;
  if (me.group == 1) end_turn(me);  // the first turn is warpgroup 0's
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const u32 phase = tiles.round & 1;
    const int row = tiles.tile * TILE_ROWS + 64 * me.group;
    float dh[HALVES][64];
#pragma unroll
    for (int i = 0; i < HALVES * 64; ++i) dh[i / 64][i % 64] = 0.f;
    barrier_wait(bar.rows_full(me.group), phase);
    u32 du[8][4];
#pragma unroll 1
    for (int chunk = first; chunk < last; ++chunk) {
      float da[64], sums[4];
      uint4 kept[4];
      const uint4* source = p.kept + kept_index(row / 64, p.chunks, chunk, 0, me.thread());
#pragma unroll
      for (int step = 0; step < 4; ++step) kept[step] = load_kept(source, step, row < join.rows);
      begin_turn(me);
      if (chunk > first) multiply_up(dh, du, ring, me);
      multiply_down(da, rows, ring, me);
      end_turn(me);
      wgmma_wait<0>();
      wgmma_touch(da);
      release(ring, 1, me);
      differentiate(du, sums, da, kept, source, row < join.rows, me);
      send(p.du, staging, du, 128 * chunk, row + 16 * me.warp, me);
      if (UP_BIAS)
        write_sums(sums, p.sums + static_cast<i64>(2 * tiles.tile + me.group) * p.inner + 128 * chunk, p.inner - 128 * chunk,
                   smem + DU_SUMS + me.group * DU_SUMS_BYTES, me);
    }
    Ahead ahead;
    if (SPLIT == 2) {
      let_peer_send(bar, me);
    } else {
      if (me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
      ahead.load(join, row + first_row(me), me);
    }
    begin_turn(me);
    multiply_up(dh, du, ring, me);
    end_turn(me);
    float v[OWN_ROWS][LANE];
    if (SPLIT == 2) {
      exchange(v, dh, rows, bar, phase, me, [&] { ahead.load(join, row + first_row(me), me); });
      fence_async();
      sync_warp();
      if (me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
    } else {
      take_rows(v, dh);
    }
    own_columns(v, me);
    if (me.lane == 0) store_wait_read<0>();
    named_barrier<128>(1 + me.group);  // the join's sums are taken where du was staged
    join_backward(join, v, ahead, row + first_row(me), staging, 0, (2 * tiles.tile + me.group) * SPLIT + me.split, me);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    CLUSTER_DIMENSIONS
        mlp_backward(const __grid_constant__ TensorMap dz, const __grid_constant__ TensorMap up,
                     const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap du, const uint4* kept,
                     float* du_sums,
                     const u16* r, const u16* weight, const float* mean, const float* rstd, const u16* dresidual, u16* dr, u16* dbranch,
                     float* partials, i64 stride, const i64* seed_step, int rows, int inner, u32 site,
                     u32 threshold, float scale, int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&dz), prefetch_map(&up), prefetch_map(&down), prefetch_map(&du);
  begin(bar);
  const int chunks = ceil_div(inner, 128), share = ceil_div(chunks, SPLIT);
  const int first = me.split * share, last = first + share < chunks ? first + share : chunks;
  if (me.group < 0) {
    registers_down<40>();
    const JoinBackward join{r, dresidual, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0, rows, {}};
    if (threadIdx.x == 0) produce(&dz, &up, &down, join, kept, chunks, first, last, smem, bar);
  } else {
    registers_up<232>();
    copy_vectors<1>(smem + VECTOR, weight, nullptr, nullptr, threadIdx.x - 128, [] {});
    wait_for_previous();
    const JoinBackward join{r, dresidual, smem + VECTOR, mean, rstd, dr, dbranch, partials, stride, rows,
                            Mask::make(seed_step, site, threshold, scale, rows_per_sample, first_sample)};
    const Inner p{kept, &du, du_sums, inner, chunks};
    consume(join, p, first, last, smem, bar, me);
  }
  sync_warp();
  if (me.group >= 0 && me.lane == 0) store_wait<0>();
}
