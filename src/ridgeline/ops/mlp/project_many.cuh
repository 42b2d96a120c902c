// What project_many.cu is made of: shared memory, the tiles that a cluster works on, its barriers and ring, and the copies.
#pragma once
#include "access.cuh"
#include "columns.cuh"

using namespace rl;

constexpr int WIDTH = 256, PANELS = WIDTH / 64, PANEL_BYTES = 64 * 128;  // 64 rows × 64 columns
constexpr int ROWS_BYTES = PANELS * PANEL_BYTES;                         // 64 whole rows
constexpr int A_BYTES = 2 * PANEL_BYTES, SLOT_BYTES = A_BYTES + ROWS_BYTES;
constexpr int HELD = STAGES * SLOT_BYTES, VECTORS = HELD + 2 * ROWS_BYTES, VECTOR_BYTES = WIDTH * 2;
constexpr int BARRIERS = VECTORS + 3 * VECTOR_BYTES;
constexpr int KINDS = 1 + NORM_BIAS;  // of column sums
static_assert(HELD % 1024 == 0, "panels begin at multiples of 1024 bytes");

struct Place {
  int group, warp, lane;  // consumer warpgroup 0 or 1 (the producer's is -1), warp in it, lane
  u32 rank;               // in the cluster
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

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 held_full(int group) const { return base + 8 * (2 * STAGES + group); }
  RL_D u32 held_empty(int group) const { return base + 8 * (2 * STAGES + 2 + group); }
  RL_D void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full(i), 2);    // both producers: each writes into both blocks
      barrier_init(empty(i), 16);  // both blocks' warps
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(held_full(i), 1);
      barrier_init(held_empty(i), 4);
    }
    barrier_init_fence();
  }
};

struct Ring {
  u32 smem;
  Barriers bar;
  u32 peer;
  int slot = 0;
  u32 phase = 0;
  RL_D Ring(u32 smem, Barriers bar, u32 rank) : smem(smem), bar(bar), peer(rank ^ 1) {}
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

struct Maps {
  const TensorMap *x, *weight, *held, *beside;  // boxes of 64 × 64; beside: dresidual
};

RL_D void copy_rows(u32 target, const TensorMap* map, int row, u32 barrier) {
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) copy_2d(target + panel * PANEL_BYTES, map, 64 * panel, row, barrier);
}

// A warp's way through the ring, one of its lanes elected to start what comes into a free slot: `chunk` of a tile, and what is
// beside a warpgroup's rows. Weights and rows have a warp each: to start a copy takes its time.
template <class Chunk, class Beside>
RL_D void produce(int rows, int chunks, Ring ring, Chunk chunk, Beside beside) {
  for (Tiles tiles(rows, ring.peer ^ 1); tiles.valid(); tiles.advance()) {
#pragma unroll 1
    for (int k = 0; k < chunks; ++k, ring.advance()) {
      ring.begin();
      if (elected()) chunk(ring, k, tiles.row());
    }
    for (int group = 0; group < 2 * BACKWARD; ++group, ring.advance()) {
      ring.begin();
      if (elected()) beside(ring, tiles.row() + 64 * group);
    }
  }
}

RL_D void produce_weights(const Maps& maps, int rows, int chunks, const Ring& ring) {
  const auto chunk = [&](const Ring& r, int k, int) {
    r.announce(SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int panel = 2 * static_cast<int>(r.peer ^ 1) + i;
      copy_2d_both(r.address() + A_BYTES + panel * PANEL_BYTES, maps.weight, 64 * (BACKWARD ? panel : k),
                   64 * (BACKWARD ? k : panel), r.full());
    }
  };
  produce(rows, chunks, ring, chunk, [](const Ring& r, int) { r.announce(ROWS_BYTES); });
}

RL_D void produce_rows(const Maps& maps, int rows, int chunks, const Ring& ring) {
  const auto chunk = [&](const Ring& r, int k, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) copy_2d(r.address() + i * PANEL_BYTES, maps.x, 64 * k, row + 64 * i, r.full());
  };
  produce(rows, chunks, ring, chunk, [&](const Ring& r, int row) { copy_rows(r.address(), maps.beside, row, r.full()); });
}

RL_D void produce_held(const Maps& maps, int rows, u32 smem, Barriers bar, u32 rank) {
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
    for (int group = 0; group < 2; ++group) {
      barrier_wait(bar.held_empty(group), (tiles.round & 1) ^ 1);
      if (!elected()) continue;
      barrier_expect(bar.held_full(group), ROWS_BYTES);
      copy_rows(smem + HELD + group * ROWS_BYTES, maps.held, tiles.row() + 64 * group, bar.held_full(group));
    }
}
