// What project_many.cu is made of: shared memory, barriers, and the copies.
#pragma once
#include "many.cuh"

constexpr int A_BYTES = 2 * PANEL_BYTES, SLOT_BYTES = A_BYTES + ROWS_BYTES;
constexpr int HELD = STAGES * SLOT_BYTES, VECTORS = HELD + 2 * ROWS_BYTES;
constexpr int BARRIERS = VECTORS + 3 * VECTOR_BYTES;
static_assert(HELD % 1024 == 0, "panels begin at multiples of 1024 bytes");

struct Barriers : RingBarriers {
  RL_D u32 held_full(int group) const { return base + 8 * (2 * STAGES + group); }
  RL_D u32 held_empty(int group) const { return base + 8 * (2 * STAGES + 2 + group); }
  RL_D void init() const {
    RingBarriers::init();
    for (int i = 0; i < 2; ++i) {
      barrier_init(held_full(i), 1);
      barrier_init(held_empty(i), 4);
    }
    barrier_init_fence();
  }
};
using Ring = SharedRing<SLOT_BYTES, Barriers>;

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
