// What forward_many.cu is made of: shared memory, barriers, rings of weights, and the copies.
#pragma once
#include "many_place.cuh"

#include "../linear/slope_codes.cuh"

constexpr bool AHEAD = true;  // rows of h come into L2 before they can come into shared memory
constexpr int ROWS = 128, CHUNK = 64;                                   // of a block's tile; inner columns at a time
constexpr int PANEL_BYTES = ROWS * 128, GROUP_BYTES = PANEL_BYTES / 2;  // 64 columns of all rows, of a warpgroup's 64
constexpr int UP_PIECES = 4, RING_BYTES = 48 * 1024;                    // pieces of a chunk of up's weights; each ring
constexpr int UP = 0, DOWN = UP + RING_BYTES, H = DOWN + RING_BYTES;
constexpr int HIDDEN = H + 4 * PANEL_BYTES, STREAM = HIDDEN + 2 * PANEL_BYTES, VECTORS = STREAM + 2 * PANEL_BYTES;
constexpr int BARRIERS = VECTORS + 3 * VECTOR_BYTES;

using Tiles = TilesOf<false>;

struct Barriers {
  u32 base;
  RL_D u32 h_full(int half) const { return base + 8 * half; }
  RL_D u32 h_empty(int half) const { return base + 8 * (2 + half); }
  RL_D u32 stream_full(int slot) const { return base + 8 * (4 + slot); }
  RL_D u32 stream_empty(int slot) const { return base + 8 * (6 + slot); }
  RL_D u32 hidden_full(int slot, int rows) const { return base + 8 * (8 + 2 * slot + rows); }  // 64 rows, 0 or 1
  RL_D u32 hidden_empty(int slot, int rows) const { return base + 8 * (12 + 2 * slot + rows); }
  RL_D u32 ring(bool down) const { return base + 8 * (16 + 12 * down); }
  RL_D void init() const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(h_full(i), 1), barrier_init(h_empty(i), 8);
      for (int n = 0; n < 2; ++n)  // up's warps; down's, and who sends it to memory
        barrier_init(hidden_full(i, n), 4), barrier_init(hidden_empty(i, n), 5);
      barrier_init(stream_full(i), 1), barrier_init(stream_empty(i), 8);
    }
  }
};

// Weights, a piece of a chunk in a slot: of up's 64 inner columns × 64 of the width, of down's 128 of the width × 32 or 64
// inner columns. Small, so that little memory is read and much under way: it comes back some 3,000 cycles later.
template <int PIECES>
struct Ring {
  static constexpr int BYTES = 2 * CHUNK * WIDTH / PIECES, SLOTS = RING_BYTES / BYTES;
  u32 start, barriers, peer;
  int slot = 0;
  u32 phase = 0;
  RL_D Ring(u32 start, u32 barriers, u32 rank) : start(start), barriers(barriers), peer(rank ^ 1) {}
  RL_D void init(int warps) const {
    for (int i = 0; i < SLOTS; ++i) barrier_init(barriers + 8 * i, 1), barrier_init(empty(i), 2 * warps);  // both blocks'
  }
  RL_D u32 address() const { return start + slot * BYTES; }
  RL_D u32 full() const { return barriers + 8 * slot; }
  RL_D u32 empty(int which) const { return barriers + 8 * (SLOTS + which); }
  RL_D bool ready() const { return warp_uniform(barrier_ready(full(), phase)); }
  RL_D void wait() const { barrier_wait(full(), phase); }
  RL_D void release(int which) const {  // one lane of a warp that has read it
    barrier_arrive(empty(which));
    remote_arrive(empty(which), peer);
  }
  RL_D void advance() {
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
};
using UpRing = Ring<UP_PIECES>;
using DownRing = Ring<DOWN_PIECES>;

// A warp's way through a ring; `copy` starts a piece, into both blocks, whose turns they take.
template <int PIECES, class Copy>
RL_D void produce(int rows, int chunks, Ring<PIECES> ring, u32 rank, Copy copy) {
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
#pragma unroll 1
    for (int piece = 0; piece < PIECES * chunks; ++piece, ring.advance()) {
      barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);
      if (!elected()) continue;
      barrier_expect(ring.full(), ring.BYTES);
      if (piece % 2 == static_cast<int>(rank)) copy(ring.address(), piece / PIECES * CHUNK, piece % PIECES, ring.full());
    }
}

RL_D void produce_up(const TensorMap* map, int rows, int chunks, const UpRing& ring, u32 rank) {
  produce(rows, chunks, ring, rank, [=](u32 target, int column, int piece, u32 full) {
    copy_2d_both(target, map, 64 * piece, column, full);
  });
}

RL_D void produce_down(const TensorMap* map, int rows, int chunks, const DownRing& ring, u32 rank) {
  produce(rows, chunks, ring, rank, [=](u32 target, int column, int piece, u32 full) {
    copy_2d_both(target, map, column + piece / 2 * 32, piece % 2 * 128, full);
  });
}

// Rows of h of a tile come into L2 by ordinary instructions, which stand in nobody's way as the copy engine's would.
RL_D void prefetch_rows(const u16* h, int row, int rows, int lane) {
#pragma unroll 1
  for (int here = row + lane / 4; here < row + ROWS && here < rows; here += 8)
    prefetch_line(h + static_cast<i64>(here) * WIDTH + lane % 4 * 64);
}

// Rows of h, in halves of the width, and of the residual, 64 columns at a time through two slots.
RL_D void produce_rows(const TensorMap* h, const u16* matrix, const TensorMap* residual, int rows, u32 smem, Barriers bar,
                       const Place& me) {
  for (Tiles tiles(rows, me.rank); tiles.valid();) {
    for (int half = 0; half < 2; ++half) {
      barrier_wait(bar.h_empty(half), (tiles.round & 1) ^ 1);
      if (!elected()) continue;
      barrier_expect(bar.h_full(half), 2 * PANEL_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_2d(smem + H + (2 * half + i) * PANEL_BYTES, h, 128 * half + 64 * i, tiles.row(), bar.h_full(half));
    }
    for (int panel = 0; panel < 4; ++panel) {
      const int slot = panel % 2;
      barrier_wait(bar.stream_empty(slot), (panel / 2) ^ 1);  // two uses a tile
      if (!elected()) continue;
      barrier_expect(bar.stream_full(slot), PANEL_BYTES);
      copy_2d(smem + STREAM + slot * PANEL_BYTES, residual, 64 * panel, tiles.row(), bar.stream_full(slot));
    }
    tiles.advance();
    if (AHEAD && tiles.valid()) prefetch_rows(matrix, tiles.row(), rows, me.lane);
  }
}

// Sends the hidden layer to memory.
RL_D void deliver(const TensorMap* map, int rows, int chunks, u32 smem, Barriers bar, u32 rank) {
  int sent = 0;
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, ++sent) {
      const int slot = sent & 1;
      for (int half = 0; half < 2; ++half) {
        barrier_wait(bar.hidden_full(slot, half), sent >> 1 & 1);
        if (!elected()) continue;
        store_2d(map, smem + HIDDEN + slot * PANEL_BYTES + half * GROUP_BYTES, CHUNK * chunk, tiles.row() + 64 * half);
        store_commit();
        if (half == 0) continue;
        store_wait_read<1>();
        barrier_arrive(bar.hidden_empty(slot, 0));
        store_wait_read<0>();
        barrier_arrive(bar.hidden_empty(slot, 1));
      }
    }
  if (elected()) store_wait<0>();
}
