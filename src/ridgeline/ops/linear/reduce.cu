// Many small sums in one launch: for each job, dst[r, c] (+)= Σ_s src[s, r, c] over shares s in a fixed order.
//
// A job with few shares (weight gradients) gives a thread four columns and all shares; one with many (column sums, one
// row of partials a block) splits the shares among the block's warps and adds the warps' sums in order. With `squares`, a
// block leaves there the sum of squares of its sums, without what they are added to.
//
// The first `ready` blocks sum what was there before the kernel before began. They do so before that one has ended: column
// sums, whose chains of loads are the longest, hide behind weight gradients.
#include "ridgeline/common.cuh"
#include "squares.cuh"

using namespace rl;

constexpr int THREADS = 256, WARPS = THREADS / 32, MANY = 24;  // shares from which warps split them

struct Job {
  const float* src;
  void* dst;
  i64 share_step;                 // elements from one share to the next
  int shares, rows, columns;
  int src_row, dst_row;           // elements from one row to the next
  int accumulate, half, block;    // add to dst; dst is 16-bit; the first block of this job
};
static_assert(sizeof(Job) == 56, "the host packs jobs");
struct Jobs {
  Job job[MAX_JOBS];
};

RL_D void put(const Job& job, i64 at, float value) {
  if (job.half) {
    u16* dst = static_cast<u16*>(job.dst) + at;
    *dst = pack_one(value + (job.accumulate ? unpack_one(*dst) : 0.f));
  } else {
    float* dst = static_cast<float*>(job.dst) + at;
    *dst = value + (job.accumulate ? *dst : 0.f);
  }
}

// Four columns and all shares a thread; returns the sum of the squares of its sums.
RL_D float few(const Job& job, int block, int blocks) {
  float own = 0.f;
  const int width = (job.columns + 3) / 4;
  for (i64 quad = static_cast<i64>(block) * THREADS + threadIdx.x; quad < static_cast<i64>(job.rows) * width;
       quad += static_cast<i64>(blocks) * THREADS) {
    const int row = static_cast<int>(quad / width), column = static_cast<int>(quad % width) * 4;
    const float* src = job.src + static_cast<i64>(row) * job.src_row + column;
    const int inside = job.columns - column < 4 ? job.columns - column : 4;
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    if (inside == 4 && job.src_row % 4 == 0) {
      for (int s = 0; s < job.shares; ++s) {
        const float4 v = *reinterpret_cast<const float4*>(src + s * job.share_step);
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
    } else {
      for (int s = 0; s < job.shares; ++s)
        for (int e = 0; e < inside; ++e) total[e] += src[s * job.share_step + e];
    }
    for (int e = 0; e < 4; ++e) own += total[e] * total[e];
    for (int e = 0; e < inside; ++e) put(job, static_cast<i64>(row) * job.dst_row + column + e, total[e]);
  }
  return own;
}

// The shares among the warps; as above.
RL_D float many(const Job& job, int block, int blocks, float (&sums)[WARPS][32], int warp, int lane) {
  float own = 0.f;
  const int width = (job.columns + 31) / 32;
  for (int piece = block; piece < job.rows * width; piece += blocks) {
    const int row = piece / width, column = piece % width * 32 + lane;
    const float* src = job.src + static_cast<i64>(row) * job.src_row + column;
    float total = 0.f;
    if (column < job.columns)
      for (int s = warp; s < job.shares; s += WARPS) total += src[s * job.share_step];
    sums[warp][lane] = total;
    __syncthreads();
    if (warp == 0 && column < job.columns) {
      for (int w = 1; w < WARPS; ++w) total += sums[w][lane];
      own += total * total;
      put(job, static_cast<i64>(row) * job.dst_row + column, total);
    }
    __syncthreads();
  }
  return own;
}

RL_D void previous_done() {
#ifndef RL_EMULATED
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const __grid_constant__ Jobs jobs, int count, int ready,
                                                             float* squares) {
  __shared__ float sums[WARPS][32], left[WARPS];
  const int here = blockIdx.x;
  int which = 0;
  for (int step = MAX_JOBS / 2; step > 0; step /= 2)
    if (which + step < count && jobs.job[which + step].block <= here) which += step;
  const Job& job = jobs.job[which];
  const int block = here - job.block;
  const int blocks = (which + 1 < count ? jobs.job[which + 1].block : static_cast<int>(gridDim.x)) - job.block;
  if (here >= ready) previous_done();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float own = job.shares < MANY ? few(job, block, blocks) : many(job, block, blocks, sums, warp, lane);
  if (here < ready) previous_done();  // no kernel may end before the one before it has
  if (!squares) return;
  own = sum_of_warp(own);
  if (lane == 0) left[warp] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) own += left[w];
    squares[blockIdx.x] = own;
  }
}
