// Weight and bias gradients of many linear layers over the same rows in one launch, for sm_90a:
// dW_g[M, K] (+)= dY_g[N, M]ᵀ · X_g[N, K] and db_g[M] (+)= Σ_n dY_g[n, :], 16-bit operands, fp32 accumulators.
//
// A block works through a list of shares: a tile of 128 × TILE_N of one dW over some of the rows. Over all rows the tile
// goes to its place; over fewer it is left as a partial sum, and reduce.cu adds those of a tile in a fixed order. Two consumer
// warpgroups hold 64 × TILE_N each; both operands are read transposed. The bias gradient rides along as a product with a
// column of ones, in the tiles of the first columns.
//
// At these sizes what limits is L2: a tile of 128 × 256 takes 48 bytes a cycle of it. PAIRED, two blocks of a cluster take
// two tiles one below the other over the same rows, and each fetches half of X's columns for both.
//
// With `squares`, a warp leaves there the sum of squares of all that it brings to its place.
//
// Macros: TILE_N 64, 128 or 256; STAGES; PAIRED 0 or 1; MAX_PROBLEMS.
#include "smem.cuh"
#include "squares.cuh"

using namespace rl;

constexpr int CHUNK = 64, ROW_BYTES = 128, SUBTILE = CHUNK * ROW_BYTES;  // 64 rows × 64 columns of an operand
constexpr int TILE_M = 128, A_BYTES = 2 * SUBTILE, B_BYTES = TILE_N / 64 * SUBTILE, SLOT_BYTES = A_BYTES + B_BYTES;
constexpr int ONES = STAGES * SLOT_BYTES, BARRIERS = ONES + 1024;
constexpr int B_COPIES = TILE_N / 64 / (1 + PAIRED);  // of 64 columns, that a block fetches
static_assert(B_COPIES > 0, "a pair divides at least 128 columns");
#if PAIRED
#define CLUSTER_DIMENSIONS __cluster_dims__(2, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

struct alignas(8) Pair {
  float first, second;
};
struct Problem {  // where a layer's gradients go
  void *weight, *bias;
  int M, K, pitch;  // elements from one row of dW to the next
  int how;          // of:
};
// add to dW, to db; dW is 16-bit, db is; dW is fp32, overwritten, and its even elements lie at multiples of 8 bytes
enum { ADD_WEIGHT = 1, ADD_BIAS = 2, HALF_WEIGHT = 4, HALF_BIAS = 8, PAIRS = 16 };
static_assert(sizeof(Problem) == 32, "the host packs problems");
struct Problems {
  TensorMap dy[MAX_PROBLEMS], x[MAX_PROBLEMS];
  Problem problem[MAX_PROBLEMS];
};
struct Share {               // some of a block's work
  int problem, row, column;  // first row and column of the tile in dW
  int first, count;          // chunks of 64 rows of the operands
  int part;                  // which partial sum this is, or -1: all there is
  int bias;                  // the bias's gradient is wanted too
};

struct Ring {
  u32 smem, full, empty, peer_empty;
  int slot;
  u32 phase;
  RL_D void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  RL_D u32 address() const { return smem + slot * SLOT_BYTES; }
  // A warp has read a slot; where the other block of the pair writes into it too, that one is told as well.
  RL_D void release(int which) const {
    barrier_arrive(empty + 8 * which);
    if (PAIRED) remote_free(peer_empty + 8 * which);
  }
};

