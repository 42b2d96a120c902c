// How 16 rows × 128 inner columns of a warp leave for memory: through panels of 32 columns of its own.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int PANEL_BYTES = 16 * 64;  // 16 rows × 32 columns under the 64-byte swizzle

// A warp has PARTS panels, which leave together. Before its loads of what comes next and its stores: the fence waits for both.
template <int PARTS>
struct Outlet {
  static constexpr int BYTES = 4 * PARTS * PANEL_BYTES;  // a warpgroup's
  const TensorMap* map;
  u32 panels;  // the warpgroup's area
  // Columns 32 first … of the 128 from `column` on. `pairs`: packed as A fragments, 16 columns each.
  RL_D void send(int first, const u32 (&pairs)[8][4], int column, int row, const Place& me) const {
    const int matrix = me.lane / 8, panel_row = me.lane % 8 + 8 * (matrix % 2);
    const u32 mine = panels + PARTS * me.warp * PANEL_BYTES;
    if (me.lane == 0) store_wait_read<0>();  // what the panels held has left
    sync_warp();
#pragma unroll
    for (int i = 0; i < 2 * PARTS; ++i) {
      const u32(&p)[4] = pairs[2 * first + i];
      store_matrices(mine + i / 2 * PANEL_BYTES + swizzle64(panel_row, i % 2 * 2 + matrix / 2), p[0], p[1], p[2], p[3]);
    }
    fence_async();
    sync_warp();
    if (me.lane == 0) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        store_2d(map, mine + part * PANEL_BYTES, column + 32 * (first + part), row + 16 * me.warp);
      store_commit();
    }
  }
};

}  // namespace rl
