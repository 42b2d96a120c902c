// A product whose result is one row tile wide, and the join on either side of it, for sm_90a:
//   forward   (BACKWARD 0)  y = x Wᵀ + b, then the join: the output projection of attention;      W [C, K]
//   backward  (BACKWARD 1)  dh = dy W, then the gradient of the join before it: the QKV projection's; W [K, C]
// Few rows fill the card if a block has 64, and each warpgroup half of their columns (ABREAST 2). With many (ABREAST 1) each
// warpgroup has 64 rows of its own, and its join runs under the other one's products.
//
// Macros: tile.cuh's, join.cuh's, BACKWARD.
#include "join.cuh"

using namespace rl;

constexpr int X_BYTES = 64 * 128;  // of a slot: 64 rows × 64 of K
constexpr int RING = 0, STATISTICS = STAGES * SLOT_BYTES;
constexpr int BRANCH_SUMS = STATISTICS + (APART ? 0 : 2 * STATISTICS_BYTES);
constexpr int VECTORS = BRANCH_SUMS + (BACKWARD ? ROW_BLOCKS * SUMS_BYTES : 0), BARRIERS = VECTORS + 3 * VECTOR_BYTES;

struct Reads {  // what the join reads of every row
  const u16 *a, *b;
};

RL_D void produce(const TensorMap* x, const TensorMap* weight, Reads reads, int rows, int blocks, u32 smem, Barriers bar) {
  Ring ring(smem + RING, bar);
  const auto fetch_weight = [&](int k) {
    const u32 place = ring.address() + X_BYTES, full = bar.full(ring.slot);
    if (BACKWARD)
#pragma unroll
      for (int panel = 0; panel < WIDTH / 64; ++panel) copy_2d(place + panel * 8192, weight, 64 * panel, 64 * k, full);
    else
#pragma unroll
      for (int half = 0; half < HALVES; ++half) copy_5d(place + half * 16384, weight, 64 * k, 0, 0, 0, 4 * half, full);
  };
  const auto fetch_rows = [&](int k, int row) { copy_2d(ring.address(), x, 64 * k, row, bar.full(ring.slot)); };
  const int early = blocks < STAGES ? blocks : STAGES;
  for (int k = 0; k < early; ++k) {
    if (ring.begin()) fetch_weight(k);
    ring.advance();
  }
  wait_for_previous();
  ring = Ring(smem + RING, bar);
  for (Tiles tiles(rows); tiles.valid(); tiles.advance())
    for (int part = 0; part < ROW_BLOCKS; ++part)
      for (int k = 0; k < blocks; ++k) {
        const int row = tiles.tile * TILE_ROWS + 64 * part;
        if (tiles.round > 0 || part > 0 || k >= early) {
          if (ring.begin()) fetch_weight(k), fetch_rows(k, row);
        } else if (elected()) {
          fetch_rows(k, row);
        }
        ring.advance();
        if (k > 0) continue;
        if (elected())
          for (int later = STAGES; later < APART * blocks; ++later) prefetch_2d(x, 64 * later, row);
        if (part == 0 && reads.a) prefetch_rows(reads.a, rows, tiles.tile);
        if (part == 0 && reads.b) prefetch_rows(reads.b, rows, tiles.tile);
      }
  let_next_start();
}

// One tile's products. Apart, the warpgroups take turns: a slot's barrier tells full from empty, not whose turn it is.
RL_D void multiply(float (&acc)[1][HELD / 2], int blocks, Ring& ring, const Place& me) {
  if (APART) begin_turn(me);
#pragma unroll 1
  for (int k = 0; k < blocks; ++k) {
    ring.wait();
    const u32 x = ring.address(), weight = x + X_BYTES + me.column() * 128;
    const u64 a = operand_k_major(x), b = BACKWARD ? operand_mn_major(weight, 8192) : operand_k_major(weight);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<HELD, 0, BACKWARD>(acc[0], further(a, step * 32), further(b, step * (BACKWARD ? 16 * 128 : 32)), true);
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();
      release(ring, 1, me);
    }
    ring.advance();
  }
  if (APART) end_turn(me);
  wgmma_wait<0>();
  wgmma_touch(acc[0]);
  release(ring, 1, me);
  if (APART) ring.skip(blocks);
}

