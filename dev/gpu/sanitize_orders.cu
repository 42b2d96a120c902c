// Right by the letter of PTX: two warps write, read and write again, ordered as this package's kernels order theirs.
// What racecheck reports here it does not follow.
#include "ridgeline/hopper.cuh"
using namespace rl;
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
