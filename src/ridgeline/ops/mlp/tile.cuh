// What the kernels of this folder share: a block has 128 rows of the result, whole rows; one producer warp streams the
// weights through a ring of shared memory, two consumer warpgroups hold 64 rows each in registers. Or (ABREAST 2) it has 64
// rows, and each warpgroup half of their columns.
//
// Macros: WIDTH (C: 128 or 256), STAGES (ring slots), SPLIT: with 2, a pair of blocks (a cluster) divides the inner
// dimension of the same rows, exchanges half of its sums, and each block finishes 64 rows.
#pragma once
#include "access.cuh"
#include "layout.cuh"

#if SPLIT == 2
#define CLUSTER_DIMENSIONS __cluster_dims__(2, 1, 1)
#else
#define CLUSTER_DIMENSIONS
#endif

#ifndef ABREAST
#define ABREAST 1
#endif

namespace rl {

constexpr int TILE_ROWS = 128 / ABREAST, THREADS = 384;
constexpr int HALVES = WIDTH / 128;                 // accumulators of 64 × 128 in a whole row
constexpr int HELD = WIDTH / ABREAST;               // columns that a warpgroup holds
constexpr int GROUPS = HELD / 32, LANE = HELD / 4;  // column groups; values of a row in a thread
constexpr int OWN_ROWS = 2 / SPLIT;                 // rows a thread finishes
// A slot of the ring: 64 of K by 128 of the result's columns, or 128 rows by 64 of K; abreast 64 rows of A and, behind them,
// all of the weight by 64 of K.
constexpr int SLOT_BYTES = ABREAST == 2 ? (64 + WIDTH) * 128 : 128 * 128;
constexpr int EXCHANGE_BYTES = 128 * LANE * 4;     // a warpgroup's

struct Place {
  int group, warp, lane;  // consumer warpgroup 0 or 1 (the producer's is -1), warp in it, lane
  int split;              // this block in its pair
  RL_D static Place here() {
    const int thread = threadIdx.x;
    return {thread / 128 - 1, thread / 32 % 4, thread % 32, SPLIT == 2 ? static_cast<int>(cluster_rank()) : 0};
  }
  RL_D int thread() const { return 32 * warp + lane; }                 // in the warpgroup
  RL_D int column() const { return ABREAST == 2 ? group * HELD : 0; }  // the first that the warpgroup holds
  RL_D u32 peer() const { return split ^ 1; }
};

// The tiles of 128 rows that a block (or pair) works on, one after another.
struct Tiles {
  int tile, count, round;
  RL_D explicit Tiles(int rows) : tile(blockIdx.x / SPLIT), count(ceil_div(rows, TILE_ROWS)), round(0) {}
  RL_D bool valid() const { return tile < count; }
  RL_D void advance() {
    tile += gridDim.x / SPLIT;
    ++round;
  }
};

// ---- barriers, at a fixed place in shared memory
struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 rows_full(int group) const { return base + 8 * (2 * STAGES + group); }       // a warpgroup's rows of A are there
  RL_D u32 rows_empty(int group) const { return base + 8 * (2 * STAGES + 2 + group); }  // … may be written again
  RL_D u32 may_send(int group) const { return base + 8 * (2 * STAGES + 4 + group); }    // the peer's exchange area is free
  RL_D u32 received(int group) const { return base + 8 * (2 * STAGES + 6 + group); }    // the peer's sums are here
  RL_D void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(rows_full(i), 1);
      barrier_init(rows_empty(i), 4);
      barrier_init(may_send(i), 4);
      barrier_init(received(i), 1);
    }
    barrier_init_fence();
  }
};
constexpr int BARRIER_BYTES = 512;
static_assert(8 * (2 * STAGES + 8) <= BARRIER_BYTES, "barriers overflow");

// The block's barriers are there, for its peer too.
RL_D void begin(Barriers bar) {
  if (threadIdx.x == 0) bar.init();
  sync_block();
  sync_warp();
  if (SPLIT == 2) cluster_sync();
}
// What the kernel before has written may be read. Weights are on their way by then: it is none that writes them.
RL_D void begin_reading() {
  wait_for_previous();
  let_next_start();
}
// A tile's rows of a tensor of WIDTH columns, as far as this block of a pair goes, into L2: forward tensors come from memory.
RL_D void prefetch_rows(const u16* x, int rows, int tile) {
  const int share = TILE_ROWS / SPLIT, first = tile * TILE_ROWS + (SPLIT == 2 ? static_cast<int>(cluster_rank()) * share : 0);
  const int count = rows - first < share ? rows - first : share;
  if (count > 0) prefetch_bytes(x + static_cast<i64>(first) * WIDTH, count * WIDTH * 2);
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
  // Producer: wait until the slot is free and announce its bytes.
  RL_D void begin() const {
    barrier_wait(bar.empty(slot), phase ^ 1);
    barrier_expect(bar.full(slot), SLOT_BYTES);
  }
  // Consumer: wait until the slot is full.
  RL_D void wait() const { barrier_wait(bar.full(slot), phase); }
};

