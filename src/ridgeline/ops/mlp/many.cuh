// What kernels for many rows of width 256 share: whole rows in shared memory, the tiles that a cluster works on, its ring.
// STAGES: slots of the ring.
#pragma once
#include "access.cuh"
#include "columns.cuh"

using namespace rl;

constexpr int WIDTH = 256, PANELS = WIDTH / 64, PANEL_BYTES = 64 * 128;  // 64 rows × 64 columns
constexpr int ROWS_BYTES = PANELS * PANEL_BYTES;                         // 64 whole rows
constexpr int VECTOR_BYTES = WIDTH * 2;

struct Place {
  int group, warp, lane;  // consumer warpgroup 0 or 1 (the producer's is -1), warp in it, lane
  u32 rank;               // in the cluster
  // The same for a whole warp, as the compiler has to know: operands' descriptors are made of it.
  RL_D static Place here() {
    const int thread = threadIdx.x;
    return {warp_uniform(thread / 128) - 1, warp_uniform(thread / 32 % 4), thread % 32, cluster_rank()};
  }
  RL_D Place afresh() const {  // see rl::afresh
    Place place = *this;
    place.lane = static_cast<int>(rl::afresh(lane));
    return place;
  }
};
// The pairs of tiles that a cluster works on; `row`: the first of this block's tile. The last rows come first: the kernel
// before, which goes the other way, has left them in L2, as this one leaves the first rows to the one behind it.
struct Tiles {
  int pair, pairs, rank, round = 0;
  RL_D Tiles(int rows, u32 rank) : pair(blockIdx.x / 2), pairs(ceil_div(rows, 256)), rank(static_cast<int>(rank)) {}
  RL_D bool valid() const { return pair < pairs; }
  RL_D int row() const { return 256 * (pairs - 1 - pair) + 128 * rank; }
  RL_D void advance() { pair += gridDim.x / 2, ++round; }
};

// The ring's barriers, at `base`.
struct RingBarriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full(i), 2);    // both producers: each writes into both blocks
      barrier_init(empty(i), 16);  // both blocks' warps
    }
  }
};

// `Barriers`: the ring's, and what else a kernel has.
template <int SLOT_BYTES, class Barriers>
struct SharedRing {
  u32 smem;
  Barriers bar;
  u32 peer;
  int slot = 0;
  u32 phase = 0;
  RL_D SharedRing(u32 smem, Barriers bar, u32 rank) : smem(smem), bar(bar), peer(rank ^ 1) {}
  RL_D u32 address() const { return smem + slot * SLOT_BYTES; }
  RL_D void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  // Producers: wait until the slot is free in both blocks; one of them says how many bytes will come, and tells the other
  // block that its own slot of this number was free too.
  RL_D void begin() const { barrier_wait(bar.empty(slot), phase ^ 1); }
  RL_D void announce(u32 bytes) const {
    barrier_expect(full(), bytes);
    remote_arrive(full(), peer);
  }
  RL_D u32 full() const { return bar.full(slot); }
  RL_D bool ready() const { return warp_uniform(barrier_ready(full(), phase)); }
  RL_D void wait() const { barrier_wait(full(), phase); }
  // One lane of a warp that has read slot `which`.
  RL_D void release(int which) const {
    barrier_arrive(bar.empty(which));
    remote_arrive(bar.empty(which), peer);
  }
};

// The norm's scale and forward its shift and the branch's bias, one after the other: what a warpgroup's thread copies.
RL_D void copy_vectors(u32 vectors, const u16* weight, const u16* shift, const u16* bias, int thread) {
  const u16* sources[3] = {weight, shift, bias};
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (sources[i] && thread < WIDTH / 2)
      store_shared_u32(vectors + i * VECTOR_BYTES + 4 * thread, reinterpret_cast<const u32*>(sources[i])[thread]);
}
