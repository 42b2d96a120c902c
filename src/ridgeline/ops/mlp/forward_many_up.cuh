// The warpgroup of forward_many.cu that makes the hidden layer: 64 inner columns of 128 rows at a time.
#pragma once
#include "forward_many.cuh"

// Where a warpgroup is: a chunk of a tile.
struct Cursor {
  Tiles tiles;
  int chunk = 0, chunks;
  RL_D Cursor(int rows, int chunks, u32 rank) : tiles(rows, rank), chunks(chunks) {}
  RL_D bool last() const { return chunk + 1 == chunks; }
  RL_D void advance() {
    if (!last()) ++chunk;
    else chunk = 0, tiles.advance();
  }
};

// The accumulators hold the chunk's transpose, as `stationary`'s do (codes are in their order): a thread has in
// acc[4 j + 2 h + e] row 8 j + 2 (l % 4) + e of inner column 16 w + l / 4 + 8 h. There are two sets, so that one chunk's
// products run under the GELU of the chunk before.
struct Upward {
  u32 smem;
  Barriers bar;
  UpRing ring;
  const u16* bias;
  u8* codes;  // of this lane in a tile of codes
  int inner, rows;
  Place me;
  u32 matrix;  // where this lane's row of four 8 × 8 matrices lies in the hidden layer's slot
  float shift[2];  // its bias
  int made = 0;  // chunks of the hidden layer
  u32 code[8];  // of half a chunk

  RL_D void load_bias(int chunk) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = CHUNK * chunk + 16 * me.warp + me.lane / 4 + 8 * h;
      shift[h] = UP_BIAS && column < inner ? unpack_one(bias[column]) : 0.f;
    }
  }

  // 16 rows, 8 j and on, of the chunk before: j even. Their codes are the half's `place` and the next.
  RL_D void activate_rows(const float (&old)[ROWS / 2], int j, int place) {
    u32 out[4], slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v0 = old[4 * j + 2 * i] + shift[i % 2], v1 = old[4 * j + 2 * i + 1] + shift[i % 2];
      slope[i] = activate<GELU_TANH, true>(v0, v1);
      out[i] = pack_pair(v0, v1);
    }
    store_matrices_transposed(matrix + (made & 1) * PANEL_BYTES + j * 1024, out[0], out[1], out[2], out[3]);
    code[place] = encode_slopes(slope[0], slope[1]);
    code[place + 1] = encode_slopes(slope[2], slope[3]);
  }

  RL_D void store_codes(int chunk, int row) const {
    if (row >= rows) return;
    u8* place = codes + 128 * static_cast<i64>(code_line(CHUNK * chunk, row, inner));
#pragma unroll
    for (int part = 0; part < 2; ++part)
      *reinterpret_cast<uint4*>(place + part * HALF_CODES) =
          uint4{code[4 * part], code[4 * part + 1], code[4 * part + 2], code[4 * part + 3]};
  }
  // The chunk before is there for others. The fence waits for codes that are on their way: the last ones go behind it.
  RL_D void give() {
    fence_async();
    sync_warp();
    if (me.lane == 0) barrier_arrive(bar.hidden_full(made & 1));
    ++made;
  }
  // A quarter of the chunk before, in whose tile `row` is the first: 32 rows.
  RL_D void activate_quarter(const float (&old)[ROWS / 2], int quarter, int chunk, int row) {
    const int half = quarter / 2;
    if (quarter == 0) {
      load_bias(chunk);
      barrier_wait(bar.hidden_empty(made & 1), (made >> 1 & 1) ^ 1);
    }
#pragma unroll
    for (int j = 4 * quarter; j < 4 * quarter + 4; j += 2) activate_rows(old, j, j % 8);
    if (quarter == 3) give();
    if (quarter % 2 == 1) store_codes(chunk, row + 64 * half);
  }

  // Products of a quarter of the width, begun.
  RL_D void multiply(float (&acc)[ROWS / 2], const Cursor& now, int quarter) {
    ring.wait();
    if (now.chunk == 0 && quarter % 2 == 0) barrier_wait(bar.h_full(quarter / 2), now.tiles.round & 1);
    // Reckoned anew: sixteen operands that never change would take registers, not instructions.
    const u64 a = operand_k_major(ring.address()), b = operand_k_major(warp_uniform(smem) + H + quarter * PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)  // an operand's address is in units of 16 bytes
      wgmma<ROWS, 0, 0>(acc, a + 2 * step, b + 2 * step, quarter + step > 0);
    wgmma_commit();
  }
  RL_D void release(const Cursor& now, int quarter) {
    wgmma_wait<0>();
    if (me.lane == 0) {
      ring.release(ring.slot);
      if (quarter % 2 == 1 && now.last()) barrier_arrive(bar.h_empty(quarter / 2));
    }
    ring.advance();
  }

  // Products of a chunk into `acc`, and meanwhile what is left to do of the chunk before (if OLD).
  template <bool OLD>
  RL_D void chunk(float (&acc)[ROWS / 2], const float (&old)[ROWS / 2], const Cursor& now, int before, int row) {
#pragma unroll
    for (int quarter = 0; quarter < UP_PIECES; ++quarter) {
      multiply(acc, now, quarter);
      if (OLD) activate_quarter(old, quarter, before, row);
      release(now, quarter);
    }
    wgmma_touch(acc);
  }
  RL_D void finish(const float (&old)[ROWS / 2], int before, int row) {
#pragma unroll
    for (int quarter = 0; quarter < UP_PIECES; ++quarter) activate_quarter(old, quarter, before, row);
  }

  RL_D void run(Cursor now) {
    float even[ROWS / 2], odd[ROWS / 2];
    if (!now.tiles.valid()) return;
    chunk<false>(even, odd, now, 0, 0);
    while (true) {
      int before = now.chunk, row = now.tiles.row();
      now.advance();
      if (!now.tiles.valid()) return finish(even, before, row);
      chunk<true>(odd, even, now, before, row);
      before = now.chunk, row = now.tiles.row();
      now.advance();
      if (!now.tiles.valid()) return finish(odd, before, row);
      chunk<true>(even, odd, now, before, row);
    }
  }
};
