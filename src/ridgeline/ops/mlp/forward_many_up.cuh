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
  Ring ring;
  const u16* bias;
  u8* codes;  // of this lane in a tile of codes
  int inner, rows;
  Place me;
  u32 matrix;  // where this lane's row of four 8 × 8 matrices lies in the hidden layer's slot
  float shift[2];  // its bias
  int made = 0;  // chunks of the hidden layer
  u32 code[ROWS / 8];

  RL_D void load_bias(int chunk) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = CHUNK * chunk + 16 * me.warp + me.lane / 4 + 8 * h;
      shift[h] = UP_BIAS && column < inner ? unpack_one(bias[column]) : 0.f;
    }
  }

  // 16 rows, 8 j and on, of the chunk before: j even.
  RL_D void activate_rows(const float (&old)[ROWS / 2], int j) {
    u32 out[4], slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v0 = old[4 * j + 2 * i] + shift[i % 2], v1 = old[4 * j + 2 * i + 1] + shift[i % 2];
      slope[i] = activate<GELU_TANH, true>(v0, v1);
      out[i] = pack_pair(v0, v1);
    }
    store_matrices_transposed(matrix + (made & 1) * PANEL_BYTES + j * 1024, out[0], out[1], out[2], out[3]);
    code[j] = encode_slopes(slope[0], slope[1]);
    code[j + 1] = encode_slopes(slope[2], slope[3]);
  }

  // Half of the chunk before.
  RL_D void activate_half(const float (&old)[ROWS / 2], int half) {
    if (half == 0) barrier_wait(bar.hidden_empty(made & 1), (made >> 1 & 1) ^ 1);
#pragma unroll
    for (int j = 8 * half; j < 8 * half + 8; j += 2) activate_rows(old, j);
  }

  // The chunk before is whole. The fence would wait for the codes, too, if they were on their way already.
  RL_D void send(const Cursor& before) {
    fence_async();
    sync_warp();
    if (me.lane == 0) barrier_arrive(bar.hidden_full(made & 1));
    ++made;
    const int row = before.tiles.row();
    if (row >= rows) return;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const i64 line = code_line(CHUNK * before.chunk, row + 64 * (part / 2), inner) + HALF_CODES / 128 * (part % 2);
      *reinterpret_cast<uint4*>(codes + 128 * line) =
          uint4{code[4 * part], code[4 * part + 1], code[4 * part + 2], code[4 * part + 3]};
    }
  }

  // Half of the width's products, begun.
  RL_D void multiply(float (&acc)[ROWS / 2], const Cursor& now, int half) {
    ring.wait();
    if (now.chunk == 0) barrier_wait(bar.h_full(half), now.tiles.round & 1);
    const u64 a = operand_k_major(ring.address()), b = operand_k_major(smem + H + 2 * half * PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step)  // an operand's address is in units of 16 bytes
      wgmma<ROWS, 0, 0>(acc, a + step / 4 * (PIECE_BYTES / 32) + 2 * (step % 4), b + step / 4 * (PANEL_BYTES / 16) + 2 * (step % 4),
                        half + step > 0);
    wgmma_commit();
  }
  RL_D void release(const Cursor& now, int half) {
    wgmma_wait<0>();
    if (me.lane == 0) {
      ring.release(ring.slot);
      if (now.last()) barrier_arrive(bar.h_empty(half));
    }
    ring.advance();
  }

  // Products of a chunk into `acc`, and meanwhile what is left to do of the chunk before (if OLD).
  template <bool OLD>
  RL_D void chunk(float (&acc)[ROWS / 2], const float (&old)[ROWS / 2], const Cursor& now, const Cursor& before) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply(acc, now, half);
      if (OLD) activate_half(old, half);
      if (OLD && half == 1) send(before);
      if (half == 1) load_bias(now.chunk);
      release(now, half);
    }
    wgmma_touch(acc);
  }
  RL_D void finish(const float (&old)[ROWS / 2], const Cursor& before) {
    activate_half(old, 0);
    activate_half(old, 1);
    send(before);
  }

  RL_D void run(Cursor now) {
    float even[ROWS / 2], odd[ROWS / 2];
    if (!now.tiles.valid()) return;
    chunk<false>(even, odd, now, now);
    while (true) {
      Cursor before = now;
      now.advance();
      if (!now.tiles.valid()) return finish(even, before);
      chunk<true>(odd, even, now, before);
      before = now;
      now.advance();
      if (!now.tiles.valid()) return finish(odd, before);
      chunk<true>(even, odd, now, before);
    }
  }
};
