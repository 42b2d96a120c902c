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

// A warp's 16 whole rows in an area of 64: where this lane finds four 8 × 8 matrices, of columns 8 j … 8 j + 15 (j even).
// A lane has of them what it has in acc[4 j …]: matrix 2 (j % 2) + h is row l / 4 + 8 h.
struct Lines {
  u32 start, base, turn;
  RL_D Lines(u32 area, const Place& me)
      : start(area + me.warp * 2048), base(start + (me.lane % 16) * 128), turn((me.lane / 16 ^ me.lane % 8) << 4) {}
  RL_D u32 at(int j) const { return base + j / 8 * PANEL_BYTES + ((j % 8 * 16) ^ turn); }
  // 64 columns of the rows leave, the ones that end with matrices 2 (j % 2), all written before by the whole warp.
  RL_D void send(const TensorMap* map, int j, int row, const Place& me) const {
    if (j % 8 != 6) return;
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store_2d(map, start + j / 8 * PANEL_BYTES, j / 8 * 64, row);
      store_commit();
    }
  }
};

// The four lanes of a row have its sum each.
RL_D float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

RL_D float half_of(u32 pair, int e) { return e ? pair_high(pair) : pair_low(pair); }

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
  float mean[2] = {}, squares[2] = {};
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
    held.send(p.r, j, row + 16 * me.warp, me);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) mean[h] = RMS ? 0.f : row_sum(mean[h]) * (1.f / WIDTH);
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) {
    acc[i] -= mean[i / 2 % 2];
    squares[i / 2 % 2] += acc[i] * acc[i];
  }
  float rstd[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rstd[h] = 1.f / sqrtf(row_sum(squares[h]) * (1.f / WIDTH) + p.eps);
    const int here = row + 16 * me.warp + me.lane / 4 + 8 * h;
    if (me.lane % 4 == 0 && here < rows) {
      if (!RMS) p.mean[here] = mean[h];
      p.rstd[here] = rstd[h];
    }
  }
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
    held.send(p.h, j, row + 16 * me.warp, me);
  }
}

struct Backward {
  const TensorMap* dr;
  const float *mean, *rstd;
  float* partials;  // [block][kind][column], rows `stride` apart
  i64 stride;
};

// 1 / σ and μ of this lane's rows, and −μ / σ, which is reckoned when both have come.
struct Statistics {
  float rstd[2], mean[2], shift[2];
  RL_D void load(const Backward& p, int row, int rows, const Place& me) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int here = row + 16 * me.warp + me.lane / 4 + 8 * h;
      rstd[h] = here < rows ? p.rstd[here] : 0.f;
      mean[h] = !RMS && here < rows ? p.mean[here] : 0.f;
    }
  }
  RL_D void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[h] = RMS ? 0.f : -mean[h] * rstd[h];
  }
};

// acc holds dh. `sums`, over all rows of the warp: of dh · normal and of dh, of column 32 i + 8 (l / 8) + 2 q + l / 4 % 2.
RL_D void join(float (&acc)[WIDTH / 2], float (&sums)[KINDS][8], const Statistics& s, const Backward& p, u32 vectors, int row,
               int round, u32 smem, Ring& ring, Barriers bar, const Place& me) {
  const Lines held(smem + HELD + me.group * ROWS_BYTES, me);
  const u32 weight = vectors + 4 * (me.lane % 4);
  float inner[2] = {}, plain[2] = {};
  barrier_wait(bar.held_full(me.group), round & 1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float scale[8] = {}, shift[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 4 * i + 2 * half;
      u32 x[4];
      load_matrices(x, held.at(j));
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int which = n / 4, h = n / 2 % 2, e = n % 2, column = 4 * half + 2 * which + e;
        const u32 w = load_shared_u32(weight + 16 * (j + which));
        float& d = acc[4 * (j + which) + 2 * h + e];
        const float normal = fmaf(half_of(x[2 * which + h], e), s.rstd[h], s.shift[h]);
        scale[column] += d * normal;
        shift[column] += d;
        d *= half_of(w, e);
        inner[h] += d * normal;
        plain[h] += d;
      }
    }
    sums[0][i] += column_sum(scale, me.lane);
    if (NORM_BIAS) sums[KINDS - 1][i] += column_sum(shift, me.lane);
  }
  float slope[2], offset[2];  // dr = dh'/ σ + slope · r + offset + dresidual
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float whole = row_sum(inner[h]) * (1.f / WIDTH) * s.rstd[h];
    slope[h] = -s.rstd[h] * whole;
    offset[h] = RMS ? 0.f : -s.shift[h] * whole - row_sum(plain[h]) * (1.f / WIDTH) * s.rstd[h];
  }
  const Ring own = own_slot(ring, me);
  const Lines beside(own.address(), me);
#pragma unroll
  for (int j = 0; j < 32; j += 2) {
    u32 x[4], out[4];
    load_matrices(x, held.at(j));
    load_matrices(out, beside.at(j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* d = acc + 4 * (j + i / 2) + 2 * (i % 2);
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        v[e] = fmaf(d[e], s.rstd[i % 2], fmaf(half_of(x[i], e), slope[i % 2], half_of(out[i], e) + offset[i % 2]));
      out[i] = pack_pair(v[0], v[1]);
    }
    store_matrices(held.at(j), out[0], out[1], out[2], out[3]);
    held.send(p.dr, j, row + 16 * me.warp, me);
  }
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
      store_shared(mine + (kind * WIDTH + 32 * i + 8 * (me.lane / 8) + 2 * (me.lane % 4) + me.lane / 4 % 2) * 4, sums[kind][i]);
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

// The norm's scale and forward its shift and the branch's bias, one after the other.
RL_D void copy_vectors(u32 vectors, const u16* weight, const u16* shift, const u16* bias, int thread) {
  const u16* sources[3] = {weight, shift, bias};
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (sources[i] && thread < WIDTH / 2)
      store_shared_u32(vectors + i * VECTOR_BYTES + 4 * thread, reinterpret_cast<const u32*>(sources[i])[thread]);
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
  const Barriers bar{smem + BARRIERS};
  const int thread = threadIdx.x;
  // The same for a whole warp, as the compiler has to know: operands' descriptors are made of it.
  const Place me{warp_uniform(thread / 128) - 1, warp_uniform(thread / 32 % 4), thread % 32, cluster_rank()};
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
      statistics.load(p, row, rows, me);
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
