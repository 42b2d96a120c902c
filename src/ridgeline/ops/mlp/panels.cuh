// How 16 rows × 128 inner columns of a warp leave for memory: 32 columns at a time, through two panels of its own in turns.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int PANEL_BYTES = 16 * 64;               // 16 rows × 32 columns under the 64-byte swizzle
constexpr int PANELS_BYTES = 4 * 2 * PANEL_BYTES;  // a warpgroup's

struct Outlet {
  const TensorMap* map;
  u32 panels;  // the warpgroup's area
  // Columns 32 part … of the 128 from `column` on. `pairs`: packed as A fragments, 16 columns each.
  RL_D void send(int part, const u32 (&pairs)[8][4], int column, int row, const Place& me) const {
    const u32 panel = panels + (2 * me.warp + part % 2) * PANEL_BYTES;
    const int matrix = me.lane / 8, panel_row = me.lane % 8 + 8 * (matrix % 2);
    if (me.lane == 0) store_wait_read<1>();  // what this panel held has left
    sync_warp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32(&p)[4] = pairs[2 * part + i];
      store_matrices(panel + swizzle64(panel_row, 2 * i + matrix / 2), p[0], p[1], p[2], p[3]);
    }
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store_2d(map, panel, column + 32 * part, row + 16 * me.warp);
      store_commit();
    }
  }
  // The first half of the 128 columns leaves at once, the second between the next `products`, when its panels are free.
  RL_D void send_first(const u32 (&pairs)[8][4], int column, int row, const Place& me) const {
    send(0, pairs, column, row, me);
    send(1, pairs, column, row, me);
  }
  RL_D void send_between(int product, const u32 (&pairs)[8][4], int column, int row, const Place& me) const {
    if (product == HALVES - 1) send(2, pairs, column, row, me);
    if (product == HALVES) send(3, pairs, column, row, me);
  }
};

}  // namespace rl
