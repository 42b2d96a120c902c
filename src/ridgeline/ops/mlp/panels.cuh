// How 16 rows × 128 inner columns of a warp leave for memory: through panels of 32 columns of its own.
#pragma once
#include "tile.cuh"

namespace rl {

constexpr int PANEL_BYTES = 16 * 64;  // 16 rows × 32 columns under the 64-byte swizzle
RL_HD constexpr int panels_bytes(int count) { return 4 * count * PANEL_BYTES; }  // a warpgroup's, `count` a warp

// 16 columns, packed as an A fragment, into half of a panel.
RL_D void fill_panel(u32 panel, int half, const u32 (&pairs)[4], const Place& me) {
  const int matrix = me.lane / 8, row = me.lane % 8 + 8 * (matrix % 2);
  store_matrices(panel + swizzle64(row, 2 * half + matrix / 2), pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Step `step` < 8 (16 columns) of the 128 from `column` on, through two panels in turns; `panels` is the warpgroup's area.
RL_D void send_step(const TensorMap* map, u32 panels, int step, const u32 (&pairs)[4], int column, int row, const Place& me) {
  const u32 panel = panels + (2 * me.warp + step / 2 % 2) * PANEL_BYTES;
  if (step % 2 == 0) {  // what this panel held has left
    if (me.lane == 0) store_wait_read<1>();
    sync_warp();
  }
  fill_panel(panel, step % 2, pairs, me);
  if (step % 2) {
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store_2d(map, panel, column + 32 * (step / 2), row);
      store_commit();
    }
  }
}

// All 128 columns from `column` on at once, through four panels: one fence, which waits for a thread's loads and stores too.
RL_D void send(const TensorMap* map, u32 panels, const u32 (&pairs)[8][4], int column, int row, const Place& me) {
  const u32 mine = panels + 4 * me.warp * PANEL_BYTES;
  if (me.lane == 0) store_wait_read<0>();  // what the panels held has left
  sync_warp();
#pragma unroll
  for (int step = 0; step < 8; ++step) fill_panel(mine + step / 2 * PANEL_BYTES, step % 2, pairs[step], me);
  fence_async();
  sync_warp();
  if (me.lane == 0) {
#pragma unroll
    for (int part = 0; part < 4; ++part) store_2d(map, mine + part * PANEL_BYTES, column + 32 * part, row);
    store_commit();
  }
}

}  // namespace rl
