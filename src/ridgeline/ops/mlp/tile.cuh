// What the kernels of this folder share: one producer warp streams the weights through a ring of shared memory, two consumer
// warpgroups hold whole rows of the result in registers.
//
// Who has what: with few rows (ABREAST 2) a block has 64, each warpgroup finishes half of their columns, and the MLP's inner
// columns are divided between them. With many (ABREAST 1) a block has 128, each warpgroup 64.
//
// Macros: WIDTH (C: 128 or 256), STAGES (ring slots), ABREAST.
#pragma once
#include "access.cuh"
#include "layout.cuh"

#ifndef MLP
#define MLP 0
#endif

namespace rl {

constexpr int TILE_ROWS = 128 / ABREAST, THREADS = 384;
constexpr int HALVES = WIDTH / 128;                 // accumulators of 64 × 128 in a whole row
constexpr int HELD = WIDTH / ABREAST;               // columns that a warpgroup holds
constexpr int GROUPS = HELD / 32, LANE = HELD / 4;  // column groups; values of a row in a thread
constexpr int OWN_ROWS = 2;                         // rows a thread finishes
constexpr bool APART = ABREAST == 1;
constexpr int ROW_BLOCKS = 2 / ABREAST;             // of 64 rows, in a tile
// A slot of the ring: 64 rows of A and, behind them, all of the weight by 64 of K. The MLP's, of the weights alone: 64 of K by
// 128 of the result's columns, or 64 rows by 128 of K.
constexpr int SLOT_BYTES = MLP ? 128 * 128 : (64 + WIDTH) * 128;
constexpr int READERS = APART == MLP ? 8 : 4;       // warps that read a slot

struct Place {
  int group, warp, lane;  // consumer warpgroup 0 or 1 (the producer's is -1), warp in it, lane
  RL_D static Place here() {
    const int thread = threadIdx.x;
    return {warp_uniform(thread / 128) - 1, warp_uniform(thread / 32 % 4), thread % 32};
  }
  RL_D int thread() const { return 32 * warp + lane; }                 // in the warpgroup
  RL_D int column() const { return ABREAST == 2 ? group * HELD : 0; }  // the first that the warpgroup holds
};

// The tiles that a block works on, one after another.
struct Tiles {
  int tile, count, round;
  RL_D explicit Tiles(int rows) : tile(blockIdx.x), count(ceil_div(rows, TILE_ROWS)), round(0) {}
  RL_D bool valid() const { return tile < count; }
  RL_D void advance() {
    tile += gridDim.x;
    ++round;
  }
};

// ---- barriers, at a fixed place in shared memory
struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 rows_full(int block) const { return base + 8 * (2 * STAGES + block); }   // the MLP's rows of A are there
  RL_D u32 rows_empty(int block) const { return rows_full(ROW_BLOCKS + block); }  // … may be written again
  RL_D void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), READERS);
    }
    for (int block = 0; block < ROW_BLOCKS; ++block) {
      barrier_init(rows_full(block), 1);
      barrier_init(rows_empty(block), 8 / ROW_BLOCKS);
    }
    barrier_init_fence();
  }
};
constexpr int BARRIER_BYTES = 256;
static_assert(8 * (2 * STAGES + 4) <= BARRIER_BYTES, "barriers overflow");

RL_D void begin(Barriers bar) {
  if (threadIdx.x == 0) bar.init();
  sync_block();
  sync_warp();
}
// Weights are on their way before `wait_for_previous`: it is none that writes them. The next kernel is let in only when all
// operands have been asked for: once it has been launched, this one's joins take up to twice their time on every processor.

// A tile's rows of a tensor of WIDTH columns into L2: forward tensors come from memory.
RL_D void prefetch_rows(const u16* x, int rows, int tile) {
  const int first = tile * TILE_ROWS, count = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
  if (elected()) prefetch_bytes(x + static_cast<i64>(first) * WIDTH, count * WIDTH * 2);
}

// Consumers: what all of them have put into shared memory may be read by each.
RL_D void sync_consumers() { named_barrier<256>(5); }

// ---- the ring
struct Ring {
  u32 slots;
  Barriers bar;
  int slot;
  u32 phase;
  RL_D Ring(u32 slots, Barriers bar) : slots(slots), bar(bar), slot(0), phase(0) {}
  RL_D u32 address() const { return slots + slot * SLOT_BYTES; }
  RL_D void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  RL_D void skip(int count) {
    for (slot += count; slot >= STAGES; slot -= STAGES) phase ^= 1;
  }
  // Producer: wait until the slot is free; in the lane that is elected to start its copies, announce its bytes.
  RL_D bool begin() const {
    barrier_wait(bar.empty(slot), phase ^ 1);
    const bool mine = elected();
    if (mine) barrier_expect(bar.full(slot), SLOT_BYTES);
    return mine;
  }
  // Consumer: wait until the slot is full.
  RL_D void wait() const { barrier_wait(bar.full(slot), phase); }
};

