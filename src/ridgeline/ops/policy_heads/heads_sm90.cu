// One head of a policy over all rows, forward and back at once, for sm_90a; the algebra is in triton.py. bf16 or fp16 in
// memory and as operands, fp32 in registers.
//
//   p → v = r (p + B l − μ s), u = v + c, a = gelu(u), logits = a W2ᵀ + b2, loss, dl → q = r (dl W2) gelu'(u) in p's place
//
// A consumer warpgroup takes 64 rows, 32 inner columns at a time; gelu' waits in shared memory from the logits to the
// gradients, and what the rows' α and β need of it comes by products with W2 beside the logits. A fourth warpgroup sums what the weights' gradients need of a head alone, aᵀ dl and
// qᵀ [l | μ | 1 / r], over the block's rows, so that a and dl never leave the chip. The first warps of the first warpgroup
// start the copies.
//
// Two consumer warps share a scheduler, so what counts is how much of a warp's own work goes side by side: the columns are
// few enough that ptxas, which otherwise saves registers, interleaves their chains, and the loops stay loops.
//
// Macros (see hopper.py): INNER: inner columns, a multiple of 16. WIDTH: of the state. V: classes. E: logits that are heard
//   (0: this is the first head, which leaves mean and squares of the state). HEARD: a later head hears these logits.
//   TARGET_BYTES, TARGET_SIGNED: the targets' integers. CLASS_AT, LOSS_AT: columns of the sums over rows.
#include "heads_rows.cuh"

RL_D void load_p(const Problem& p, u32 smem, Barriers bar, int group, int chunk, int row) {
  barrier_expect(bar.p_full(group, chunk), TILE_BYTES);
  copy_2d(p_tile(smem, group, chunk), p.p, chunk * 64, row, bar.p_full(group, chunk));
}
// What the first tiles need, asked for before the block meets.
RL_D void load_first(const Problem& p, u32 smem, Barriers bar) {
  barrier_expect(bar.weights(), CHUNKS * (DOWN_BYTES + B_BYTES));
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    copy_2d(smem + DOWN + chunk * DOWN_BYTES, p.down, chunk * 64, 0, bar.weights());
    if (E > 0) copy_2d(smem + EARLIER + chunk * B_BYTES, p.earlier, chunk * 64, 0, bar.weights());
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
      if (const Tiles tiles(group); tiles.valid(p)) load_p(p, smem, bar, group, chunk, tiles.row());
  }
}

// Lane 0 of a warp moves a consumer's tiles of q out and of p in.
RL_D void carry(const Problem& p, u32 smem, Barriers bar, int group) {
  const auto send = [&](int chunk, u32 phase, int row) {
    barrier_wait(bar.q_ready(group, chunk), phase);
    store_2d(p.p, p_tile(smem, group, chunk), chunk * 64, row);
    store_commit();
  };
  Tiles tiles(group);
#pragma unroll 1
  while (tiles.valid(p)) {
    const u32 phase = tiles.round & 1;
    const int row = tiles.row();
    tiles.advance();
#pragma unroll 1
    for (int chunk = 0; chunk <= CHUNKS; ++chunk) {  // p comes a chunk behind q: the store has read its place by then
      if (chunk < CHUNKS) send(chunk, phase, row);
      if (chunk == 0 || !tiles.valid(p)) continue;
      if (chunk < CHUNKS) store_wait_read<1>();
      else store_wait_read<0>();
      barrier_wait(bar.q_done(group, chunk - 1), phase);
      load_p(p, smem, bar, group, chunk - 1, tiles.row());
    }
  }
  store_wait_read<0>();
}

// Of 512 for four warpgroups: what the sums need, and the rest for the rows.
constexpr int SUM_REGISTERS = round_up(CHUNKS * (V_COLUMNS + SIDE_COLUMNS) / 2 + 28, 8), COPY_REGISTERS = 24;
constexpr int ROW_REGISTERS = (512 - COPY_REGISTERS - SUM_REGISTERS) / 16 * 8;
template <int COUNT>
RL_D void set_registers() {
  if constexpr (COUNT < 128) registers_down<COUNT>();
  else registers_up<COUNT>();
}

