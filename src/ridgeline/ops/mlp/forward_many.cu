// An MLP's forward pass with the join behind it, for many rows of width 256 and bf16, for sm_90a:
//   u = h Wupᵀ + b,  a = gelu(u) and GELU's derivative in codes, written;  r = residual + a Wdownᵀ + b, rounded;  h = norm(r).
//
// A tile is 128 rows, a block five warpgroups. Two make the hidden layer, 64 rows each and 64 inner columns at a time, in
// shared memory; two multiply it by down's weights, 64 whole rows each in their accumulators, and make the join; the fifth
// starts copies. So the hidden layer is written and never read, its GELU runs beside products, and under the join up's
// products go on until both slots for the hidden layer are full. Two blocks of a cluster take tiles one below the other and
// fetch weights by turns for both.
//
// The residual is added among the products, 64 columns at a time, through the two slots that the results leave by: what
// becomes of a row is in the accumulators when the last product is done. Rows in shared memory lie as panels of 64 columns
// under the 128-byte swizzle (down's weights: 32 columns, 64 bytes); ldmatrix and stmatrix have them in the accumulators'
// order.
//
// Macros: RMS, NORM_BIAS, UP_BIAS, BRANCH_BIAS, GELU_TANH; UP_REGISTERS; DOWN_PIECES: 2 or 4.
#include "forward_many_up.cuh"

struct Downward {
  const TensorMap *r, *normed;
  float *mean, *rstd;
  float eps;
  int rows, chunks;
  u32 smem, vectors;
  Barriers bar;
  DownRing ring;
  Place me;       // group 2 or 3
  int taken = 0;  // chunks of the hidden layer

  // A warp's 16 rows × 64 columns in a slot of the stream, of which this lane has four 8 × 8 matrices of columns
  // 8 j … 8 j + 15 (j even): matrix 2 (j % 2) + h is row l / 4 + 8 h.
  RL_D u32 strip(int panel) const { return smem + STREAM + panel % 2 * PANEL_BYTES + (me.group - 2) * GROUP_BYTES + me.warp * 2048; }
  RL_D u32 matrices(int j) const {
    return strip(j / 8) + me.lane % 16 * 128 + ((j % 8 * 16) ^ ((me.lane / 16 ^ me.lane % 8) << 4));
  }
  RL_D u32 vector(int which, int j) const { return load_shared_u32(vectors + which * VECTOR_BYTES + 16 * j + 4 * (me.lane % 4)); }

  // The products that were begun last are done: what they read is free, with the hidden layer's slot where they end it.
  RL_D void release(int slot, bool ends) {
    if (me.lane != 0) return;
    ring.release(slot);
    if (ends) barrier_arrive(bar.hidden_empty((taken & 1) ^ 1, me.group - 2));
  }
  // acc += 64 inner columns, piece by piece.
  RL_D void multiply(float (&acc)[WIDTH / 2], int from, int to, int round) {
    int last = -1;  // a slot whose products are under way
#pragma unroll 1
    for (int chunk = from; chunk < to; ++chunk) {
#pragma unroll
      for (int piece = 0; piece < DOWN_PIECES; ++piece) {
        const bool ready = last < 0 || (ring.ready() && (piece || warp_uniform(barrier_ready(bar.hidden_full(taken & 1, me.group - 2), taken >> 1 & 1))));
        if (!ready) {  // what is done is free as soon as that, not behind the next products
          wgmma_wait<0>();
          release(last, piece == 0);
          last = -1;
        }
        ring.wait();
        if (piece == 0) barrier_wait(bar.hidden_full(taken & 1, me.group - 2), taken >> 1 & 1);
        const u64 a = operand_k_major(smem + HIDDEN + (taken & 1) * PANEL_BYTES + (me.group - 2) * GROUP_BYTES) + 4 * (piece / 2);  // 32 inner columns
        const u64 b = DOWN_PIECES == 4 ? operand_k_major_64(ring.address()) : operand_k_major(ring.address());
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8 / DOWN_PIECES; ++step)
          wgmma<WIDTH / 2, 0, 0>(*reinterpret_cast<float(*)[64]>(acc + 64 * (piece % 2)), a + 2 * step, b + 2 * step, true);
        wgmma_commit();
        if (last >= 0) {
          wgmma_wait<1>();
          release(last, piece == 0);
        }
        last = ring.slot;
        ring.advance();
      }
      ++taken;
      if (chunk == 0 && round > 0 && me.lane == 0) {  // the tile before has left
        store_wait_read<0>();
        barrier_arrive(bar.stream_empty(0));
        barrier_arrive(bar.stream_empty(1));
      }
    }
    wgmma_wait<0>();
    wgmma_touch(acc);
    if (last >= 0) release(last, true);
  }

  // acc += residual + bias, 64 columns of them.
  RL_D void add_residual(float (&acc)[WIDTH / 2], int panel) {
    barrier_wait(bar.stream_full(panel % 2), panel / 2);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      if (j / 8 != panel) continue;
      u32 x[4];
      load_matrices(x, matrices(j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* v = acc + 4 * (j + i / 2) + 2 * (i % 2);
        const u32 bias = BRANCH_BIAS ? vector(2, j + i / 2) : 0;
        v[0] += pair_low(x[i]) + pair_low(bias);
        v[1] += pair_high(x[i]) + pair_high(bias);
      }
    }
    if (panel >= 2) return;  // results leave from there
    fence_async();           // an arrival may overtake the reads
    sync_warp();
    if (me.lane == 0) barrier_arrive(bar.stream_empty(panel));
  }

  // 64 columns leave once what left from the slot before has.
  RL_D void begin_panel(int panel) const {
    if (me.lane == 0) store_wait_read<1>();
    sync_warp();
  }
  RL_D void send_panel(const TensorMap* map, int panel, int row) const {
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store_2d(map, strip(panel), 64 * panel, row);
      store_commit();
    }
  }

  // acc holds r.
  RL_D void join(float (&acc)[WIDTH / 2], int row) const {
    float mean[2] = {}, scale[2];
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
      if (panel >= 2) begin_panel(panel);
#pragma unroll
      for (int j = 8 * panel; j < 8 * panel + 8; j += 2) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* v = acc + 4 * (j + i / 2) + 2 * (i % 2);
          x[i] = pack_pair(v[0], v[1]);
          v[0] = pair_low(x[i]), v[1] = pair_high(x[i]);
          mean[i % 2] += v[0] + v[1];
        }
        store_matrices(matrices(j), x[0], x[1], x[2], x[3]);
      }
      send_panel(r, panel, row);
    }
    centre(acc, mean, scale, eps, this->mean, rstd, row, rows, me.lane);