// The consumers' products take turns, so that what one does between its products runs under the other's. A turn reads at
// most STAGES slots: the one who is ahead must find them loaded before the other has read the first.
RL_D void begin_turn(const Place& me) { named_barrier<256>(3 + me.group); }
RL_D void end_turn(const Place& me) { named_arrive<256>(4 - me.group); }

// Consumer: the slot `back` places before `ring`'s has been read.
RL_D void release(const Ring& ring, int back, const Place& me) {
  const int slot = ring.slot >= back ? ring.slot - back : ring.slot - back + STAGES;
  if (me.lane == 0) barrier_arrive(ring.bar.empty(slot));
}

// A slot of 128 weight rows × 64 of K (columns k …); the map's box is 128 rows × 64.
RL_D void fetch_rows(Ring& ring, const TensorMap* map, int k, int row) {
  ring.begin();
  copy_2d(ring.address(), map, k, row, ring.bar.full(ring.slot));
  ring.advance();
}
// The same with the rows in the order of `owned`; the map is [rows / 32, j, q, e, K], its box [4, 4, 4, 2, 64].
RL_D void fetch_owned_rows(Ring& ring, const TensorMap* map, int k, int row) {
  ring.begin();
  copy_5d(ring.address(), map, k, 0, 0, 0, row / 32, ring.bar.full(ring.slot));
  ring.advance();
}
// A slot of 64 of K (the weight's rows k …) × 128 columns; the map's box is 64 × 64.
RL_D void fetch_columns(Ring& ring, const TensorMap* map, int k, int column) {
  ring.begin();
#pragma unroll
  for (int panel = 0; panel < 2; ++panel)
    copy_2d(ring.address() + panel * SLOT_BYTES / 2, map, column + 64 * panel, k, ring.bar.full(ring.slot));
  ring.advance();
}

// ---- products: acc[64, 128] (+)= A[64 rows, 64 of K] · slot
template <int TRANSPOSED>
RL_D u64 slot_operand(u32 slot, int step) {
  return TRANSPOSED ? operand_mn_major(slot + step * 16 * 128, SLOT_BYTES / 2) : operand_k_major(slot + step * 32);
}
template <int TRANSPOSED>
RL_D void product(float (&acc)[64], u32 a, u32 slot, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma<128, 0, TRANSPOSED>(acc, operand_k_major(a + step * 32), slot_operand<TRANSPOSED>(slot, step), accumulate || step > 0);
}
template <int TRANSPOSED>
RL_D void product_registers(float (&acc)[64], const u32 (*a)[4], u32 slot) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_registers<128, TRANSPOSED>(acc, a[step], slot_operand<TRANSPOSED>(slot, step), 1);
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

// SPLIT 2: this warpgroup's exchange area is free; its peer may send.
RL_D void let_peer_send(Barriers bar, const Place& me) {
  if (me.lane == 0) {
    if (me.warp == 0) barrier_expect(bar.received(me.group), EXCHANGE_BYTES);
    remote_arrive(bar.may_send(me.group), me.peer());
  }
}

// SPLIT 2: row half KEPT of the sums stays, the other one leaves. The caller branches: chosen by selection, all sums would
// stay in registers until after what it loads next.
template <int KEPT>
RL_D void keep_and_send(float (&v)[OWN_ROWS][LANE], const float (&acc)[HALVES][64], u32 there, u32 counted) {
#pragma unroll
  for (int i = 0; i < LANE; i += 4) {
    float out[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int low = (i + k) % 32 / 2 * 4 + (i + k) % 2;
      v[0][i + k] = acc[(i + k) / 32][low + 2 * KEPT];
      out[k] = acc[(i + k) / 32][low + 2 - 2 * KEPT];
    }
    remote_send(there + i / 4 * 2048, out[0], out[1], out[2], out[3], counted);
  }
}
// SPLIT 2: keep the sums of row half `split`, send the other half to the peer, add what it sends. `area` is this
// warpgroup's exchange area in either block. `meanwhile` runs when the sums have left and their registers are free.
template <class Meanwhile>
RL_D void exchange(float (&v)[OWN_ROWS][LANE], const float (&acc)[HALVES][64], u32 area, Barriers bar, u32 phase,
                   const Place& me, Meanwhile meanwhile) {
  barrier_wait(bar.may_send(me.group), phase);
  const u32 there = remote_address(area, me.peer()) + me.thread() * 16;
  const u32 counted = remote_address(bar.received(me.group), me.peer());
  if (me.split == 0) keep_and_send<0>(v, acc, there, counted);
  else keep_and_send<1>(v, acc, there, counted);
  meanwhile();
  barrier_wait(bar.received(me.group), phase);
#pragma unroll
  for (int i = 0; i < LANE; i += 4) {
    float in[4];
    load_shared_4(in, area + me.thread() * 16 + i / 4 * 2048);
#pragma unroll
    for (int k = 0; k < 4; ++k) v[0][i + k] += in[k];
  }
}

// The rows of a warpgroup, this thread's first one in it.
RL_D int first_row(const Place& me) { return 16 * me.warp + me.lane / 4 + 8 * me.split; }

}  // namespace rl