RL_D void produce(const Problems& p, const Share& share, Ring& ring) {
  const TensorMap *a = &p.dy[share.problem], *b = &p.x[share.problem];
  const int half = PAIRED ? static_cast<int>(cluster_rank()) * B_COPIES : 0;
  for (int chunk = share.first; chunk < share.first + share.count; ++chunk) {
    const u32 target = ring.address(), barrier = ring.full + 8 * ring.slot;
    barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
    barrier_expect(barrier, SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy_2d(target + i * SUBTILE, a, share.row + 64 * i, chunk * CHUNK, barrier);
#pragma unroll
    for (int i = 0; i < B_COPIES; ++i) {
      const u32 place = target + A_BYTES + (half + i) * SUBTILE;
      const int column = share.column + 64 * (half + i);
      if (PAIRED) copy_2d_both(place, b, column, chunk * CHUNK, barrier);
      else copy_2d(place, b, column, chunk * CHUNK, barrier);
    }
    ring.advance();
  }
}

template <bool BIAS>
RL_D void multiply(float (&acc)[TILE_N / 2], float (&sum)[4], int count, Ring& ring, int group, int lane) {
  int last = 0;
  for (int chunk = 0; chunk < count; ++chunk) {
    barrier_wait(ring.full + 8 * ring.slot, ring.phase);
    const u64 a = operand_mn_major(ring.address() + group * SUBTILE, SUBTILE);
    const u64 b = operand_mn_major(ring.address() + A_BYTES, SUBTILE), ones = operand_k_major(ring.smem + ONES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < CHUNK / 16; ++k) {  // an operand's address is in units of 16 bytes
      wgmma<TILE_N, 1, 1>(acc, a + k * ROW_BYTES, b + k * ROW_BYTES, chunk + k > 0);
      if (BIAS) wgmma<8, 1, 0>(sum, a + k * ROW_BYTES, ones, chunk + k > 0);
    }
    wgmma_commit();
    if (chunk > 0) {
      wgmma_wait<1>();
      if (lane == 0) ring.release(last);
    }
    last = ring.slot;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_touch(acc);
  wgmma_touch(sum);
  if (lane == 0) ring.release(last);
}

RL_D void put(void* place, i64 at, float value, bool add, bool half) {
  if (half) {
    u16* to = static_cast<u16*>(place) + at;
    *to = pack_one(value + (add ? unpack_one(*to) : 0.f));
  } else {
    float* to = static_cast<float*>(place) + at;
    *to = value + (add ? *to : 0.f);
  }
}

// The tile to its place or, as partial sums, to a place of its own. The sum of squares of what goes to its place,
// without what that is added to.
RL_D float deliver(const float (&acc)[TILE_N / 2], const float (&sum)[4], const Problem& problem, const Share& share,
                  float* tiles, float* sums, int first, int lane) {
  const bool whole = share.part < 0;
  const int columns = problem.K - share.column;
  const bool pairs = !whole || problem.how & PAIRS;
  const bool add = problem.how & ADD_WEIGHT, half = problem.how & HALF_WEIGHT;
  float squares = 0.f;
  const auto note = [&](float value) { squares += value * value; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + 8 * h;
    if (share.row + row >= problem.M) continue;
    float* out = whole ? static_cast<float*>(problem.weight) + static_cast<i64>(share.row + row) * problem.pitch + share.column
                       : tiles + (static_cast<i64>(share.part) * TILE_M + row) * TILE_N;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      const float a = acc[4 * j + 2 * h], b = acc[4 * j + 2 * h + 1];
      if (pairs && column + 1 < columns) {
        *reinterpret_cast<Pair*>(out + column) = {a, b};
        if (whole) note(a), note(b);
      } else if (whole) {
        const i64 at = static_cast<i64>(share.row + row) * problem.pitch + share.column + column;
        if (column < columns) put(problem.weight, at, a, add, half), note(a);
        if (column + 1 < columns) put(problem.weight, at + 1, b, add, half), note(b);
      } else if (column < columns) {
        out[column] = a;
      }
    }
    if (share.bias && lane % 4 == 0) {
      if (whole) {
        put(problem.bias, share.row + row, sum[2 * h], problem.how & ADD_BIAS, problem.how & HALF_BIAS);
        note(sum[2 * h]);
      } else {
        sums[share.part * TILE_M + row] = sum[2 * h];
      }
    }
  }
  return squares;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    CLUSTER_DIMENSIONS
        weight_gradients(const __grid_constant__ Problems problems, const int* starts, const Share* shares, float* tiles,
                         float* sums, float* squares) {
  const u32 smem = dynamic_smem();
  const u32 full = smem + BARRIERS, empty = full + 8 * STAGES;
  const int group = warp_uniform(threadIdx.x / 128) - 1, warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
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
  const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  wait_for_previous();
  let_next_start();
  Ring ring{smem, full, empty, PAIRED ? remote_address(empty, cluster_rank() ^ 1) : 0, 0, 0};
  if (group < 0) {
    registers_down<40>();
    if (threadIdx.x == 0)
      for (int i = first; i < last; ++i) produce(problems, shares[i], ring);
  } else {
    registers_up<232>();
    float left = 0.f;
    for (int i = first; i < last; ++i) {
      const Share share = shares[i];
      float acc[TILE_N / 2], sum[4];
      if (share.bias) multiply<true>(acc, sum, share.count, ring, group, lane);
      else multiply<false>(acc, sum, share.count, ring, group, lane);
      left += deliver(acc, sum, problems.problem[share.problem], share, tiles, sums, 64 * group + 16 * warp + lane / 4, lane);
    }
    if (squares) {  // eight of a block, one a warp
      left = sum_of_warp(left);
      if (lane == 0) squares[8 * blockIdx.x + 4 * group + warp] = left;
    }
  }
  __syncwarp();
  if (PAIRED) cluster_leave();
}
