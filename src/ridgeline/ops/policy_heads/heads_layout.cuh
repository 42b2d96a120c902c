// What every part of the heads' Hopper kernel shares: sizes from its macros, shared memory, barriers, the walk over rows.
#pragma once
#include "ridgeline/hopper.cuh"

#include "../attention/cuda/lanes.cuh"
#include "../linear/gelu.cuh"

using namespace rl;

RL_HD constexpr int round_up(int n, int step) { return (n + step - 1) / step * step; }
constexpr int ROWS = 64, GROUPS = 2;                     // of a tile; warpgroups that take tiles
constexpr int V_COLUMNS = round_up(V, 8), V_DEPTH = round_up(V, 16), E_DEPTH = round_up(E, 16);
constexpr int SIDE_COLUMNS = round_up(E + 2, 8);         // earlier logits, row mean, 1 / row scale
constexpr int NARROW = 64;                               // columns of a tile of dl and side
constexpr int CHUNKS = (INNER + 63) / 64;                // of 64 columns
constexpr int PIECES = (INNER + 31) / 32;                // of 32 columns: what a warpgroup takes at a time
static_assert(V_COLUMNS + SIDE_COLUMNS <= NARROW && INNER % 16 == 0, "sizes");
constexpr int TILE_BYTES = ROWS * 128, DOWN_BYTES = V_DEPTH * 128, B_BYTES = E_DEPTH * 128;
// dynamic shared memory: p, then v, then q [warpgroup][chunk]; a, likewise; dl | side [warpgroup]; W2 and B [chunk]; s and
// c of every inner column, side by side; b2; barriers
constexpr int A_TILES = GROUPS * CHUNKS * TILE_BYTES, NARROW_TILES = 2 * A_TILES, DOWN = NARROW_TILES + GROUPS * TILE_BYTES;
constexpr int EARLIER = DOWN + CHUNKS * DOWN_BYTES, VECTORS = EARLIER + CHUNKS * B_BYTES;
constexpr int BIAS = VECTORS + CHUNKS * 64 * 8, BARRIERS = BIAS + V_COLUMNS * 4;

struct Barriers {
  u32 base;
  RL_D u32 weights() const { return base; }
  RL_D u32 p_full(int group, int chunk) const { return base + 8 * (1 + group * CHUNKS + chunk); }
  RL_D u32 q_ready(int group, int chunk) const { return base + 8 * (1 + (GROUPS + group) * CHUNKS + chunk); }
  RL_D u32 q_done(int group, int chunk) const { return base + 8 * (1 + (2 * GROUPS + group) * CHUNKS + chunk); }
  RL_D u32 narrow_ready(int group) const { return base + 8 * (1 + 3 * GROUPS * CHUNKS + group); }
  RL_D u32 narrow_free(int group) const { return base + 8 * (1 + 3 * GROUPS * CHUNKS + GROUPS + group); }
  RL_D u32 a_free(int group) const { return base + 8 * (1 + 3 * GROUPS * CHUNKS + 2 * GROUPS + group); }
};

struct Problem {
  const TensorMap *p, *down, *earlier;  // p: where q goes, too
  const u16* x;                         // the state (first head)
  u16* heard;                           // logits that are heard
  float *state, *slopes;                // mean and squares of x; α and β
  float *sums, *gradients;              // of this block
  const void* targets;
  const float *s, *c;
  const u16* down_bias;
  int rows, target_stride, heard_stride, sums_stride;
  float eps;
};

// The tiles of a warpgroup: every (GROUPS × blocks)-th.
struct Tiles {
  int tile, round = 0;
  RL_D explicit Tiles(int group) : tile(blockIdx.x * GROUPS + group) {}
  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows; }
  RL_D int row() const { return tile * ROWS; }
  RL_D int next() const { return (tile + GROUPS * gridDim.x) * ROWS; }
  RL_D void advance() { tile += GROUPS * gridDim.x, ++round; }
};

RL_D u32 p_tile(u32 smem, int group, int chunk) { return smem + (group * CHUNKS + chunk) * TILE_BYTES; }
RL_D u32 a_tile(u32 smem, int group, int chunk) { return smem + A_TILES + (group * CHUNKS + chunk) * TILE_BYTES; }
RL_D u32 narrow_tile(u32 smem, int group) { return smem + NARROW_TILES + group * TILE_BYTES; }
