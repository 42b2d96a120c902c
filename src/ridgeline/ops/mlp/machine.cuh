// How the MLP's kernels divide a block: one machine whose warpgroups take turns over the same 64 rows and divide the inner
// columns, or (APART) two machines, each a producer and a warpgroup with rows, ring and barriers of its own.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int K_BLOCKS = WIDTH / 64, ROWS_BYTES = K_BLOCKS * 8192;  // 64 rows of A: [K block][64][64]
constexpr int MACHINES = APART ? 2 : 1, WORKERS = 2 / MACHINES;     // warpgroups of a machine
constexpr int RING = MACHINES * ROWS_BYTES, STAGING = RING + MACHINES * STAGES * SLOT_BYTES;

static_assert(STAGES >= 4, "a turn's slots are read before the first is free");

struct Machine {
  u32 rows, ring;
  Barriers bar;
  int first_row;  // in a tile
  RL_D static Machine of(int machine, u32 smem, u32 barriers) {
    return {smem + machine * ROWS_BYTES, smem + RING + machine * STAGES * SLOT_BYTES, {barriers + machine * BARRIER_BYTES},
            64 * machine};
  }
};

// The first 64 inner columns of a warpgroup; it goes on in steps of 64 WORKERS.
RL_D int first_part(const Place& me) { return APART ? 0 : me.group; }

// The workers of a machine take turns, so that what one does between its products runs under the other's: a slot's barrier
// tells full from empty, not whose turn it is. Warpgroup 0 begins; the other skips the first turn's slots.
RL_D void begin_turns(Ring& ring, int slots, const Place& me) {
  if (APART || me.group == 0) return;
  ring.skip(slots);
  end_turn(me);
}
RL_D void take_turn(const Place& me) {
  if (!APART) begin_turn(me);
}
RL_D void pass_turn(const Place& me) {
  if (!APART) end_turn(me);
}
RL_D void skip_turn(Ring& ring, int slots) {  // the other one's
  if (!APART) ring.skip(slots);
}

// A tile's whole sums, and the rows of A may be written again (APART has said so).
RL_D void finish_sums(float (&v)[OWN_ROWS][LANE], const float (&sums)[HALVES][64], const Machine& machine, const Place& me) {
  if constexpr (APART) {
    take_rows(v, sums);
  } else {
    meet(v, sums, machine.rows, me);
    fence_async();
    sync_warp();
    if (me.lane == 0) barrier_arrive(machine.bar.rows_empty());
  }
}

}  // namespace rl
