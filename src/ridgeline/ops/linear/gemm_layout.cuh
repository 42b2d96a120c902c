// What every part of the Hopper GEMM shares: sizes from the macros of a configuration, barriers, the walk over tiles.
#pragma once
#include "smem.cuh"

using namespace rl;

constexpr int BLOCK_K = 64, ROW_BYTES = 128;              // a ring slot's rows are 64 values: one swizzle span
constexpr int M_BLOCKS = TILE_M / 64, N_HALVES = TILE_N / 64;
constexpr int A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES, SLOT_BYTES = A_BYTES + B_BYTES;
constexpr int PANEL_BYTES = 16 * ROW_BYTES;               // 16 rows × 64 columns of output: a warp's unit of work
constexpr int PANELS = M_BLOCKS * N_HALVES;               // panels a warp has in a tile
constexpr bool READS_C = EPILOGUE >= 2;
constexpr int BARRIER_BYTES = 1024;
// dynamic shared memory: ring, panels, barriers
constexpr int PANEL_POOL = STAGES * SLOT_BYTES;
constexpr int POOL_PANELS = READS_C ? 4 * PANELS : 2 * 4 * 2;
constexpr int BARRIERS = PANEL_POOL + POOL_PANELS * PANEL_BYTES;

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 c_full(int group, int warp, int panel) const {
    return base + 8 * (2 * STAGES + (group * 4 + warp) * PANELS + panel);
  }
  static constexpr int COUNT = 2 * STAGES + 8 * PANELS;
};
static_assert(PANELS % 2 == 0, "panels leave through two slots in turn");
static_assert(8 * Barriers::COUNT <= BARRIER_BYTES, "barriers overflow");

// A block's work: segments {column tile + 65536 · row of partial sums, first row tile, row tile step, count}, ended by a
// count of 0. Where a tile lies is the same for a whole warp, as the compiler has to know: copies are started with it.
struct Tiles {
  const int4* segment;
  int4 now;
  int index;  // inside the segment
  RL_D explicit Tiles(const int4* first) : segment(first), now(uniform(*first)), index(0) {}
  static RL_D int4 uniform(int4 v) { return {warp_uniform(v.x), warp_uniform(v.y), warp_uniform(v.z), warp_uniform(v.w)}; }
  RL_D bool valid() const { return now.w > 0; }
  RL_D int column() const { return (now.x & 0xffff) * TILE_N; }
  RL_D int sums_row() const { return now.x >> 16; }
  RL_D int row() const { return (now.y + index * now.z) * TILE_M; }
  RL_D void advance() {
    if (++index == now.w) {
      now = uniform(*++segment);
      index = 0;
    }
  }
};

struct Problem {  // what every part of the kernel needs to know of its operands
  const TensorMap *a, *b, *c, *d, *u;
  int n;
  const float* terms;  // epilogue 4: α of every row, then β
  int m;
  float factor;
};