#pragma unroll
    for (int panel = 0; panel < 4; ++panel) {
      begin_panel(panel);
#pragma unroll
      for (int j = 8 * panel; j < 8 * panel + 8; j += 2) {
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* v = acc + 4 * (j + i / 2) + 2 * (i % 2);
          const u32 w = vector(0, j + i / 2), s = NORM_BIAS ? vector(1, j + i / 2) : 0;
          out[i] = pack_pair(fmaf(v[0] * scale[i % 2], pair_low(w), pair_low(s)), fmaf(v[1] * scale[i % 2], pair_high(w), pair_high(s)));
        }
        store_matrices(matrices(j), out[0], out[1], out[2], out[3]);
      }
      send_panel(normed, panel, row);
    }
  }

  RL_D void run() {
    float acc[WIDTH / 2];
    for (Tiles tiles(rows, me.rank); tiles.valid(); tiles.advance()) {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) acc[i] = 0.f;
      wgmma_touch(acc);
#pragma unroll 1
      for (int panel = 0; panel < 4; ++panel) {
        multiply(acc, ceil_div(chunks * panel, 4), ceil_div(chunks * (panel + 1), 4), tiles.round);
        add_residual(acc, panel);
      }
      join(acc, tiles.row() + 64 * (me.group - 2) + 16 * me.warp);
    }
    if (me.lane == 0) store_wait<0>();
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(640, 1)
    forward_many(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap down,
                 const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap residual,
                 const __grid_constant__ TensorMap r, const __grid_constant__ TensorMap normed, const u16* matrix, const u16* up_bias, u8* codes,
                 const u16* weight, const u16* shift, const u16* bias, float* mean, float* rstd, float eps, int rows, int inner) {
  const u32 smem = dynamic_smem(), vectors = smem + VECTORS;
  const Barriers bar{smem + BARRIERS};
  const int thread = threadIdx.x, chunks = ceil_div(inner, CHUNK);
  const Place me = Place::here();
  const UpRing up_ring(smem + UP, bar.ring(false), me.rank);
  const DownRing down_ring(smem + DOWN, bar.ring(true), me.rank);
  if (thread == 0) {
    prefetch_map(&h), prefetch_map(&up), prefetch_map(&down), prefetch_map(&residual);
    bar.init();
    up_ring.init(8), down_ring.init(8);
    barrier_init_fence();
  }
  if (me.group == 2) copy_vectors(vectors, weight, NORM_BIAS ? shift : nullptr, BRANCH_BIAS ? bias : nullptr, thread % 128);
  sync_block();
  cluster_sync();
  wait_for_previous();
  let_next_start();
  if (me.group < 0) {
    registers_down<24>();
    if (me.warp == 0) produce_up(&up, rows, chunks, up_ring, me.rank);
    if (me.warp == 1) produce_down(&down, rows, chunks, down_ring, me.rank);
    if (me.warp == 2) produce_rows(&h, matrix, &residual, rows, smem, bar, me);
    if (me.warp == 3) deliver(&a, rows, chunks, smem, bar, me.rank);
  } else if (me.group < 2) {
    registers_down<UP_REGISTERS>();
    const int quarter = me.lane / 8;
    Upward up_half{smem, bar, up_ring, up_bias, codes + WARP_CODES * me.warp, inner, rows, me,
                   smem + HIDDEN + me.group * GROUP_BYTES + swizzle128(me.lane % 8 + 8 * (quarter / 2), 2 * me.warp + quarter % 2)};
    up_half.run(Cursor(rows, chunks, me.rank));
  } else {
    registers_up<160>();
    Downward down_half{&r, &normed, mean, rstd, eps, rows, chunks, smem, vectors, bar, down_ring, me};
    down_half.run();
  }
  sync_warp();
  cluster_leave();
}
