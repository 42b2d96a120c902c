// Right by the letter of PTX, as this package's kernels do it. What a tool reports here it does not follow, and says nothing of
// a kernel; of each pair that the tool follows one, the other differs in nothing else.
#include "ridgeline/hopper.cuh"
using namespace rl;
// racecheck: two warps write, read and write again
template <class Give, class Take>
RL_D void turns(float* x, Give give, Take take) {  // give(i), take(i): hand over what a warp has done, the i-th time
  __shared__ float shared[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    shared[lane] = x[lane];
    give(0);
    take(1);
    shared[lane] = -x[lane];
    give(2);
  } else {
    take(0);
    x[lane] = shared[31 - lane];
    give(1);
    take(2);
    x[32 + lane] = shared[31 - lane];
  }
}
RL_D u32 barriers(u64* room, int arrivals) {
  const u32 first = smem_address(room);
  if (threadIdx.x == 0)
    for (int i = 0; i < 3; ++i) barrier_init(first + 8 * i, arrivals);
  barrier_init_fence();
  __syncthreads();
  return first;
}
extern "C" __global__ void by_one_lane(float* x) {  // as arrive_for_warp does
  __shared__ u64 room[3];
  const u32 first = barriers(room, 1);
  turns(x, [&](int i) { __syncwarp(); if (threadIdx.x % 32 == 0) barrier_arrive(first + 8 * i); },
        [&](int i) { barrier_wait(first + 8 * i, 0); });
}
extern "C" __global__ void by_each_lane(float* x) {
  __shared__ u64 room[3];
  const u32 first = barriers(room, 32);
  turns(x, [&](int i) { barrier_arrive(first + 8 * i); }, [&](int i) { barrier_wait(first + 8 * i, 0); });
}
extern "C" __global__ void by_arrive(float* x) {  // as the two groups of the row-fused kernels do
  turns(x, [](int i) { named_arrive<64>(1 + i); }, [](int i) { named_barrier<64>(1 + i); });
}
extern "C" __global__ void by_sync(float* x) {
  turns(x, [](int i) { named_barrier<64>(1 + i); }, [](int i) { named_barrier<64>(1 + i); });
}
extern "C" __global__ void by_sync_of_some(float* x) {  // and others in the block take no part
  if (threadIdx.x < 64) turns(x, [](int i) { named_barrier<64>(1 + i); }, [](int i) { named_barrier<64>(1 + i); });
}
extern "C" __global__ void by_sync_after_turns(float* x) {  // at other barriers the two have taken turns, without data
  for (int i = 0; i < 2; ++i)
    if (threadIdx.x < 32) {
      if (i > 0) named_barrier<64>(5);
      named_arrive<64>(6);
    } else {
      named_barrier<64>(6);
      if (i == 0) named_arrive<64>(5);
    }
  turns(x, [](int i) { named_barrier<64>(1 + i); }, [](int i) { named_barrier<64>(1 + i); });
}
extern "C" __global__ void by_sync_within_turn(float* x) {  // the next turn has been given, and not been taken
  if (threadIdx.x >= 32) named_arrive<64>(5);
  turns(x, [](int i) { named_barrier<64>(1 + i); }, [](int i) { named_barrier<64>(1 + i); });
  if (threadIdx.x < 32) named_barrier<64>(5);
}

// synccheck: a barrier's phases end, and nobody needs to know of the first
template <bool WAITS>
RL_D void two_phases(float* x) {
  __shared__ u64 room[3];
  const u32 first = barriers(room, 1);
  for (u32 phase = 0; phase < 2; ++phase) {
    if (threadIdx.x == 0) barrier_arrive(first);
    if (WAITS || phase == 1) barrier_wait(first, phase);
    __syncthreads();
  }
  x[threadIdx.x] = -static_cast<float>(threadIdx.x % 32);
}
extern "C" __global__ void each_phase_waited_for(float* x) { two_phases<true>(x); }
extern "C" __global__ void one_phase_waited_for(float* x) { two_phases<false>(x); }

// initcheck: memory that threads or the copy engine have written
extern "C" __global__ void write_by_threads(float* x) { x[threadIdx.x] = -static_cast<float>(threadIdx.x % 32); }
extern "C" __global__ void write_by_copy_engine(float* x) {
  __shared__ alignas(128) float shared[64];
  shared[threadIdx.x] = -static_cast<float>(threadIdx.x % 32);
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(x), "r"(smem_address(shared)) : "memory");
    store_commit();
    store_wait<0>();
  }
}
extern "C" __global__ void read_of_threads(float* x) { x[threadIdx.x] += 0.f; }
extern "C" __global__ void read_of_copy_engine(float* x) { x[threadIdx.x] += 0.f; }