// aᵀ dl and qᵀ side over the block's tiles.
RL_D void sum_gradients(const Problem& p, u32 smem, Barriers bar, int warp, int lane) {
  float down[CHUNKS][V_COLUMNS / 2], side[CHUNKS][SIDE_COLUMNS / 2];
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    for (float& x : down[chunk]) x = 0.f;
    for (float& x : side[chunk]) x = 0.f;
  }
  const auto release = [&](u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  Tiles tiles[GROUPS] = {Tiles(0), Tiles(1)};
  for (; tiles[0].valid(p); tiles[0].advance(), tiles[1].advance())
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if (!tiles[group].valid(p)) continue;
      const u32 phase = tiles[group].round & 1, narrow = narrow_tile(smem, group);
      barrier_wait(bar.narrow_ready(group), phase);
      wgmma_fence();
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<V_COLUMNS, 1, 1>(down[chunk], operand_mn_major(a_tile(smem, group, chunk) + 2048 * k, 0),
                                 operand_mn_major(narrow + 2048 * k, 0), 1);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) wgmma_touch(down[chunk]);
      release(bar.a_free(group));
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        barrier_wait(bar.q_ready(group, chunk), phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<SIDE_COLUMNS, 1, 1>(side[chunk], operand_mn_major(p_tile(smem, group, chunk) + 2048 * k, 0),
                                    operand_mn_major(narrow + 2 * V_COLUMNS + 2048 * k, 0), 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_touch(side[chunk]);
        release(bar.q_done(group, chunk));
      }
      release(bar.narrow_free(group));
    }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int inner = 64 * chunk + 16 * warp + (lane >> 2) + 8 * h;
      if (inner >= INNER) continue;
      float* out = p.gradients + inner * NARROW + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < V_COLUMNS / 8; ++j)
        store_global_8(out + 8 * j, as_bits(down[chunk][4 * j + 2 * h]), as_bits(down[chunk][4 * j + 2 * h + 1]));
#pragma unroll
      for (int j = 0; j < SIDE_COLUMNS / 8; ++j)
        store_global_8(out + V_COLUMNS + 8 * j, as_bits(side[chunk][4 * j + 2 * h]), as_bits(side[chunk][4 * j + 2 * h + 1]));
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    head(const __grid_constant__ TensorMap map_p, const __grid_constant__ TensorMap map_down,
         const __grid_constant__ TensorMap map_earlier, const u16* x, u16* heard, float* state, float* slopes, float* sums,
         float* gradients, const void* targets, const float* s, const float* c, const u16* down_bias, int rows,
         int target_stride, int heard_stride, int sums_stride, int gradients_stride, float eps) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const int role = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const Problem p{&map_p, &map_down, &map_earlier, x, heard, state, slopes,
                  sums + static_cast<i64>(blockIdx.x) * (4 * GROUPS) * sums_stride,
                  gradients + static_cast<i64>(blockIdx.x) * gradients_stride, targets, s, c, down_bias, rows, target_stride,
                  heard_stride, sums_stride, eps};
  if (threadIdx.x == 0) {
    prefetch_map(p.p);
    barrier_init(bar.weights(), 1);
    for (int i = 0; i < GROUPS * CHUNKS; ++i) {
      barrier_init(bar.p_full(0, i), 1);
      barrier_init(bar.q_ready(0, i), 4);
      barrier_init(bar.q_done(0, i), 4);
    }
    for (int i = 0; i < 3 * GROUPS; ++i) barrier_init(bar.narrow_ready(i), 4);
    barrier_init_fence();
  }
  wait_for_previous();
  let_next_start();
  if (threadIdx.x == 0) load_first(p, smem, bar);
  for (int column = threadIdx.x; column < CHUNKS * 64; column += 512)
    store_shared_8(smem + VECTORS + 8 * column, column < INNER ? as_bits(s[column]) : 0,
                   column < INNER ? as_bits(c[column]) : 0);
  if (threadIdx.x < V_COLUMNS)
    store_shared_4(smem + BIAS + 4 * threadIdx.x, as_bits(threadIdx.x < V ? unpack_one(down_bias[threadIdx.x]) : -infinite()));
  __syncthreads();
  if (role == 0) {
    set_registers<COPY_REGISTERS>();
    if (lane == 0 && warp < GROUPS) carry(p, smem, bar, warp);
  } else if (role <= GROUPS) {
    set_registers<ROW_REGISTERS>();
    Consumer(p, smem, bar, role - 1, warp, lane).consume();
  } else {
    set_registers<SUM_REGISTERS>();
    sum_gradients(p, smem, bar, warp, lane);
  }
}
