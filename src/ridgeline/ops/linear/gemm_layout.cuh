// What every part of the Hopper GEMM shares: sizes from the macros of a configuration, barriers, the walk over tiles.
#pragma once
#include "smem.cuh"

using namespace rl;

constexpr int BLOCK_K = 64, ROW_BYTES = 128;              // a ring slot's rows are 64 values: one swizzle span
constexpr int M_BLOCKS = TILE_M / 64, N_HALVES = TILE_N / 64;
// A slot holds 64 columns of K for 64 rows of A where only A streams, so that few bytes wait for products to end; else of
// the whole tile and of B.
constexpr int PIECES = RESIDENT ? M_BLOCKS : 1, PIECE_M = TILE_M / PIECES;
constexpr int A_BYTES = PIECE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES;
constexpr int SLOT_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
constexpr int RESIDENT_BYTES = RESIDENT ? K_CHUNKS * B_BYTES : 0;
constexpr int PANEL_BYTES = 16 * ROW_BYTES;               // 16 rows × 64 columns of output: a warp's unit of work
constexpr int PANELS = M_BLOCKS * N_HALVES;               // panels a warp has in a tile
constexpr bool READS_C = EPILOGUE >= 2;
constexpr int BARRIER_BYTES = 1024;
// dynamic shared memory: resident B, ring, panels, barriers
constexpr int RING = RESIDENT_BYTES, PANEL_POOL = RING + STAGES * SLOT_BYTES;
constexpr int POOL_PANELS = READS_C ? 4 * PANELS : 2 * 4 * 2;
constexpr int BARRIERS = PANEL_POOL + POOL_PANELS * PANEL_BYTES;

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 b_full(int chunk) const { return base + 8 * (2 * STAGES + chunk); }
  RL_D u32 b_free() const { return base + 8 * (2 * STAGES + K_CHUNKS); }
  RL_D u32 c_full(int group, int warp, int panel) const {
    return base + 8 * (2 * STAGES + K_CHUNKS + 1 + (group * 4 + warp) * PANELS + panel);
  }
  static constexpr int COUNT = 2 * STAGES + K_CHUNKS + 1 + 8 * PANELS;
};
static_assert(PANELS % 2 == 0, "panels leave through two slots in turn");
static_assert(8 * Barriers::COUNT <= BARRIER_BYTES, "barriers overflow");

// A block's work: segments {column tile + 65536 · row of partial sums, first row tile, row tile step, count}, ended by a
// count of 0.
struct Tiles {
  const int4* segment;
  int4 now;
  int index;  // inside the segment
  RL_D explicit Tiles(const int4* first) : segment(first), now(*first), index(0) {}
  RL_D bool valid() const { return now.w > 0; }
  RL_D int column() const { return (now.x & 0xffff) * TILE_N; }
  RL_D int sums_row() const { return now.x >> 16; }
  RL_D int row() const { return (now.y + index * now.z) * TILE_M; }
  RL_D void advance() {
    if (++index == now.w) {
      now = *++segment;
      index = 0;
    }
  }
};

struct Problem {  // what every part of the kernel needs to know of its operands
  const TensorMap *a, *b, *c, *d, *u;
  int n;
};
