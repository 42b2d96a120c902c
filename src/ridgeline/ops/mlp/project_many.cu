// A product whose result is 256 columns wide, with the join on either side of it, for many rows, for sm_90a:
//   forward   (BACKWARD 0)  r = residual + x Wᵀ + b, rounded; h = norm(r);                          W [256, K]
//   backward  (BACKWARD 1)  dh = dy W, dr = dresidual + norm'(dh), sums for the norm's weights;     W [K, 256]
//
// A tile is 128 rows, 64 a warpgroup, which holds them whole: what a product and a join apart write and read again between
// them, a matrix of 256 columns, stays in registers, and weights come once for 128 rows. Two blocks of a cluster take
// tiles one below the other and fetch half of the weights for both.
//
// The ring's slots hold 64 of K: rows of x and the weights. Backward, two more follow behind a tile's last one, a warpgroup's
// dresidual each. What a row is normed from (r, forward the residual) has memory of its own, so that it comes under the
// products, and results leave from there: forward r, then h; backward dr. They leave under the next tile's products. Rows in
// shared memory lie as panels of 64 columns under the 128-byte swizzle; ldmatrix hands them out in the order of the
// accumulators.
//
// Macros: BACKWARD, STAGES, RMS, NORM_BIAS (backward: its sums are wanted), forward BRANCH_BIAS, NORMED (h is wanted).
#include "many_join.cuh"
#include "project_many.cuh"

// One lane of a warp: the results of the tile before have left shared memory.
RL_D void release_held(Barriers bar, const Place& me) {
  store_wait_read<0>();
  barrier_arrive(bar.held_empty(me.group));
}

// acc = A · weight, forward with the branch's bias (`vectors`' third). Meanwhile the tile before, if any, leaves.
RL_D void multiply(float (&acc)[WIDTH / 2], int chunks, int round, u32 vectors, Ring& ring, const Place& me) {
  int last = -1;  // a slot whose products are under way
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    u32 bias = 0;
    if (BRANCH_BIAS) bias = load_shared_u32(vectors + 2 * VECTOR_BYTES + 16 * j + 4 * (me.lane % 4));
    acc[4 * j] = acc[4 * j + 2] = pair_low(bias);
    acc[4 * j + 1] = acc[4 * j + 3] = pair_high(bias);
  }
  wgmma_touch(acc);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (last >= 0 && !ring.ready()) {  // the slot before is free as soon as its products are done, not behind the next ones
      wgmma_wait<0>();
      if (me.lane == 0) ring.release(last);
      last = -1;
    }
    ring.wait();
    const u64 a = operand_k_major(ring.address() + me.group * PANEL_BYTES);
    const u64 b = BACKWARD ? operand_mn_major(ring.address() + A_BYTES, PANEL_BYTES) : operand_k_major(ring.address() + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)  // an operand's address is in units of 16 bytes
      wgmma<WIDTH, 0, BACKWARD>(acc, a + step * 2, b + step * (BACKWARD ? 128 : 2), true);
    wgmma_commit();
    if (last >= 0) {
      wgmma_wait<1>();
      if (me.lane == 0) ring.release(last);
    }
    if (chunk == 0 && round > 0 && me.lane == 0) release_held(ring.bar, me);
    last = ring.slot;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_touch(acc);
  if (me.lane == 0) ring.release(last);
}

// The warpgroup's own slot of the two behind a tile's last, which has come; the other's is free as far as it is concerned.
RL_D Ring own_slot(Ring& ring, const Place& me) {
  Ring own = ring;
  for (int group = 0; group < 2; ++group, ring.advance()) {
    ring.wait();
    if (group == me.group) own = ring;
    else if (me.lane == 0) ring.release(ring.slot);
  }
  return own;
}

struct Forward {
  const TensorMap *r, *h;
  float *mean, *rstd;
  float eps;
};

// acc holds the branch.
RL_D void join(float (&acc)[WIDTH / 2], const Forward& p, u32 vectors, int row, int rows, int round, u32 smem, Barriers bar,
               const Place& me) {
  const Lines held(smem + HELD + me.group * ROWS_BYTES, me);
  const u32 weight = vectors + 4 * (me.lane % 4), shift = weight + VECTOR_BYTES;
  float mean[2] = {};
  barrier_wait(bar.held_full(me.group), round & 1);
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    u32 x[4];
    load_matrices(x, held.at(j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* v = acc + 4 * (j + i / 2) + 2 * (i % 2);
      x[i] = pack_pair(v[0] + pair_low(x[i]), v[1] + pair_high(x[i]));
      v[0] = pair_low(x[i]), v[1] = pair_high(x[i]);
      mean[i % 2] += v[0] + v[1];
    }
    store_matrices(held.at(j), x[0], x[1], x[2], x[3]);
    held.send(j, me, [&](u32 from, int column) { store_2d(p.r, from, column, row + 16 * me.warp); });
  }
  float rstd[2];
  centre(acc, mean, rstd, p.eps, p.mean, p.rstd, row + 16 * me.warp, rows, me.lane);
  if (!NORMED) return;
  if (me.lane == 0) store_wait_read<0>();  // r has left
  sync_warp();
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* v = acc + 4 * (j + i / 2) + 2 * (i % 2);
      const u32 w = load_shared_u32(weight + 16 * (j + i / 2)), s = NORM_BIAS ? load_shared_u32(shift + 16 * (j + i / 2)) : 0;
      out[i] = pack_pair(fmaf(v[0] * rstd[i % 2], pair_low(w), pair_low(s)), fmaf(v[1] * rstd[i % 2], pair_high(w), pair_high(s)));
    }
    store_matrices(held.at(j), out[0], out[1], out[2], out[3]);
    held.send(j, me, [&](u32 from, int column) { store_2d(p.h, from, column, row + 16 * me.warp); });
  }
}

