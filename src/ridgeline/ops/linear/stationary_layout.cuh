// What every part of the product with weights in registers shares: sizes, barriers, tiles in shared memory, the walk over
// rows and columns.
#pragma once
#include "smem.cuh"

using namespace rl;

constexpr int ROWS = 64, COLUMNS = 64, GROUPS = 2;          // of A in a tile; of D a warpgroup; warpgroups
constexpr int TILE_BYTES = 64 * 128;                        // 64 rows of 64 values: a chunk of A, and a tile of D, U or C
// What comes and goes together. From K 512 on two chunks of 64 values, so that a warp has two parts of the epilogue at a time,
// whose arithmetic runs side by side: not with a factor (epilogue 3), where there is too little of it to gain by that, and
// not below, where two chunks would have four parts, which do not fit the registers.
constexpr int PER_UNIT = EPILOGUE != 3 && K_CHUNKS >= 8 && K_CHUNKS % 2 == 0 ? 2 : 1, UNITS = K_CHUNKS / PER_UNIT;
constexpr int UNIT_BYTES = PER_UNIT * TILE_BYTES;
// B of eight chunks fits the registers. With more, every third chunk's part of it lies in shared memory instead.
RL_D constexpr bool resident(int chunk) { return K_CHUNKS > 8 && chunk % 3 == 2; }
constexpr int RESIDENT = K_CHUNKS > 8 ? K_CHUNKS / 3 : 0;
constexpr int STAGES = LAPS * UNITS;                        // slots of the ring, each a unit; a tile of A takes UNITS of them
constexpr bool BOTH = EPILOGUE == 1 && STORE_U, READS_C = EPILOGUE >= 2;
constexpr bool BY_ROW = NORM || SCALED;  // the epilogue has a number for each row of A
// dynamic shared memory: ring, B that stays, two staging buffers a warpgroup, two tiles of C a warpgroup, barriers, two
// buffers of rows' numbers
constexpr int SLOPE_BYTES = CODED ? TILE_BYTES / 2 : TILE_BYTES, C_BYTES = SLOPE_BYTES;
constexpr int STAGED_BYTES = TILE_BYTES + (BOTH ? SLOPE_BYTES : 0);
constexpr int RESIDENTS = STAGES * UNIT_BYTES, STAGING = RESIDENTS + GROUPS * RESIDENT * TILE_BYTES;
constexpr int C_TILES = STAGING + GROUPS * 2 * STAGED_BYTES;
constexpr int BARRIERS = C_TILES + (READS_C ? GROUPS * 2 * C_BYTES : 0), ROW_NUMBERS = BARRIERS + 1024;
constexpr int ROW_NUMBERS_BYTES = 4 * ROWS;
static_assert(K_CHUNKS - RESIDENT <= 8, "B does not fit the registers");

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 c_full(int group, int buffer) const { return base + 8 * (2 * STAGES + 2 * group + buffer); }
  RL_D u32 c_empty(int group, int buffer) const { return base + 8 * (2 * STAGES + 4 + 2 * group + buffer); }
  RL_D u32 staged(int group, int buffer) const { return base + 8 * (2 * STAGES + 8 + 2 * group + buffer); }
  RL_D u32 vacant(int group, int buffer) const { return base + 8 * (2 * STAGES + 12 + 2 * group + buffer); }
  RL_D u32 rows_full(int buffer) const { return base + 8 * (2 * STAGES + 16 + buffer); }
  RL_D u32 rows_empty(int buffer) const { return base + 8 * (2 * STAGES + 18 + buffer); }
  RL_D u32 b_full(int group) const { return base + 8 * (2 * STAGES + 20 + group); }
  RL_D u32 b_empty(int group) const { return base + 8 * (2 * STAGES + 22 + group); }
};
static_assert(8 * (2 * STAGES + 24) <= 1024, "barriers overflow");

struct Problem {
  const TensorMap *a, *b, *c, *d, *u;
  int n, rows;
};

// Rows of a residual stream that a norm stands behind.
struct Rows {
  float2* shares;      // [64 columns each, rows]: sum and sum of squares (STATS)
  const float* rstd;   // [rows]
  const float* shift;  // NORM: b' of every column of D
  int count;
};

// A stretch of work: {column tile + 65536 · row of partial sums, first row tile, row tile step, count}.
struct Segment {
  int4 s;
  RL_D bool valid() const { return s.w > 0; }
  RL_D int count() const { return s.w; }
  RL_D int column(int group) const { return ((s.x & 0xffff) * GROUPS + group) * COLUMNS; }
  RL_D int sums_row() const { return s.x >> 16; }
  RL_D int row(int tile) const { return (s.y + tile * s.z) * ROWS; }
  // The same for a whole warp, as the compiler has to know: what copies are started with is made of it.
  RL_D Segment uniform() const { return {{warp_uniform(s.x), warp_uniform(s.y), warp_uniform(s.z), warp_uniform(s.w)}}; }
};

struct Ring {
  int first = 0;  // slot of the next tile
  u32 phase = 0;
  RL_D void advance() {
    first += UNITS;
    if (first == STAGES) first = 0, phase ^= 1;
  }
};

RL_D u32 resident_tile(u32 smem, int group, int chunk) {
  return smem + RESIDENTS + (group * RESIDENT + chunk / 3) * TILE_BYTES;
}

RL_D u32 c_tile(u32 smem, int group, int buffer) { return smem + C_TILES + (2 * group + buffer) * C_BYTES; }

RL_D u32 staging(u32 smem, int group, int buffer, int output) {
  return smem + STAGING + (2 * group + buffer) * STAGED_BYTES + output * TILE_BYTES;
}
