// A product whose result is one row tile wide, and the join on either side of it, for sm_90a:
//   forward   (BACKWARD 0)  y = x Wᵀ + b, then the join: the output projection of attention;      W [C, K]
//   backward  (BACKWARD 1)  dh = dy W, then the gradient of the join before it: the QKV projection's; W [K, C]
//
// Macros: tile.cuh's, join.cuh's, BACKWARD.
#include "join.cuh"

using namespace rl;

constexpr int RING = 0, EXCHANGE = STAGES * SLOT_BYTES, BRANCH_SUMS = EXCHANGE + (SPLIT == 2 ? 2 * EXCHANGE_BYTES : 0);
constexpr int VECTORS = BRANCH_SUMS + (BACKWARD ? 2 * SUMS_BYTES : 0), BARRIERS = VECTORS + 3 * VECTOR_BYTES;

struct Reads {  // what the join reads of every row
  const u16 *a, *b;
};

RL_D void produce(const TensorMap* x, const TensorMap* weight, Reads reads, int rows, int first, int last, u32 smem,
                  Barriers bar) {
  Ring ring(smem + RING, bar);
  const auto fetch_weights = [&](int k) {
    for (int half = 0; half < HALVES; ++half) {
      if (BACKWARD) fetch_columns(ring, weight, 64 * k, 128 * half);
      else fetch_owned_rows(ring, weight, 64 * k, 128 * half);
    }
  };
  const int early = last - first < STAGES / (1 + HALVES) ? last : first + STAGES / (1 + HALVES);
  for (int k = first; k < early; ++k) {
    ring.advance();  // past the slot for rows of x
    fetch_weights(k);
  }
  begin_reading();
  ring = Ring(smem + RING, bar);
  for (Tiles tiles(rows); tiles.valid(); tiles.advance())
    for (int k = first; k < last; ++k) {
      ring.begin();
      copy_2d(ring.address(), x, 64 * k, tiles.tile * TILE_ROWS, bar.full(ring.slot));
      ring.advance();
      if (tiles.round > 0 || k >= early) {
        fetch_weights(k);
      } else {
        for (int half = 0; half < HALVES; ++half) ring.advance();
      }
      if (k == first && reads.a) prefetch_rows(reads.a, rows, tiles.tile);
      if (k == first && reads.b) prefetch_rows(reads.b, rows, tiles.tile);
    }
}

// One tile's products. Slots come as the rows of x, then each half of the weight's columns.
RL_D void multiply(float (&acc)[HALVES][64], int blocks, Ring& ring, const Place& me) {
#pragma unroll 1
  for (int k = 0; k < blocks; ++k) {
    u32 slots[1 + HALVES];
#pragma unroll
    for (int i = 0; i <= HALVES; ++i) {
      ring.wait();
      slots[i] = ring.address();
      ring.advance();
    }
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      product<BACKWARD>(acc[half], slots[0] + me.group * SLOT_BYTES / 2, slots[1 + half], true);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) wgmma_touch(acc[half]);
#pragma unroll
    for (int back = 1; back <= HALVES + 1; ++back) release(ring, back, me);
  }
}

template <class Join, class Ahead, class Load, class Finish>
RL_D void consume(const Join& join, u32 bias, int blocks, u32 smem, Barriers bar, const Place& me, Ahead ahead, Load load,
                  Finish finish) {
  Ring ring(smem + RING, bar);
  const u32 area = smem + EXCHANGE + me.group * EXCHANGE_BYTES;
  for (Tiles tiles(join.rows); tiles.valid(); tiles.advance()) {
    if (SPLIT == 2) let_peer_send(bar, me);
    const int row = tiles.tile * TILE_ROWS + 64 * me.group + first_row(me);
    float acc[HALVES][64], v[OWN_ROWS][LANE];
    if (SPLIT == 1) load(ahead, row);
    begin_sums<BRANCH_BIAS && !BACKWARD>(acc, bias, me);
    multiply(acc, blocks, ring, me);
    if (SPLIT == 2) exchange(v, acc, area, bar, tiles.round & 1, me, [&] { load(ahead, row); });
    else take_rows(v, acc);
    finish(v, ahead, row, tiles.tile);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    CLUSTER_DIMENSIONS
#if BACKWARD
        project_backward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* r,
                         const u16* weight, const float* mean, const float* rstd, const u16* dresidual, u16* dr,
                         u16* dbranch, float* partials, i64 stride,
#else
        project_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const u16* branch_bias,
                        const u16* residual, const u16* weight, const u16* bias, u16* r, u16* h, float* mean, float* rstd,
                        float eps,
#endif
                        const i64* seed_step, int rows, int blocks, u32 site, u32 threshold, float scale,
                        int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Place me = Place::here();
  if (threadIdx.x == 0) prefetch_map(&x), prefetch_map(&w);
  begin(bar);
  const int share = ceil_div(blocks, SPLIT), first = me.split * share, last = first + share < blocks ? first + share : blocks;
  if (me.group < 0) {
    registers_down<40>();
#if BACKWARD
    const Reads reads{r, RESIDUAL ? dresidual : nullptr};
#else
    const Reads reads{RESIDUAL ? residual : nullptr, nullptr};
#endif
    if (threadIdx.x == 0) produce(&x, &w, reads, rows, first, last, smem, bar);
  } else {
    registers_up<232>();
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
    consume(
        join, 0, last - first, smem, bar, me, Ahead{}, [&](Ahead& ahead, int row) { ahead.load(join, row, me); },
        [&](float (&v)[OWN_ROWS][LANE], const Ahead& ahead, int row, int tile) {
          own_columns(v, me);
          join_backward(join, v, ahead, row, smem + BRANCH_SUMS + me.group * SUMS_BYTES,
                        (2 * tile + me.group) * SPLIT + me.split, me);
        });
#else
    struct Residual {
      uint4 row[GROUPS];
    };
    const JoinForward join{residual, vectors, vectors + VECTOR_BYTES, r, h, mean, rstd, eps, rows, mask};
    consume(
        join, vectors + 2 * VECTOR_BYTES, last - first, smem, bar, me, Residual{},
        [&](Residual& ahead, int row) { load_residual(ahead.row, join, row, me); },
        [&](float (&v)[OWN_ROWS][LANE], Residual& ahead, int row, int) { join_forward(join, v, ahead.row, row, me); });
#endif
  }
}