// acc holds dh.
RL_D void join(float (&acc)[WIDTH / 2], float (&sums)[KINDS][8], const Statistics& s, const Backward& p, u32 vectors, int row,
               int round, u32 smem, Ring& ring, Barriers bar, const Place& me) {
  const Lines held(smem + HELD + me.group * ROWS_BYTES, me);
  barrier_wait(bar.held_full(me.group), round & 1);
  float plain[2] = {};
  const Line line = sum_rows<false>(acc, plain, s, vectors, held, held, me,
                                    [&](int kind, int i, float sum) { sums[kind][i] += sum; });
  const Ring own = own_slot(ring, me);
  finish_rows<false, 0, 32>(acc, line, s, held, Lines(own.address(), me), me,
                     [&](u32 from, int column) { store_2d(p.dr, from, column, row + 16 * me.warp); });
  if (me.lane == 0) own.release(own.slot);
}

// The block's sums, its warps' added in a fixed order, where the last rows were held.
RL_D void write_sums(const float (&sums)[KINDS][8], const Backward& p, u32 smem, const Place& me) {
  const u32 area = smem + HELD, mine = area + (4 * me.group + me.warp) * KINDS * WIDTH * 4;
  if (me.lane == 0) store_wait_read<0>();
  named_barrier<256>(1);
#pragma unroll
  for (int kind = 0; kind < KINDS; ++kind)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_shared(mine + (kind * WIDTH + 32 * i + sum_column(me)) * 4, sums[kind][i]);
  named_barrier<256>(1);
  const int column = 128 * me.group + 32 * me.warp + me.lane;
#pragma unroll
  for (int kind = 0; kind < KINDS; ++kind) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) sum += load_shared(area + ((warp * KINDS + kind) * WIDTH + column) * 4);
    p.partials[blockIdx.x * p.stride + kind * WIDTH + column] = sum;
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
#if BACKWARD
    project_many_backward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                          const __grid_constant__ TensorMap held, const __grid_constant__ TensorMap beside,
                          const __grid_constant__ TensorMap dr, const u16* weight, const float* mean, const float* rstd,
                          float* partials, i64 stride, int rows, int chunks) {
#else
    project_many_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                         const __grid_constant__ TensorMap held, const __grid_constant__ TensorMap r,
                         const __grid_constant__ TensorMap h, const u16* weight, const u16* shift, const u16* bias,
                         float* mean, float* rstd, float eps, int rows, int chunks) {
#endif
  const u32 smem = dynamic_smem(), vectors = smem + VECTORS;
  const Barriers bar{{smem + BARRIERS}};
  const int thread = threadIdx.x;
  const Place me = Place::here();
  if (thread == 0) {
    prefetch_map(&x), prefetch_map(&w), prefetch_map(&held);
    bar.init();
  }
#if BACKWARD
  if (me.group == 0) copy_vectors(vectors, weight, nullptr, nullptr, thread - 128);
  const Maps maps{&x, &w, &held, &beside};
#else
  if (me.group == 0) copy_vectors(vectors, weight, NORM_BIAS ? shift : nullptr, BRANCH_BIAS ? bias : nullptr, thread - 128);
  const Maps maps{&x, &w, &held, nullptr};
#endif
  sync_block();
  cluster_sync();
  wait_for_previous();
  let_next_start();
  if (me.group < 0) {
    registers_down<24>();
    const Ring ring(smem, bar, me.rank);
    if (me.warp == 0) produce_weights(maps, rows, chunks, ring);
    if (me.warp == 1) produce_held(maps, rows, smem, bar, me.rank);
    if (me.warp == 2) produce_rows(maps, rows, chunks, ring);
  } else {
    registers_up<240>();
    Ring ring(smem, bar, me.rank);
    float acc[WIDTH / 2];
#if BACKWARD
    const Backward p{&dr, mean, rstd, partials, stride};
    float sums[KINDS][8] = {};
#else
    const Forward p{&r, &h, mean, rstd, eps};
#endif
    for (Tiles tiles(rows, me.rank); tiles.valid(); tiles.advance()) {
      const int row = tiles.row() + 64 * me.group;
#if BACKWARD
      Statistics statistics;
      statistics.load(mean, rstd, row + 16 * me.warp + me.lane / 4, 8, rows);
      multiply(acc, chunks, tiles.round, vectors, ring, me);
      statistics.finish();
      join(acc, sums, statistics, p, vectors, row, tiles.round, smem, ring, bar, me);
#else
      multiply(acc, chunks, tiles.round, vectors, ring, me);
      join(acc, p, vectors, row, rows, tiles.round, smem, bar, me);
#endif
    }
#if BACKWARD
    write_sums(sums, p, smem, me);
#endif
    if (me.lane == 0) store_wait<0>();
  }
  sync_warp();
  cluster_leave();
}
