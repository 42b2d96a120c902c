// What forward_many.cu is made of: shared memory, the tiles that a cluster works on, barriers, rings of weights, and the copies.
#pragma once
#include "access.cuh"

#include "../linear/slope_codes.cuh"

using namespace rl;

constexpr bool AHEAD = true;  // rows of h come into L2 before they can come into shared memory
constexpr int WIDTH = 256, ROWS = 128, CHUNK = 64;                     // of a block's tile; inner columns at a time
constexpr int PANEL_BYTES = ROWS * 128, GROUP_BYTES = PANEL_BYTES / 2;  // 64 columns of all rows, of a warpgroup's 64
constexpr int PIECE_BYTES = 64 * WIDTH, SLOTS = 3;                      // half a chunk of up's weights or of down's
constexpr int UP = 0, DOWN = UP + SLOTS * PIECE_BYTES, H = DOWN + SLOTS * PIECE_BYTES;
constexpr int HIDDEN = H + 4 * PANEL_BYTES, STREAM = HIDDEN + 2 * PANEL_BYTES, VECTORS = STREAM + 2 * PANEL_BYTES;
constexpr int VECTOR_BYTES = 2 * WIDTH, BARRIERS = VECTORS + 3 * VECTOR_BYTES;

struct Place {
  int group, warp, lane;  // of warpgroups: -1 copies, 0 multiplies by up's weights, 1 and 2 by down's; warp in it, lane
  u32 rank;               // in the cluster
};

// The four lanes of a row have its sum each.
RL_D float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// The pairs of tiles that a cluster works on; `row`: the first of this block's tile.
struct Tiles {
  int pair, pairs, rank, round = 0;
  RL_D Tiles(int rows, u32 rank) : pair(blockIdx.x / 2), pairs(ceil_div(rows, 2 * ROWS)), rank(static_cast<int>(rank)) {}
  RL_D bool valid() const { return pair < pairs; }
  RL_D int row() const { return (2 * pair + rank) * ROWS; }
  RL_D void advance() { pair += gridDim.x / 2, ++round; }
};

struct Barriers {
  u32 base;
  RL_D u32 h_full(int half) const { return base + 8 * (4 * SLOTS + half); }
  RL_D u32 h_empty(int half) const { return base + 8 * (4 * SLOTS + 2 + half); }
  RL_D u32 hidden_full(int slot) const { return base + 8 * (4 * SLOTS + 4 + slot); }
  RL_D u32 hidden_empty(int slot) const { return base + 8 * (4 * SLOTS + 6 + slot); }
  RL_D u32 stream_full(int slot) const { return base + 8 * (4 * SLOTS + 8 + slot); }
  RL_D u32 stream_empty(int slot) const { return base + 8 * (4 * SLOTS + 10 + slot); }
  RL_D void init() const {
    for (int i = 0; i < SLOTS; ++i) {  // the rings': each block's engine fills half of a slot in both
      barrier_init(base + 8 * i, 1), barrier_init(base + 8 * (2 * SLOTS + i), 1);
      barrier_init(base + 8 * (SLOTS + i), 8), barrier_init(base + 8 * (3 * SLOTS + i), 16);  // both blocks' warps
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(h_full(i), 1), barrier_init(h_empty(i), 4);
      barrier_init(hidden_full(i), 4), barrier_init(hidden_empty(i), 9);  // up's warps; down's, and who sends it to memory
      barrier_init(stream_full(i), 1), barrier_init(stream_empty(i), 8);
    }
    barrier_init_fence();
  }
};

// Weights, half a chunk in a slot: up's 64 inner columns × 128 of the width, down's 256 of the width × 32 inner columns.
struct Ring {
  u32 start, barriers, peer;
  int slot = 0;
  u32 phase = 0;
  RL_D Ring(u32 smem, Barriers bar, bool down, u32 rank)
      : start(smem + (down ? DOWN : UP)), barriers(bar.base + 16 * SLOTS * down), peer(rank ^ 1) {}
  RL_D u32 address() const { return start + slot * PIECE_BYTES; }
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

// A warp's way through a ring; `copy` starts this block's half of a piece, into both blocks.
template <class Copy>
RL_D void produce(int rows, int chunks, Ring ring, u32 rank, Copy copy) {
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
#pragma unroll 1
    for (int piece = 0; piece < 2 * chunks; ++piece, ring.advance()) {
      barrier_wait(ring.empty(ring.slot), ring.phase ^ 1);
      if (!elected()) continue;
      barrier_expect(ring.full(), PIECE_BYTES);
      copy(ring.address() + rank * (PIECE_BYTES / 2), piece, ring.full());
    }
}

RL_D void produce_up(const TensorMap* map, int rows, int chunks, const Ring& ring, u32 rank) {
  produce(rows, chunks, ring, rank, [=](u32 target, int piece, u32 full) {
    copy_2d_both(target, map, piece % 2 * 128 + 64 * static_cast<int>(rank), piece / 2 * CHUNK, full);
  });
}

RL_D void produce_down(const TensorMap* map, int rows, int chunks, const Ring& ring, u32 rank) {
  produce(rows, chunks, ring, rank, [=](u32 target, int piece, u32 full) {
    copy_2d_both(target, map, 32 * piece, 128 * static_cast<int>(rank), full);
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
      barrier_wait(bar.hidden_full(slot), sent >> 1 & 1);
      if (!elected()) continue;
      store_2d(map, smem + HIDDEN + slot * PANEL_BYTES, CHUNK * chunk, tiles.row());
      store_commit();
      store_wait_read<0>();
      barrier_arrive(bar.hidden_empty(slot));
    }
  if (elected()) store_wait<0>();
}
