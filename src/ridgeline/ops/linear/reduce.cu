// Many small sums in one launch: for each job, dst[r, c] (+)= Σ_s src[s, r, c] over shares s in a fixed order.
//
// A job with few shares (weight gradients) gives a thread places of four columns and all shares; one with many (column
// sums, one row of partials a block) splits the shares among the block's warps and adds the warps' sums in order. With
// `squares`, a block leaves there the sum of squares of its sums, without what they are added to.
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

// Four sums to their places, by one store if `wide`; returns their squares' sum.
RL_D float put_quad(const Job& job, int row, int column, const float (&total)[4], bool wide) {
  const i64 at = static_cast<i64>(row) * job.dst_row + column;
  float own = 0.f;
  if (wide)
    *reinterpret_cast<float4*>(static_cast<float*>(job.dst) + at) = make_float4(total[0], total[1], total[2], total[3]);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (column + e < job.columns) {
      own += total[e] * total[e];
      if (!wide) put(job, at + e, total[e]);
    }
  return own;
}

// Adds up to DEEP shares of QUADS places, all of whose loads are under way together.
template <int QUADS, int DEEP>
RL_D void add_shares(float (&total)[QUADS][4], const float* const (&src)[QUADS], int first, const Job& job) {
  float4 v[DEEP][QUADS];
#pragma unroll
  for (int d = 0; d < DEEP; ++d)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      v[d][q] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + d < job.shares) v[d][q] = *reinterpret_cast<const float4*>(src[q] + (first + d) * job.share_step);
    }
#pragma unroll
  for (int d = 0; d < DEEP; ++d)
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
      total[q][0] += v[d][q].x, total[q][1] += v[d][q].y, total[q][2] += v[d][q].z, total[q][3] += v[d][q].w;
}

// Four columns and all shares a thread, QUADS places and DEEP shares at a time. Returns the sum of the squares of this
// thread's sums.
template <int QUADS, int DEEP>
RL_D float few(const Job& job, int block, int blocks) {
  float own = 0.f;
  const int width = (job.columns + 3) / 4, quads = job.rows * width, stride = blocks * THREADS;
  const bool whole = job.columns % 4 == 0 && job.src_row % 4 == 0;
  const bool wide = job.columns % 4 == 0 && job.dst_row % 4 == 0 && !job.half && !job.accumulate &&
                    reinterpret_cast<unsigned long long>(job.dst) % 16 == 0;
  for (int first = block * THREADS + threadIdx.x; first < quads; first += QUADS * stride) {
    float total[QUADS][4] = {};
    const float* src[QUADS];
    int row[QUADS], column[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {  // past the end the first place once more, which is dropped below
      const int quad = first + q * stride < quads ? first + q * stride : first;
      row[q] = quad / width, column[q] = quad % width * 4;
      src[q] = job.src + static_cast<i64>(row[q]) * job.src_row + column[q];
    }
    if (whole) {
#pragma unroll 1
      for (int s = 0; s < job.shares; s += DEEP) add_shares<QUADS, DEEP>(total, src, s, job);
    } else {
      for (int s = 0; s < job.shares; ++s)
        for (int q = 0; q < QUADS; ++q)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (column[q] + e < job.columns) total[q][e] += src[q][s * job.share_step + e];
    }
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
      if (first + q * stride < quads) own += put_quad(job, row[q], column[q], total[q], wide);
  }
  return own;
}

// The shares among the warps, EIGHT of a warp's under way together; as above.
RL_D float many(const Job& job, int block, int blocks, float (&sums)[WARPS][32], int warp, int lane) {
  constexpr int EIGHT = 8;
  float own = 0.f;
  const int width = (job.columns + 31) / 32;
  for (int piece = block; piece < job.rows * width; piece += blocks) {
    const int row = piece / width, column = piece % width * 32 + lane;
    const float* src = job.src + static_cast<i64>(row) * job.src_row + column;
    float total = 0.f;
    if (column < job.columns) {
      int s = warp;
      for (; s + (EIGHT - 1) * WARPS < job.shares; s += EIGHT * WARPS) {
        float v[EIGHT];
#pragma unroll
        for (int d = 0; d < EIGHT; ++d) v[d] = src[(s + d * WARPS) * job.share_step];
#pragma unroll
        for (int d = 0; d < EIGHT; ++d) total += v[d];
      }
      for (; s < job.shares; s += WARPS) total += src[s * job.share_step];
    }
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

RL_D float sum(const Job& job, int block, int blocks, float (&sums)[WARPS][32], int warp, int lane) {
  if (job.shares >= MANY) return many(job, block, blocks, sums, warp, lane);
  return job.shares > 3 ? few<1, 8>(job, block, blocks) : few<2, 3>(job, block, blocks);
}

RL_D void previous_done() {
#ifndef RL_EMULATED
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) reduce(const __grid_constant__ Jobs jobs, int count, int ready,
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
  float own = sum(job, block, blocks, sums, warp, lane);
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
