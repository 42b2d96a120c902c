// Weight and bias gradients of several linear layers over the same rows in one launch, for sm_90a:
// dW_g[M, K] = dY_g[N, M]ᵀ · X_g[N, K] and db_g[M] = Σ_n dY_g[n, :], 16-bit operands, fp32 accumulators.
//
// A block takes a tile of 128 × TILE_N of one dW over a share of the rows and leaves fp32 partial sums; reduce.cu adds
// the shares in a fixed order. Two consumer warpgroups hold 64 × TILE_N each; both operands are read transposed.
// The bias gradient rides along as a product with a column of ones, in the blocks of the first column tile.
//
// At these sizes what limits is L2: a tile of 128 × 256 takes 48 bytes a cycle of it. PAIRED, two blocks of a cluster take
// two tiles one below the other over the same rows, and each fetches half of X's columns for both.
//
// Macros: TILE_N 64, 128 or 256; STAGES; PAIRED 0 or 1.
#include "smem.cuh"

using namespace rl;

constexpr int CHUNK = 64, ROW_BYTES = 128, SUBTILE = CHUNK * ROW_BYTES;  // 64 rows × 64 columns of an operand
constexpr int A_BYTES = 2 * SUBTILE, B_BYTES = TILE_N / 64 * SUBTILE, SLOT_BYTES = A_BYTES + B_BYTES;
constexpr int ONES = STAGES * SLOT_BYTES, BARRIERS = ONES + 1024;
constexpr int B_COPIES = TILE_N / 64 / (1 + PAIRED);  // of 64 columns, that a block fetches
static_assert(B_COPIES > 0, "a pair divides at least 128 columns");
#if PAIRED
#define CLUSTER_DIMENSIONS __cluster_dims__(2, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

struct FourMaps {
  TensorMap map[4];
};
struct alignas(8) Pair {
  float first, second;
};
struct Share {  // a block's work
  int problem, row, column;  // first row and column of the tile in dW
  int first, count;          // chunks of 64 rows of the operands
  int out, sums;             // where this share of dW (M × K) lies in `tiles`, and of db in `bias` (or -1: none)
  int M, K;
};

RL_D void produce(const FourMaps& dy, const FourMaps& x, const Share& share, u32 smem, u32 full, u32 empty) {
  int slot = 0;
  u32 phase = 0;
  const TensorMap *a = &dy.map[share.problem], *b = &x.map[share.problem];
  for (int chunk = share.first; chunk < share.first + share.count; ++chunk) {
    const u32 target = smem + slot * SLOT_BYTES, barrier = full + 8 * slot;
    barrier_wait(empty + 8 * slot, phase ^ 1);
    barrier_expect(barrier, SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy_2d(target + i * SUBTILE, a, share.row + 64 * i, chunk * CHUNK, barrier);
    const int half = PAIRED ? static_cast<int>(cluster_rank()) * B_COPIES : 0;
#pragma unroll
    for (int i = 0; i < B_COPIES; ++i) {
      const u32 place = target + A_BYTES + (half + i) * SUBTILE;
      const int column = share.column + 64 * (half + i);
      if (PAIRED) copy_2d_both(place, b, column, chunk * CHUNK, barrier);
      else copy_2d(place, b, column, chunk * CHUNK, barrier);
    }
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
}

// A warp has read a slot; where the other block of the pair writes into it too, that one is told as well.
RL_D void release(u32 empty, u32 peer_empty, int slot) {
  barrier_arrive(empty + 8 * slot);
  if (PAIRED) remote_free(peer_empty + 8 * slot);
}

template <bool BIAS>
RL_D void multiply(float (&acc)[TILE_N / 2], float (&sum)[4], const Share& share, u32 smem, u32 full, u32 empty, int group,
                   int lane) {
  int slot = 0, last = 0;
  u32 phase = 0;
  const u32 peer_empty = PAIRED ? remote_address(empty, cluster_rank() ^ 1) : 0;
  for (int chunk = 0; chunk < share.count; ++chunk) {
    barrier_wait(full + 8 * slot, phase);
    const u32 a = smem + slot * SLOT_BYTES + group * SUBTILE, b = smem + slot * SLOT_BYTES + A_BYTES;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {
      const u64 a_operand = operand_mn_major(a + k * 16 * ROW_BYTES, SUBTILE);
      wgmma<TILE_N, 1, 1>(acc, a_operand, operand_mn_major(b + k * 16 * ROW_BYTES, SUBTILE), chunk + k > 0);
      if (BIAS) wgmma<8, 1, 0>(sum, a_operand, operand_k_major(smem + ONES), chunk + k > 0);
    }
    wgmma_commit();
    if (chunk > 0) {
      wgmma_wait<1>();
      if (lane == 0) release(empty, peer_empty, last);
    }
    last = slot;
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  wgmma_wait<0>();
  wgmma_touch(acc);
  wgmma_touch(sum);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    CLUSTER_DIMENSIONS
        weight_gradients(const __grid_constant__ FourMaps dy, const __grid_constant__ FourMaps x, const Share* shares,
                         float* tiles, float* bias) {
  const u32 smem = dynamic_smem();
  const u32 full = smem + BARRIERS, empty = full + 8 * STAGES;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, PAIRED ? 16 : 8);
    }
    barrier_init_fence();
  }
  if (threadIdx.x / 32 == 1) {  // eight rows of 64 ones; any order of ones is right
    const u32 ones = pack_pair(1.f, 1.f), place = smem + ONES + lane * 16;
    store_matrices(place, ones, ones, ones, ones);
    store_matrices(place + 512, ones, ones, ones, ones);
    fence_async();
  }
  __syncthreads();
  if (PAIRED) cluster_sync();
  wait_for_previous();
  let_next_start();
  const Share share = shares[blockIdx.x];
  if (group < 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(dy, x, share, smem, full, empty);
  } else {
    registers_up<232>();
    float acc[TILE_N / 2], sum[4];
    if (share.sums >= 0) multiply<true>(acc, sum, share, smem, full, empty, group, lane);
    else multiply<false>(acc, sum, share, smem, full, empty, group, lane);
    const int first = share.row + 64 * group + 16 * warp + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + 8 * h;
      if (row >= share.M) continue;
      float* out = tiles + share.out + static_cast<i64>(row) * share.K;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; ++j) {
        const int column = share.column + 8 * j + 2 * (lane % 4);
        if (column + 1 < share.K && share.K % 2 == 0) {
          *reinterpret_cast<Pair*>(out + column) = {acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]};
        } else {
          if (column < share.K) out[column] = acc[4 * j + 2 * h];
          if (column + 1 < share.K) out[column + 1] = acc[4 * j + 2 * h + 1];
        }
      }
      if (share.sums >= 0 && lane % 4 == 0) bias[share.sums + row] = sum[2 * h];
    }
  }
  __syncwarp();
  if (PAIRED) cluster_sync();  // no block leaves while the other may still write to it
}
