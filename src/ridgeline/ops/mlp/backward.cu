// Gradient of the MLP half of a block for sm_90a: da = dz Wdown, du = da · gelu'(u), dh = du Wup, then the gradient of the
// join before it (join.cuh). gelu'(u) is what the forward pass kept; du is stored for Wup's gradient.
//
// Macros: tile.cuh's, join.cuh's (of the join before the MLP), UP_BIAS (sums of du are wanted).
#define MLP 1
#include "join.cuh"
#include "machine.cuh"
#include "panels.cuh"

#include "../linear/gelu.cuh"

using namespace rl;

constexpr int DU_SUMS_BYTES = UP_BIAS ? 2 * 64 * 4 : 0;  // a warpgroup's: [pair of warps][column]
// Where du is staged the join's sums are taken, both warpgroups' in one place unless they are apart.
constexpr int STAGING_BYTES = APART && SUMS_BYTES > PANELS_BYTES ? SUMS_BYTES : PANELS_BYTES;
constexpr int DU_SUMS = STAGING + 2 * STAGING_BYTES, STATISTICS = DU_SUMS + 2 * DU_SUMS_BYTES;
constexpr int VECTOR = STATISTICS + (APART ? 0 : 2 * STATISTICS_BYTES), BARRIERS = VECTOR + VECTOR_BYTES;
// Of what is kept, 64 rows × 128 inner columns; and so many of these come into L2 before dz, which waits in the copy engine
// until they have.
constexpr int KEPT_BYTES = 64 * 128 * 2, KEPT_AHEAD = 2;
constexpr int DOWN_SLOTS = K_BLOCKS / 2;  // for 64 inner columns; Wup's are HALVES
static_assert((APART ? 1 : 2) * STAGING_BYTES >= SUMS_BYTES, "the join's sums do not fit where du was staged");

RL_D void produce(const TensorMap* dz, const TensorMap* up, const TensorMap* down, const JoinBackward& join, const uint4* kept,
                  int chunks, u32 smem, Barriers bar) {
  Ring ring(smem + RING, bar);
  const int turns = 2 * chunks / WORKERS;
  const auto fetch = [&](int turn) {  // what a turn of each warpgroup reads
    for (int part = 0; part < WORKERS; ++part) {
      const int inner = 64 * (WORKERS * turn + part);
      for (int half = 0; half < (turn > 0 ? HALVES : 0); ++half) fetch_boxes(ring, up, 128 * half, inner - 64 * WORKERS, 64, 0);
      for (int k = 0; k < (turn < turns ? DOWN_SLOTS : 0); ++k) fetch_boxes(ring, down, inner, 128 * k, 0, 64);
    }
  };
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const auto prefetch_kept = [&](int chunk) {
      for (int block = 0; block < ROW_BLOCKS; ++block) {
        const int row = tiles.tile * TILE_ROWS + block_row(block);
        if (row < join.rows && chunk < chunks && elected()) prefetch_bytes(kept + kept_index(row / 64, chunks, chunk, 0, 0), KEPT_BYTES);
      }
    };
    fetch(0);
    for (int chunk = 0; chunk < KEPT_AHEAD; ++chunk) prefetch_kept(chunk);
    if (tiles.round == 0) wait_for_previous();
    fetch_rows(dz, smem, bar, tiles.tile, tiles.round);
    for (int turn = 1; turn <= turns; ++turn) {
      if (!APART || turn % 2) prefetch_kept(KEPT_AHEAD + (turn - 1) * WORKERS / 2);
      if (turn == ceil_div(turns, 2)) {
        prefetch_rows(join.r, join.rows, tiles.tile);
        if (RESIDUAL) prefetch_rows(join.dresidual, join.rows, tiles.tile);
      }
      fetch(turn);
    }
  }
  let_next_start();
}

struct Inner {  // the inner columns: where gelu'(u) comes from and du goes
  const uint4* kept;
  const TensorMap* du;
  float* sums;  // [tile][column], or null
  int inner, chunks;
};

