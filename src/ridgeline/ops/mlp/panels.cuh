// How 16 rows × 64 inner columns of a warp leave for memory: through a panel of its own.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int PANEL_BYTES = 16 * 128, PANELS_BYTES = 4 * PANEL_BYTES;  // a warp's, a warpgroup's

// Into the panel; `pairs`: packed as A fragments, 16 columns each, `panels`: the warpgroup's area.
RL_D void stage(u32 panels, const u32 (&pairs)[4][4], const Place& me) {
  const int matrix = me.lane / 8, panel_row = me.lane % 8 + 8 * (matrix % 2);
  const u32 mine = panels + me.warp * PANEL_BYTES;
  if (elected()) store_wait_read<0>();  // what the panel held has left
  sync_warp();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u32(&p)[4] = pairs[step];
    store_matrices(mine + swizzle128(panel_row, 2 * step + matrix / 2), p[0], p[1], p[2], p[3]);
  }
}

// From there to memory. Before a thread's loads of what comes next and its stores: the fence waits for both, and best under
// products, because it waits for what is under way too.
RL_D void send(const TensorMap* map, u32 panels, int column, int row, const Place& me) {
  const u32 mine = panels + me.warp * PANEL_BYTES;
  fence_async();
  sync_warp();
  if (elected()) {
    store_2d(map, mine, column, row + 16 * me.warp);
    store_commit();
  }
}

}  // namespace rl