// The consumers' products take turns, so that what one does between its products runs under the other's.
RL_D void begin_turn(const Place& me) { named_barrier<256>(3 + me.group); }
RL_D void end_turn(const Place& me) { named_arrive<256>(4 - me.group); }

// Consumer: the slot `back` places before `ring`'s has been read.
RL_D void release(const Ring& ring, int back, const Place& me) {
  const int slot = ring.slot >= back ? ring.slot - back : ring.slot - back + STAGES;
  if (me.lane == 0) barrier_arrive(ring.bar.empty(slot));
}

// … all of the COUNT slots before it.
template <int COUNT>
RL_D void release_all(const Ring& ring, int back, const Place& me) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) release(ring, back + COUNT - i, me);
}

// A slot of two boxes of 64 × 64 of a weight: from column `x` and row `y`, the second `dx` and `dy` further.
RL_D void fetch_boxes(Ring& ring, const TensorMap* map, int x, int y, int dx, int dy) {
  if (ring.begin()) {
    copy_2d(ring.address(), map, x, y, ring.bar.full(ring.slot));
    copy_2d(ring.address() + SLOT_BYTES / 2, map, x + dx, y + dy, ring.bar.full(ring.slot));
  }
  ring.advance();
}
// A slot of 128 weight rows × 64 of K (columns k …), the rows in the order of `owned`; the map is [rows / 32, j, q, e, K],
// its box [4, 4, 4, 2, 64].
RL_D void fetch_owned_rows(Ring& ring, const TensorMap* map, int k, int row) {
  if (ring.begin()) copy_5d(ring.address(), map, k, 0, 0, 0, row / 32, ring.bar.full(ring.slot));
  ring.advance();
}
// The operand `bytes` further.
RL_D u64 further(u64 operand, u32 bytes) { return operand + (bytes >> 4); }
// acc[64, 128] += A[64 rows, 64 of K] (packed fragments) · slot
template <int TRANSPOSED>
RL_D void product_registers(float (&acc)[64], const u32 (&a)[4][4], u32 slot) {
  const u64 b = TRANSPOSED ? operand_mn_major(slot, SLOT_BYTES / 2) : operand_k_major(slot);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_registers<128, TRANSPOSED>(acc, a[step], further(b, step * (TRANSPOSED ? 16 * 128 : 32)), 1);
}
// acc[64, 64] (+)= A[64 rows, 128 of K] · slot; `a` is the first of two K blocks of A in shared memory.
template <int TRANSPOSED>
RL_D void product_narrow(float (&acc)[32], u32 a, u32 slot, bool accumulate) {
  const u64 first = operand_k_major(a), b = TRANSPOSED ? operand_mn_major(slot, 8192) : operand_k_major(slot);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const u32 block = step / 4 * 8192, k = step % 4;
    wgmma<64, 0, TRANSPOSED>(acc, further(first, block + k * 32), further(b, block + k * (TRANSPOSED ? 16 * 128 : 32)),
                             accumulate || step > 0);
  }
}

// ---- from accumulators to whole rows: v[h][8 g + 2 j + e] of `OWN_ROWS` rows a thread, in the order of layout.cuh
template <int PARTS, int COUNT>
RL_D void take_rows(float (&v)[OWN_ROWS][LANE], const float (&acc)[PARTS][COUNT]) {
#pragma unroll
  for (int h = 0; h < OWN_ROWS; ++h)
#pragma unroll
    for (int i = 0; i < LANE; ++i) {
      const int place = i / 2 * 4 + 2 * h + i % 2;
      v[h][i] = acc[place / COUNT][place % COUNT];
    }
}

// Divided inner columns: both warpgroups have sums of all of the result's; each ends with both's sums of its half of them.
// `area`: 64 rows of WIDTH elements of 2 bytes, where A was; it may be written when warpgroup 1 has arrived at barrier 6.
RL_D void meet(float (&v)[OWN_ROWS][LANE], const float (&sums)[HALVES][64], u32 area, const Place& me) {
  constexpr int KEPT = HALVES * 32;
  const u32 mine = area + me.thread() * 16;
  const auto send = [&](int from) {
#pragma unroll
    for (int i = 0; i < KEPT; i += 4) {
      const float* x = &sums[(from + i) / 64][(from + i) % 64];
      store_shared_4(mine + i / 4 * 2048, x[0], x[1], x[2], x[3]);
    }
  };
  const auto add = [&](int from) {
#pragma unroll
    for (int i = 0; i < KEPT; i += 4) {
      float in[4];
      load_shared_4(in, mine + i / 4 * 2048);
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k / 2][i / 2 + k % 2] = sums[(from + i) / 64][(from + i) % 64 + k] + in[k];
    }
  };
  if (me.group == 0) {
    named_barrier<256>(6);
    send(KEPT);
    named_arrive<256>(7);
    named_barrier<256>(8);
    add(0);
  } else {
    named_barrier<256>(7);
    add(KEPT);
    send(0);
    named_arrive<256>(8);
  }
}

// The rows of a warpgroup, this thread's first one in it.
RL_D int first_row(const Place& me) { return 16 * me.warp + me.lane / 4; }

}  // namespace rl