// gelu'(u) of columns 64 part … of the 64 rows 64 tile …, as the forward pass kept it; zeros for rows it may not have had.
RL_D void load_kept(uint4 (&kept)[4], const Inner& p, int part, int tile, bool inside, const Place& me) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint4* source = p.kept + kept_index(tile, p.chunks, part / 2, part % 2 * 4 + step, me.thread());
    kept[step] = inside ? load_stream(source) : uint4{0, 0, 0, 0};
  }
}

// du = da · gelu'(u), as A fragments. sums[i]: over the warp's rows, of column 32 i + 8 (l / 8) + 2 q + l / 4 % 2.
RL_D void differentiate(u32 (&du)[4][4], float (&sums)[2], const float (&da)[32], const uint4 (&kept)[4], const Place& me) {
  float sum[8];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32 slope[4] = {kept[step].x, kept[step].y, kept[step].z, kept[step].w};
    float d[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      d[2 * k] = da[8 * step + 2 * k] * half_low(slope[k]), d[2 * k + 1] = da[8 * step + 2 * k + 1] * half_high(slope[k]);
      du[step][k] = pack_pair(d[2 * k], d[2 * k + 1]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // rows l / 4 and l / 4 + 8
      sum[4 * (step % 2) + e] = d[e] + d[2 + e];
      sum[4 * (step % 2) + 2 + e] = d[4 + e] + d[6 + e];
    }
    if (UP_BIAS && step % 2) sums[step / 2] = column_sum(sum, me.lane);
  }
}

// The warpgroup's sums of 64 columns, its warps' added in a fixed order, to `out`.
RL_D void write_sums(const float (&sums)[2], float* out, int columns, u32 area, const Place& me) {
  const u32 mine = area + (me.warp / 2 * 64 + 8 * (me.lane / 8) + 2 * (me.lane % 4) + me.lane / 4 % 2) * 4;
  if (me.warp % 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) store_shared(mine + 128 * i, sums[i]);
  named_barrier<128>(1 + me.group);
  if (me.warp % 2 == 0)
#pragma unroll
    for (int i = 0; i < 2; ++i) store_shared(mine + 128 * i, sums[i] + load_shared(mine + 128 * i));
  named_barrier<128>(1 + me.group);
  const int column = me.thread();
  if (column < 64 && column < columns) out[column] = load_shared(area + 4 * column) + load_shared(area + 256 + 4 * column);
}

// da = dz Wdown for 64 columns, under way.
RL_D void multiply_down(float (&da)[32], u32 rows, Ring& ring) {
#pragma unroll
  for (int k = 0; k < DOWN_SLOTS; ++k) {
    ring.wait();
    wgmma_fence();
    product_narrow<1>(da, rows + k * 2 * 8192, ring.address(), k > 0);
    wgmma_commit();
    ring.advance();
  }
}

// dh += du Wup for 64 of the inner columns, under way.
RL_D void multiply_up(float (&dh)[HALVES][64], const u32 (&du)[4][4], Ring& ring) {
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    ring.wait();
    wgmma_fence();
    product_registers<1>(dh[half], du, ring.address());
    wgmma_commit();
    ring.advance();
  }
}

