// The copies of the product with weights in registers: what its fourth warpgroup's warps do.
#pragma once
#include "stationary_layout.cuh"

#include "slope_codes.cuh"
#include "stationary_rows.cuh"

// B of each warpgroup, then the segment's rows of A, all through one ring: a warp's work, one of whose lanes starts copies.
RL_D void produce(const Problem& p, const int4* schedule, u32 smem, Barriers bar) {
  Ring ring;
  u32 segment = 0;  // its parity
  // A chunk of columns K: rows from `row` on, or where K goes down the rows, columns from there on.
  const auto copy = [&](u32 place, const TensorMap* map, int chunk, int row, bool down, u32 full) {
    copy_2d(place, map, down ? row : 64 * chunk, down ? 64 * chunk : row, full);
  };
  // A free slot takes `unit`, of B without what stays elsewhere.
  const auto fill = [&](int unit, const TensorMap* map, int row, bool down, bool weights) {
    const int index = ring.first + unit;
    barrier_wait(bar.empty(index), ring.phase ^ 1);
    if (!elected()) return;
    int bytes = UNIT_BYTES;
#pragma unroll
    for (int part = 0; part < PER_UNIT; ++part)
      if (weights && resident(unit * PER_UNIT + part)) bytes -= TILE_BYTES;
    barrier_expect(bar.full(index), bytes);
#pragma unroll
    for (int part = 0; part < PER_UNIT; ++part) {
      const int chunk = unit * PER_UNIT + part;
      const u32 place = smem + index * UNIT_BYTES + part * TILE_BYTES;
      if (!weights || !resident(chunk)) copy(place, map, chunk, row, down, bar.full(index));
    }
  };
  const auto fill_resident = [&](int group, int row) {
    barrier_wait(bar.b_empty(group), segment ^ 1);
    if (!elected()) return;
    barrier_expect(bar.b_full(group), RESIDENT * TILE_BYTES);
#pragma unroll
    for (int chunk = 2; chunk < K_CHUNKS; chunk += 3)
      copy(resident_tile(smem, group, chunk), p.b, chunk, row, B_TRANSPOSED, bar.b_full(group));
  };
  for (Segment now = Segment{*schedule}.uniform(); now.valid(); now = Segment{*++schedule}.uniform()) {
    for (int group = 0; group < GROUPS; ++group, ring.advance())
      for (int unit = 0; unit < UNITS; ++unit) fill(unit, p.b, now.column(group), B_TRANSPOSED, true);
    for (int group = 0; RESIDENT && group < GROUPS; ++group) fill_resident(group, now.column(group));
    segment ^= 1;
#pragma unroll 1
    for (int tile = 0; tile < now.count(); ++tile, ring.advance())
      for (int unit = 0; unit < UNITS; ++unit) fill(unit, p.a, now.row(tile), false, false);
  }
}

// Tiles of C, and what the epilogue has for each row: a warp's work.
RL_D void produce_beside(const Problem& p, const Rows& rows, const int4* schedule, u32 smem, Barriers bar, int lane) {
  int sent = 0;
  RowScales next;
  for (Segment now = Segment{*schedule}.uniform(); now.valid(); now = Segment{*++schedule}.uniform()) {
    if (BY_ROW) next.load(rows, now.row(0), lane);
#pragma unroll 1
    for (int tile = 0; tile < now.count(); ++tile, ++sent) {
      const int buffer = sent & 1;
      const u32 before = (sent >> 1 & 1) ^ 1;
#pragma unroll
      for (int group = 0; READS_C && group < GROUPS; ++group) {
        barrier_wait(bar.c_empty(group, buffer), before);
        if (!elected()) continue;
        barrier_expect(bar.c_full(group, buffer), C_BYTES);
        const int x = now.column(group), y = now.row(tile);
        copy_2d(c_tile(smem, group, buffer), p.c, CODED ? 0 : x, CODED ? code_line(x, y, p.n) : y, bar.c_full(group, buffer));
      }
      if (BY_ROW) {
        const RowScales mine = next;
        if (tile + 1 < now.count()) next.load(rows, now.row(tile + 1), lane);
        barrier_wait(bar.rows_empty(buffer), before);
        mine.store(smem + ROW_NUMBERS + buffer * ROW_NUMBERS_BYTES, lane);
        sync_warp();
        if (lane == 0) barrier_arrive(bar.rows_full(buffer));
      }
    }
  }
}

// Sends a warpgroup's finished tiles to memory: one lane's work, or with STATS a warp's.
RL_D void deliver(const Problem& p, const Rows& rows, const int4* schedule, u32 smem, Barriers bar, int group, int lane) {
  int sent = 0;
  for (Segment now{*schedule}; now.valid(); now = {*++schedule})
    for (int tile = 0; tile < now.count(); ++tile, ++sent) {
      const int buffer = sent & 1, column = now.column(group), row = now.row(tile);
      barrier_wait(bar.staged(group, buffer), sent >> 1 & 1);
      if (lane == 0) {
        store_2d(p.d, staging(smem, group, buffer, 0), column, row);
        if (BOTH)
          store_2d(p.u, staging(smem, group, buffer, 1), CODED ? 0 : column, CODED ? code_line(column, row, p.n) : row);
        store_commit();
        store_wait_read<1>();
        if (sent > 0) barrier_arrive(bar.vacant(group, buffer ^ 1));
      }
      if (STATS) {
        sum_rows(rows, staging(smem, group, buffer, 0), column, row, p.n, lane);
        sync_warp();
      }
    }
  if (lane == 0) store_wait_read<0>();
}
