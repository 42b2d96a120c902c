// How the MLP's kernels divide a block: both warpgroups take turns, so that what one does between its products runs under the
// other's. Either over the same 64 rows, the inner columns divided between them, or (APART) each over 64 rows of its own, every
// slot of the ring read by both.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int K_BLOCKS = WIDTH / 64, ROWS_BYTES = K_BLOCKS * 8192;  // 64 rows of A: [K block][64][64]
constexpr int WORKERS = 2 / ROW_BLOCKS;                             // warpgroups that divide the inner columns
constexpr int RING = ROW_BLOCKS * ROWS_BYTES, STAGING = RING + STAGES * SLOT_BYTES;

static_assert(STAGES >= 4, "a turn's slots are read before the first is free");

// The warpgroup's block of rows of the tile, their first row in it, where they lie; its first 64 inner columns, from which it
// goes on in steps of 64 WORKERS.
RL_D int row_block(const Place& me) { return APART ? me.group : 0; }
RL_D int block_row(int block) { return 64 * block; }
RL_D u32 block_place(u32 smem, int block) { return smem + block * ROWS_BYTES; }
RL_D int first_part(const Place& me) { return APART ? 0 : me.group; }

// Producer: a tile's rows of A, once those of the tile before have been read.
RL_D void fetch_rows(const TensorMap* map, u32 smem, Barriers bar, int tile, u32 round) {
  for (int block = 0; block < ROW_BLOCKS; ++block) {
    barrier_wait(bar.rows_empty(block), (round & 1) ^ 1);
    if (!elected()) continue;
    barrier_expect(bar.rows_full(block), ROWS_BYTES);
    for (int k = 0; k < K_BLOCKS; ++k)
      copy_2d(block_place(smem, block) + k * 8192, map, 64 * k, tile * TILE_ROWS + block_row(block), bar.rows_full(block));
  }
}

// Warpgroup 0 begins. Where inner columns are divided, the other skips the first turn's slots: a slot's barrier tells full from
// empty, not whose it is.
RL_D void begin_turns(Ring& ring, int slots, const Place& me) {
  if (me.group == 0) return;
  if (!APART) ring.skip(slots);
  end_turn(me);
}
RL_D void skip_turn(Ring& ring, int slots) {  // the other one's
  if (!APART) ring.skip(slots);
}

// A tile's whole sums, and the rows of A may be written again (APART has said so).
RL_D void finish_sums(float (&v)[OWN_ROWS][LANE], const float (&sums)[HALVES][64], u32 rows, Barriers bar, const Place& me) {
  if constexpr (APART) {
    take_rows(v, sums);
  } else {
    meet(v, sums, rows, me);
    fence_async();
    sync_warp();
    if (me.lane == 0) barrier_arrive(bar.rows_empty(0));
  }
}

}  // namespace rl
