// D = epilogue(A[M, K] · B[N, K]ᵀ) for sm_90a: 16-bit operands, fp32 accumulators, any M, N and K; rows of every matrix
// start at multiples of 16 bytes.
//
// One producer warp feeds shared memory through the bulk copy engine; two consumer warpgroups take whole output tiles in
// turn, so that one's epilogue runs under the other's products.
//
// Macros (a configuration is a set of them, see gemm.py):
//   TILE_M 64 or 128, TILE_N 64, 128 or 256: a warpgroup's output tile. STAGES: ring slots.
//   K_CHUNKS: ceil(K / 64). B_TRANSPOSED: B is given as [K, N].
//   EPILOGUE: 0 D = acc (+ bias)   1 D = gelu(acc + bias), U = gelu'(acc + bias)   2 D = C + dropout(acc + bias)
//             3 D = acc · C, with column sums of D   4 D = factor · acc + α + β C, with a row's α and β
//   HAS_BIAS, GELU_TANH and STORE_U (epilogue 1), DROPOUT (epilogue 2).
//   Slopes (U, and C of epilogue 3) are in half precision, whatever the rest is in; or with CODED in 8 bits in an order
//   of the kernel's own (slope_codes.cuh).
#include "gemm_epilogue.cuh"

RL_D void load_b(const Problem& p, u32 destination, int column, int chunk, u32 barrier) {
  if (B_TRANSPOSED) {
#pragma unroll
    for (int half = 0; half < N_HALVES; ++half)
      copy_2d(destination + half * BLOCK_K * ROW_BYTES, p.b, column + 64 * half, chunk * BLOCK_K, barrier);
  } else {
    copy_2d(destination, p.b, chunk * BLOCK_K, column, barrier);
  }
}

// A warp's work, one of whose lanes starts copies.
RL_D void produce(const Problem& p, Tiles tiles, u32 smem, Barriers bar) {
  int slot = 0;
  u32 phase = 0;
  for (; tiles.valid(); tiles.advance()) {
    const int column = tiles.column(), row = tiles.row();
    for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
      const u32 target = smem + slot * SLOT_BYTES, full = bar.full(slot);
      barrier_wait(bar.empty(slot), phase ^ 1);
      if (elected()) {
        barrier_expect(full, SLOT_BYTES);
        copy_2d(target, p.a, chunk * BLOCK_K, row, full);
        load_b(p, target + A_BYTES, column, chunk, full);
      }
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
  }
}

RL_D void release(Barriers bar, int slot, int lane) {
  if (lane == 0) barrier_arrive(bar.empty(slot));
}

// An operand descriptor's low word; byte offsets are added to it shifted right by 4. (Its high word is a constant.)
RL_D u32 operand_low(u32 address) {
  return static_cast<u32>(B_TRANSPOSED ? operand_mn_major(address, BLOCK_K * ROW_BYTES) : operand_k_major(address));
}
RL_D u64 operand(u32 low) { return static_cast<u64>(operand_k_major(0) >> 32) << 32 | low; }

// The products of one tile. `step` counts ring slots since the kernel began.
RL_D void multiply(float (&acc)[M_BLOCKS][TILE_N / 2], u32 smem, Barriers bar, int step, int group, int lane) {
  int slot = step % STAGES, last = 0;
  u32 phase = step / STAGES & 1;
  const u32 a_ring = static_cast<u32>(operand_k_major(smem)), b_ring = operand_low(smem + A_BYTES);
  for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
    barrier_wait(bar.full(slot), phase);
    const u32 a = a_ring + slot * (SLOT_BYTES / 16), b = b_ring + slot * (SLOT_BYTES / 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k)
#pragma unroll
      for (int i = 0; i < M_BLOCKS; ++i)
        wgmma<TILE_N, 0, B_TRANSPOSED>(acc[i], operand(a + i * (64 * ROW_BYTES / 16) + k * (32 / 16)),
                                       operand(b + k * ((B_TRANSPOSED ? 16 * ROW_BYTES : 32) / 16)), chunk + k > 0);
    wgmma_commit();
    if (chunk > 0) {
      wgmma_wait<1>();
      release(bar, last, lane);
    }
    last = slot;
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  named_arrive<256>(2 - group);  // the other warpgroup's turn
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < M_BLOCKS; ++i) wgmma_touch(acc[i]);
  release(bar, last, lane);
}

RL_D void consume(Consumer& me, Tiles tiles, const u16* bias, float* partials) {
  float acc[M_BLOCKS][TILE_N / 2];
  const Problem& p = me.p;
  if (EPILOGUE == 3)
    for (int j = 0; j < TILE_N / 8; ++j) me.sums[j][0] = me.sums[j][1] = 0.f;
  if (READS_C && me.group == 0 && tiles.valid() && elected())
#pragma unroll
    for (int i = 0; i < PANELS; ++i) me.fetch_c(0, i, tiles.column(), tiles.row());
  for (int tile = 0; tiles.valid(); ++tile) {
    const int column = tiles.column(), row = tiles.row();
    if (tiles.index == 0 && EPILOGUE != 3) me.load_bias(bias, column);
    Tiles next = tiles;
    next.advance();
    const bool last = next.index == 0;  // of this segment
    if ((tile & 1) == me.group) {
      // Products strictly take turns. A wait tells only odd phases from even ones, so a warpgroup may look at a slot's
      // barrier only once every earlier phase of it is over: once the other warpgroup has seen the tile before.
      named_barrier<256>(1 + me.group);
      multiply(acc, me.smem, me.bar, tile * K_CHUNKS, me.group, me.lane);
      if (READS_C) me.with_c(acc, column, row, tile >> 1 & 1, next);
      else me.linear(acc, column, row);
    }
    if (last && EPILOGUE == 3)
      me.write_sums(partials + static_cast<i64>((tiles.sums_row() * 2 + me.group) * 4 + me.warp) * p.n, column);
    tiles = next;
  }
  if (elected()) store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_c, const __grid_constant__ TensorMap map_d,
             const __grid_constant__ TensorMap map_u, const int4* schedule, int segments, const u16* bias, float* partials,
             const i64* seed_step, int n, u32 site, u32 threshold, float scale, int rows_per_sample,
             int first_sample, const float* factor, const float* terms, int m) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  Problem p{&map_a, &map_b, &map_c, &map_d, &map_u, n, terms, m, 1.f};
  const int group = warp_uniform(threadIdx.x / 128) - 1, warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    prefetch_map(p.d);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(bar.full(i), 1);
      barrier_init(bar.empty(i), 4);
    }
    for (int i = 0; i < 8 * PANELS; ++i) barrier_init(bar.c_full(0, 0, i), 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (EPILOGUE == 4) p.factor = *factor;
  const Tiles tiles(schedule + static_cast<i64>(blockIdx.x) * segments);
  if (group < 0) {
    registers_down<24>();
    if (warp == 0) produce(p, tiles, smem, bar);
  } else {
    registers_up<240>();
    Mask mask{};
    if (EPILOGUE == 2 && DROPOUT) {
      mask = {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, n / 4,
              first_sample};
    }
    Consumer me{p, mask, smem, bar, group, warp, lane};
    if (group == 1) named_arrive<256>(1);  // the first turn is warpgroup 0's
    consume(me, tiles, bias, partials);
  }
}
