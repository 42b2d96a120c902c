// What kernels for many rows of width 256 share whose whole rows lie in shared memory: the rows, and the cluster's ring.
// STAGES: slots of the ring.
#pragma once
#include "many_place.cuh"

#include "columns.cuh"

constexpr int PANELS = WIDTH / 64, PANEL_BYTES = 64 * 128;  // 64 rows × 64 columns
constexpr int ROWS_BYTES = PANELS * PANEL_BYTES;             // 64 whole rows

using Tiles = TilesOf<true>;

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
