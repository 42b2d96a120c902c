// Kernels in pairs that differ in the one thing that orders two accesses to shared memory. With it they are right by the
// letter of PTX; without it no schedule makes them right.
#include "ridgeline/hopper.cuh"
using namespace rl;
RL_D u32 place(int thread) { return dynamic_smem() + 1024 + 4 * thread; }
RL_D u32 barrier(int n) { return dynamic_smem() + 8 * n; }
RL_D void start(int arrivals) {
  if (threadIdx.x == 0)
    for (int n = 0; n < 4; ++n) barrier_init(barrier(n), arrivals);
  __syncthreads();
}
template <class Give, class Take, class Back, class Await>  // one warp writes, another reads, the first writes again
RL_D void turns(Give give, Take take, Back back, Await await) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    store_shared_4(place(lane), lane);
    give();
    await();
    store_shared_4(place(lane), lane);
  } else {
    take();
    load_shared_4(place(31 - lane));
    back();
  }
}
template <bool RIGHT>
void by_one_lane() {
  start(1);
  const auto one = [](int n) { if (threadIdx.x % 32 == 0) barrier_arrive(barrier(n)); };
  turns([&] { if (RIGHT) __syncwarp(); one(0); }, [&] { barrier_wait(barrier(0), 0); },
        [&] { __syncwarp(); one(1); }, [&] { barrier_wait(barrier(1), 0); });
}
template <bool RIGHT>
void back_by_one_lane() {
  start(1);
  const auto one = [](int n) { if (threadIdx.x % 32 == 0) barrier_arrive(barrier(n)); };
  turns([&] { __syncwarp(); one(0); }, [&] { barrier_wait(barrier(0), 0); },
        [&] { if (RIGHT) __syncwarp(); one(1); }, [&] { barrier_wait(barrier(1), 0); });
}
template <bool RIGHT>
void by_arrive() {
  turns([] { named_arrive<64>(1); }, [] { named_barrier<64>(1); },
        [] { RIGHT ? named_arrive<64>(2) : named_arrive<32>(2); },
        [] { RIGHT ? named_barrier<64>(2) : named_barrier<32>(3); });
}
template <bool RIGHT>
void by_block() {
  const auto first = [] { if (RIGHT) sync_block(); };
  turns(first, first, sync_block, sync_block);
}
template <bool RIGHT>
void shuffle_is_no_order() {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) return;
  store_shared_4(place(lane), lane);
  if (RIGHT) __syncwarp();
  shuffle_xor(u32{1}, 1);
  load_shared_4(place(31 - lane));
}
template <bool RIGHT, bool BY_WRITER>
void product() {  // operands by ordinary stores
  if (threadIdx.x < 128)
    for (int n = threadIdx.x; n < 4096; n += 128) store_shared_4(dynamic_smem() + 4 * n, 0);
  if (RIGHT && BY_WRITER) fence_async();
  sync_block();
  if (RIGHT && !BY_WRITER) fence_async();
  float d[4];
  wgmma_fence();
  wgmma<8, 0, 0>(d, operand_k_major(dynamic_smem()), operand_k_major(dynamic_smem() + 8192), 0);
  wgmma_commit();
  wgmma_wait<0>();
}
template <bool RIGHT>
void product_under_way() {  // its operand is written before it is over
  for (int n = threadIdx.x; n < 4096; n += 128) store_shared_4(dynamic_smem() + 4 * n, 0);
  fence_async();
  sync_block();
  float d[4];
  wgmma<8, 0, 0>(d, operand_k_major(dynamic_smem()), operand_k_major(dynamic_smem() + 8192), 0);
  wgmma_commit();
  if (RIGHT) wgmma_wait<0>();
  sync_block();
  store_shared_4(dynamic_smem() + 8192 + 4 * threadIdx.x, 1);
  wgmma_wait<0>();
}
const TensorMap* map_of() {
  static u16 matrix[64 * 64];
  static const TensorMap map{matrix, {1, 64, 0, 0}, {64, 64, 1, 1}, {64, 64, 1, 1}, 128};
  return &map;
}
template <bool RIGHT>
void copied() {  // read before it is there
  start(1);
  const u32 tile = dynamic_smem() + 1024;
  if (threadIdx.x == 0) barrier_expect(barrier(0), 8192), copy_2d(tile, map_of(), 0, 0, barrier(0));
  if (RIGHT) barrier_wait(barrier(0), 0);
  load_shared_4(tile + 4 * threadIdx.x);
}
template <bool RIGHT>
void copied_over() {  // written by a copy while it is read
  start(32);
  const u32 tile = dynamic_smem() + 1024;
  if (threadIdx.x < 32) {
    load_shared_4(tile + 4 * threadIdx.x);
    if (RIGHT) barrier_arrive(barrier(1));
  } else if (threadIdx.x == 32) {
    if (RIGHT) barrier_wait(barrier(1), 0);
    copy_2d(tile, map_of(), 0, 0, barrier(0));
  }
}
template <bool RIGHT>
void stored() {  // written while the copy engine reads it
  const u32 tile = dynamic_smem() + 1024;
  for (int n = threadIdx.x; n < 2048; n += 128) store_shared_4(tile + 4 * n, 0);
  fence_async();
  sync_block();
  if (threadIdx.x == 0) {
    store_2d(map_of(), tile, 0, 0);
    store_commit();
    if (RIGHT) store_wait_read<0>();
  }
  sync_block();
  store_shared_4(tile + 4 * threadIdx.x, 1);
}
template <bool RIGHT>
void left() {  // while the other block's arrival is under way
  start(1);
  cluster_sync();
  if (threadIdx.x == 0) remote_arrive(barrier(0), cluster_rank() ^ 1);
  RIGHT ? cluster_leave() : cluster_sync();
}
extern "C" const char* run(int which, int right, int seed) {
  using Kernel = void (*)();
  static const Kernel kernels[][2] = {
    {by_one_lane<false>, by_one_lane<true>}, {back_by_one_lane<false>, back_by_one_lane<true>},
    {by_arrive<false>, by_arrive<true>}, {by_block<false>, by_block<true>},
    {shuffle_is_no_order<false>, shuffle_is_no_order<true>}, {product<false, true>, product<true, true>},
    {product<false, false>, product<true, false>}, {product_under_way<false>, product_under_way<true>},
    {copied<false>, copied<true>}, {copied_over<false>, copied_over<true>}, {stored<false>, stored<true>},
    {left<false>, left<true>},
  };
  const int threads[] = {64, 64, 64, 64, 64, 128, 128, 128, 64, 64, 128, 64}, blocks = which == 11 ? 2 : 1;
  return emulation::launch(blocks, threads[which], seed, false, kernels[which][right], blocks);
}
