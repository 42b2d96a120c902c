// How 16 rows × 128 inner columns of a warp leave for memory: 32 columns at a time, through two panels of its own in turns.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int PANEL_BYTES = 16 * 64;             // 16 rows × 32 columns under the 64-byte swizzle
constexpr int PANELS_BYTES = 4 * 2 * PANEL_BYTES;  // a warpgroup's

// Step `step` < 8 (16 columns, packed as an A fragment) of the 128 from `column` on; `panels` is the warpgroup's area.
RL_D void send_step(const TensorMap* map, u32 panels, int step, const u32 (&pairs)[4], int column, int row, const Place& me) {
  const u32 panel = panels + (2 * me.warp + step / 2 % 2) * PANEL_BYTES;
  const int matrix = me.lane / 8, panel_row = me.lane % 8 + 8 * (matrix % 2);
  if (step % 2 == 0) {  // what this panel held has left
    if (me.lane == 0) store_wait_read<1>();
    sync_warp();
  }
  store_matrices(panel + swizzle64(panel_row, 2 * (step % 2) + matrix / 2), pairs[0], pairs[1], pairs[2], pairs[3]);
  if (step % 2) {
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store_2d(map, panel, column + 32 * (step / 2), row);
      store_commit();
    }
  }
}

}  // namespace rl
