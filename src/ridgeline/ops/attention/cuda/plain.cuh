// The plan of plain attention (no relative term, no dropout) over windows of any length.
//
// A unit is GROUPS neighbouring row blocks of one head, a block for each warpgroup of a persistent thread block. What the
// blocks meet on their way, a pair of tiles after the other, streams through a ring in shared memory that all warpgroups of
// the thread block read, each at its own pace; what belongs to a warpgroup's block is there twice, for a unit and the next.
// A warp of its own starts all copies: that takes a thread longer than a square takes a warpgroup. No product has an
// operand that other warps computed: probabilities and their gradients go from accumulators to operands in registers.
//
// Units take turns there and back, so that a thread block that had a long one of a head's units gets a short one next.
#pragma once
#include "tiles.cuh"

namespace rl {

constexpr int GROUPS = WARPGROUPS, STAGES = RING_STAGES, PAIR = 2 * TILE;
// With three or four warpgroups a whole one starts the copies, and leaves its registers to them.
constexpr bool UNEVEN = GROUPS >= 3;
constexpr int THREADS = 128 * GROUPS + (UNEVEN ? 128 : WARP);

RL_HD constexpr u32 units(int bytes) { return bytes >> 4; }  // of operand addresses

// Shared memory of a kernel whose warpgroups own OWN tiles each, twice; STATS: row statistics come with each pair.
template <int OWN, bool STATS>
struct Place {
  static constexpr int OWN_AT = STAGES * PAIR, OWN_BYTES = OWN * TILE, STATS_AT = OWN_AT + 2 * GROUPS * OWN_BYTES;
  static constexpr int STATS_BYTES = 64 * 8, BARRIERS_AT = STATS_AT + (STATS ? STAGES * STATS_BYTES : 0);
  static constexpr int BARRIERS = 2 * STAGES + 4 * GROUPS, BYTES = BARRIERS_AT + 8 * BARRIERS;
  u32 smem;
  int group, warp, lane;

  RL_D Place()
      : smem(dynamic_smem()), group(warp_uniform(threadIdx.x >> 7)), warp(warp_uniform(threadIdx.x >> 5 & 3)),
        lane(static_cast<int>(threadIdx.x & 31)) {}
  RL_D u32 full(u32 tile) const { return smem + BARRIERS_AT + 8 * (tile % STAGES); }
  RL_D u32 empty(u32 tile) const { return smem + BARRIERS_AT + 8 * (STAGES + tile % STAGES); }
  RL_D u32 own_full(int group, int round) const { return smem + BARRIERS_AT + 8 * (2 * STAGES + 2 * group + (round & 1)); }
  RL_D u32 own_empty(int group, int round) const { return own_full(group, round) + 8 * (2 * GROUPS); }
  RL_D u32 pair(u32 tile) const { return smem + tile % STAGES * PAIR; }
  RL_D u32 stats(u32 tile) const { return smem + STATS_AT + tile % STAGES * STATS_BYTES; }
  RL_D u32 own(int group, int round) const { return smem + OWN_AT + (2 * group + (round & 1)) * OWN_BYTES; }
  RL_D bool copies() const { return group == GROUPS; }

  RL_D void start() const {
    if (threadIdx.x == 0) {
      for (int b = 0; b < BARRIERS; ++b)
        barrier_init(smem + BARRIERS_AT + 8 * b,
                     b >= STAGES && b < 2 * STAGES ? 4 * GROUPS : b >= 2 * STAGES + 2 * GROUPS ? 4 : 1);
      barrier_init_fence();
      fence_async();
    }
    sync_block();
  }
  RL_D void wait_full(u32 tile) const { barrier_wait(full(tile), tile / STAGES & 1); }
  RL_D void wait_own(int round) const { barrier_wait(own_full(group, round), round >> 1 & 1); }
  // Before a tile is copied to the place of the one STAGES before it.
  RL_D void wait_empty(u32 tile) const {
    if (tile >= STAGES) barrier_wait(empty(tile), (tile / STAGES - 1) & 1);
  }
  RL_D void wait_own_empty(int group, int round) const {
    if (round >= 2) barrier_wait(own_empty(group, round), ((round >> 1) - 1) & 1);
  }
  // By one lane of each warp, once all of its products with the tile are done; by more, each for a warpgroup that has none.
  RL_D void release(u32 tile, int lanes = 1) const {
    sync_warp();
    if (lane < lanes) barrier_arrive(empty(tile));
  }
  RL_D void release_own(int round) const {
    sync_warp();
    if (lane == 0) barrier_arrive(own_empty(group, round));
  }
};

// A unit's number by head and block, the longest block 0: where rounds are few, all of the longest first, so that sums come
// out even; otherwise a head's units one after the other, so that what they read is in the cache.
struct Turn {
  int whose, block;
  RL_D static bool by_length(int units) { return units < 8 * static_cast<int>(gridDim.x); }
  // From number / divisor and what is left: by length the divisor is the number of heads, otherwise of a head's units.
  RL_D Turn(bool by_length, int quotient, int rest)
      : whose(by_length ? rest : quotient), block(by_length ? quotient : rest) {}
  RL_D Turn(int number, int blocks, int units) {
    const int heads = units / blocks;
    const bool lengths = by_length(units);
    whose = lengths ? number % heads : number / blocks, block = lengths ? number / heads : number % blocks;
  }
};

// Registers for those that compute.
RL_D void share_registers(bool copies) {
  if (!UNEVEN) return;
  if (copies)
    registers_down<24>();
  else
    registers_up<GROUPS == 3 ? 160 : 112>();
}

// Queries of a step whose block are keys, and keys of one whose block are queries: 32 or 64.
constexpr int STEP = STEP_COLUMNS;

// Backward: S and dP of a step, from two tiles of the warpgroup's own and the first STEP rows of a pair that streams by.
RL_D void start_scores(float (&s)[STEP / 2], float (&dp)[STEP / 2], u32 own, u32 second, u32 pair) {
  wgmma_fence();
  multiply_tiles(s, own, pair, true);
  multiply_tiles(dp, second, pair + units(TILE), true);
  wgmma_commit();
}
RL_D void await_scores(float (&s)[STEP / 2], float (&dp)[STEP / 2]) {
  wgmma_wait<0>();
  wgmma_touch(s);
  wgmma_touch(dp);
}

// The thread block's unit in a round, or one beyond the last.
RL_D int unit_in(int round) {
  const int turn = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return round * static_cast<int>(gridDim.x) + turn;
}

// Where a warp leaves its share of the column sums of a joint gradient [dQ | dK | dV] of `width` columns, a row for each
// warp that computes: zeroed here in the columns from `first` to `last`, and so are rows that belong to nobody.
template <typename Place>
RL_D float* start_column_sums(float* sums, const Place& p, int rows, int width, int first, int last) {
  const int own = (static_cast<int>(blockIdx.x) * GROUPS + p.group) * 4 + p.warp, all = static_cast<int>(gridDim.x) * GROUPS * 4;
#pragma unroll 1
  for (int row = own; row < rows; row += all)
#pragma unroll 1
    for (int x = first + p.lane; x < last; x += WARP) sums[static_cast<i64>(row) * width + x] = 0.f;
  sync_warp();
  return sums + static_cast<i64>(own) * width;
}

}  // namespace rl