RL_D void consume(const JoinBackward& join, const Inner& p, u32 smem, Barriers bar, const Place& me) {
  Ring ring(smem + RING, bar);
  const u32 rows = block_place(smem, row_block(me));
  const int turns = 2 * p.chunks / WORKERS;
  const u32 staging = smem + STAGING + me.group * STAGING_BYTES;
  begin_turns(ring, DOWN_SLOTS, me);
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const int row = tiles.tile * TILE_ROWS + block_row(row_block(me));
    const bool inside = row < join.rows;
    float dh[HALVES][64], da[32], sums[2];
    u32 du[4][4];
    uint4 kept[4];
#pragma unroll
    for (int i = 0; i < HALVES * 64; ++i) dh[i / 64][i % 64] = 0.f;
    load_kept(kept, p, first_part(me), row / 64, inside, me);
    barrier_wait(bar.rows_full(row_block(me)), tiles.round & 1);
    begin_turn(me);
    multiply_down(da, rows, ring);
    end_turn(me);
    wgmma_wait<0>();
    wgmma_touch(da);
    release_all<DOWN_SLOTS>(ring, 0, me);
    skip_turn(ring, me.group * HALVES + (me.group < turns ? DOWN_SLOTS : 0));
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      const int part = WORKERS * turn + first_part(me);
      differentiate(du, sums, da, kept, me);
      stage(staging, du, me);
      if (UP_BIAS)
        write_sums(sums, p.sums + static_cast<i64>(row / 64) * p.inner + 64 * part, inside ? p.inner - 64 * part : 0,
                   smem + DU_SUMS + me.group * DU_SUMS_BYTES, me);
      if (turn + 1 == turns) break;
      load_kept(kept, p, part + WORKERS, row / 64, inside, me);
      begin_turn(me);
      multiply_up(dh, du, ring);
      multiply_down(da, rows, ring);
      end_turn(me);
      send(p.du, staging, 64 * part, row, me);
      wgmma_wait<DOWN_SLOTS>();
      release_all<HALVES>(ring, DOWN_SLOTS, me);
      wgmma_wait<0>();
      wgmma_touch(da);
      release_all<DOWN_SLOTS>(ring, 0, me);
      skip_turn(ring, HALVES + (turn + 1 + me.group < turns ? DOWN_SLOTS : 0));
    }
    if (!APART && me.group == 1) named_arrive<256>(6);  // dz has been read
    if (APART && me.lane == 0) barrier_arrive(bar.rows_empty(me.group));
    begin_turn(me);
    multiply_up(dh, du, ring);
    end_turn(me);
    send(p.du, staging, 64 * (WORKERS * (turns - 1) + first_part(me)), row, me);
    Ahead ahead;
    ahead.load(join, row + first_row(me), me);
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) wgmma_touch(dh[half]);
    release_all<HALVES>(ring, 0, me);
    if (elected()) store_wait_read<0>();  // the join's sums are taken where du was staged
    sync_warp();
    skip_turn(ring, me.group == 0 ? HALVES : DOWN_SLOTS);
    float v[OWN_ROWS][LANE];
    finish_sums(v, dh, rows, bar, me);
    if (APART) named_barrier<128>(1 + me.group);  // all of its warps have staged nothing more
    own_columns(v, me);
    join_backward(join, v, ahead, row + first_row(me), APART ? staging : smem + STAGING,
                  smem + STATISTICS + (tiles.round & 1) * STATISTICS_BYTES, row / 64, me);
    if (!APART) sync_consumers();
  }
  if (elected()) store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlp_backward(const __grid_constant__ TensorMap dz, const __grid_constant__ TensorMap up,
                 const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap du, const uint4* kept,
                 float* du_sums, const u16* r, const u16* weight, const float* mean, const float* rstd,
                 const u16* dresidual, u16* dr, u16* dbranch, float* partials, i64 stride, const i64* seed_step, int rows,
                 int inner, u32 site, u32 threshold, float scale, int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&dz), prefetch_map(&up), prefetch_map(&down), prefetch_map(&du);
  begin({smem + BARRIERS});
  const int chunks = ceil_div(inner, 128);
  if (me.group < 0) {
    registers_down<24>();
    const JoinBackward join{r, dresidual, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0, rows, {}};
    if (me.warp == 0) produce(&dz, &up, &down, join, kept, chunks, smem, {smem + BARRIERS});
  } else {
    registers_up<240>();
    copy_vectors<1>(smem + VECTOR, weight, nullptr, nullptr, threadIdx.x - 128, [] {});
    wait_for_previous();
    const JoinBackward join{r, dresidual, smem + VECTOR, mean, rstd, dr, dbranch, partials, stride, rows,
                            Mask::make(seed_step, site, threshold, scale, rows_per_sample, first_sample)};
    consume(join, {kept, &du, du_sums, inner, chunks}, smem, {smem + BARRIERS}, me);
  }
}
