// What mlp_many.cu is made of: shared memory, barriers, the order of rows in a tile, and the copies.
#pragma once
#include "many.cuh"

#include "../linear/slope_codes.cuh"

constexpr int SLOT_BYTES = ROWS_BYTES;  // 64 inner columns of either weight, or 64 whole rows
constexpr int WARP_PANEL_BYTES = 16 * 128;
constexpr int DZ = STAGES * SLOT_BYTES, CODES = DZ + 2 * ROWS_BYTES, PANELS_AT = CODES + 4 * CODE_TILE_BYTES;
constexpr int VECTOR = PANELS_AT + 8 * WARP_PANEL_BYTES, BARRIERS = VECTOR + VECTOR_BYTES;

struct Barriers : RingBarriers {
  RL_D u32 dz_full(int group) const { return base + 8 * (2 * STAGES + group); }
  RL_D u32 dz_empty(int group) const { return base + 8 * (2 * STAGES + 2 + group); }
  RL_D u32 codes_full(int group, int buffer) const { return base + 8 * (2 * STAGES + 4 + 2 * group + buffer); }
  RL_D u32 codes_empty(int group, int buffer) const { return base + 8 * (2 * STAGES + 8 + 2 * group + buffer); }
  RL_D void init() const {
    RingBarriers::init();
    for (int i = 0; i < 2; ++i) barrier_init(dz_full(i), 1), barrier_init(dz_empty(i), 4);
    for (int i = 0; i < 4; ++i) barrier_init(codes_full(0, i), 1), barrier_init(codes_empty(0, i), 4);
    barrier_init_fence();
  }
};
using Ring = SharedRing<SLOT_BYTES, Barriers>;

// ---- rows in another order: in a map of rank 4 its dimensions are columns, two rows, four times eight rows further, and so
// many times two rows further.

// The first of this lane's rows, of 64; the other one lies two rows further.
RL_D int row_of(const Place& me) { return 32 * (me.warp / 2) + 4 * (me.warp % 2) + 8 * (me.lane / 8) + me.lane / 4 % 2; }

// 64 rows from `row` on.
RL_D void copy_rows(u32 target, const TensorMap* map, int row, u32 barrier) {
#pragma unroll 1
  for (int i = 0; i < 2 * PANELS; ++i)
    copy_4d(target + i * (PANEL_BYTES / 2), map, i / 2 * 64, 0, 0, (row + i % 2 * 32) / 2, barrier);
}

// A warp's 16 of 64 rows from `row` on, 64 columns.
RL_D void store_sixteen(const TensorMap* map, u32 source, int column, int row, const Place& me) {
  store_4d(map, source, column, 0, 0, (row + 32 * (me.warp / 2) + 4 * (me.warp % 2)) / 2);
}

// Where this lane finds a line of codes in a tile, for the first of two loads of four matrices: 16 columns lane / 16, rows
// l / 4 + 8 (lane / 8 % 2) of this warp, in the order of a product that holds them down the columns.
RL_D u32 code_place(const Place& me) {
  const int line = 4 * (me.warp / 2) + me.lane % 8 / 2, part = 4 * (me.lane % 2) + 2 * (me.warp % 2) + me.lane / 8 % 2;
  return me.lane / 16 * WARP_CODES + swizzle128(line, part);
}

// ---- copies

struct Maps {
  const TensorMap *dz, *down, *up, *codes, *held, *beside;  // of rank 4: dz, held (r) and beside (dresidual)
};

// dz of a tile and, once its products are done, dresidual, each warpgroup's where it had the other.
RL_D void produce_rows(const Maps& maps, int rows, u32 smem, Barriers bar, u32 rank) {
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int group = i % 2;
      barrier_wait(bar.dz_empty(group), i < 2);
      if (!elected()) continue;
      barrier_expect(bar.dz_full(group), ROWS_BYTES);
      copy_rows(smem + DZ + group * ROWS_BYTES, i < 2 ? maps.dz : maps.beside, tiles.row() + 64 * group, bar.dz_full(group));
    }
}

// A warp's way through the ring, one of its lanes elected to start what comes into a free slot.
RL_D void produce(const Maps& maps, int rows, int chunks, Ring ring) {
  // Half of a weight's 64 inner columns, into both blocks: x, y of panel `n` of four.
  const auto fill = [&](const TensorMap* map, int x, int y, int step_x, int step_y) {
    ring.begin();
    if (elected()) {
      ring.announce(SLOT_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = 2 * static_cast<int>(ring.peer ^ 1) + i;
        copy_2d_both(ring.address() + n * PANEL_BYTES, map, x + n * step_x, y + n * step_y, ring.full());
      }
    }
    ring.advance();
  };
  for (Tiles tiles(rows, ring.peer ^ 1); tiles.valid(); tiles.advance()) {
    fill(maps.down, 0, 0, 0, 64);
#pragma unroll 1
    for (int k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) fill(maps.down, 64 * (k + 1), 0, 0, 64);
      fill(maps.up, 0, 64 * k, 64, 0);
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group, ring.advance()) {
      ring.begin();
      if (!elected()) continue;
      ring.announce(ROWS_BYTES);
      copy_rows(ring.address(), maps.held, tiles.row() + 64 * group, ring.full());
    }
  }
}

RL_D void produce_codes(const Maps& maps, int rows, int inner, int chunks, u32 smem, Barriers bar, u32 rank) {
  u32 phase = 0;
  for (Tiles tiles(rows, rank); tiles.valid(); tiles.advance())
#pragma unroll 1
    for (int k = 0; k < chunks; ++k) {
      for (int group = 0; group < 2; ++group) {
        const u32 full = bar.codes_full(group, k % 2);
        barrier_wait(bar.codes_empty(group, k % 2), phase ^ 1);
        if (!elected()) continue;
        barrier_expect(full, CODE_TILE_BYTES);
        copy_2d(smem + CODES + (2 * group + k % 2) * CODE_TILE_BYTES, maps.codes, 0,
                code_line(64 * k, tiles.row() + 64 * group, inner), full);
      }
      phase ^= k % 2;
    }
}