template <class Join, class Ahead, class Finish>
RL_D void consume(const Join& join, u32 bias, int blocks, u32 smem, Barriers bar, const Place& me, Ahead ahead,
                  Finish finish) {
  Ring ring(smem + RING, bar);
  if (APART && me.group == 1) {
    ring.skip(blocks);
    end_turn(me);  // the first turn is warpgroup 0's
  }
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    const int row = tiles.tile * TILE_ROWS + (APART ? 64 * me.group : 0) + first_row(me);
    float acc[1][HELD / 2], v[OWN_ROWS][LANE];
    ahead.load(join, row, me);
    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias + 2 * me.column(), true, me);
    multiply(acc, blocks, ring, me);
    take_rows(v, acc);
    finish(v, ahead, row, tiles);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if BACKWARD
    project_backward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* r,
                     const u16* weight, const float* mean, const float* rstd, const u16* dresidual, u16* dr, u16* dbranch,
                     float* partials, i64 stride,
#else
    project_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* branch_bias,
                    const u16* residual, const u16* weight, const u16* bias, u16* r, u16* h, float* mean, float* rstd,
                    float eps,
#endif
                    const i64* seed_step, int rows, int blocks, u32 site, u32 threshold, float scale, int rows_per_sample,
                    int first_sample) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&x), prefetch_map(&w);
  begin(bar);
  if (me.group < 0) {
    registers_down<24>();
#if BACKWARD
    const Reads reads{r, RESIDUAL ? dresidual : nullptr};
#else
    const Reads reads{RESIDUAL ? residual : nullptr, nullptr};
#endif
    if (me.warp == 0) produce(&x, &w, reads, rows, blocks, smem, bar);
  } else {
    registers_up<240>();
    const u32 vectors = smem + VECTORS;  // scale of the norm; forward its shift and the branch's bias
    const int thread = threadIdx.x - 128;
#if BACKWARD
    copy_vectors<1>(vectors, weight, nullptr, nullptr, thread, [] {});
#else
    copy_vectors<3>(vectors, weight, NORM_BIAS ? bias : nullptr, BRANCH_BIAS ? branch_bias : nullptr, thread, [] {});
#endif
    wait_for_previous();
    const Mask mask = Mask::make(seed_step, site, threshold, scale, rows_per_sample, first_sample);
#if BACKWARD
    const JoinBackward join{r, dresidual, vectors, mean, rstd, dr, dbranch, partials, stride, rows, mask};
    consume(join, 0, blocks, smem, bar, me, Ahead{},
            [&](float (&v)[OWN_ROWS][LANE], const Ahead& ahead, int row, const Tiles& tiles) {
              own_columns(v, me);
              join_backward(join, v, ahead, row, smem + BRANCH_SUMS + (APART ? me.group * SUMS_BYTES : 0),
                            smem + STATISTICS + (tiles.round & 1) * STATISTICS_BYTES,
                            ROW_BLOCKS * tiles.tile + (APART ? me.group : 0), me);
            });
#else
    const JoinForward join{residual, vectors, vectors + VECTOR_BYTES, r, h, mean, rstd, eps, rows, mask, smem + STATISTICS};
    consume(join, vectors + 2 * VECTOR_BYTES, blocks, smem, bar, me, Residual{},
            [&](float (&v)[OWN_ROWS][LANE], Residual& ahead, int row, const Tiles& tiles) {
              JoinForward of_tile = join;
              if (RMS) of_tile.statistics -= (tiles.round & 1) * STATISTICS_BYTES;  // one sum a tile: the other area by turns
              join_forward(of_tile, v, ahead, row, me);
            });
#endif
  }
}
