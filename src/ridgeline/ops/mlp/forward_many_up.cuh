// The warpgroups of forward_many.cu that make the hidden layer: 64 inner columns of 64 rows each at a time.
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
// acc[4 j + 2 h + e] row 8 j + 2 (l % 4) + e, of the warpgroup's 64, of inner column 16 w + l / 4 + 8 h.
struct Upward {
  u32 smem;
  Barriers bar;
  UpRing ring;
  const u16* bias;
  u8* codes;  // of this warp in a tile of codes
  int inner, rows;
  Place me;
  u32 matrix;  // where this lane's row of four 8 × 8 matrices lies in the hidden layer's slot
  float shift[2];  // its bias
  int made = 0;  // chunks of the hidden layer
  u32 code[8];

  RL_D void load_bias(int chunk) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = CHUNK * chunk + 16 * me.warp + me.lane / 4 + 8 * h;
      shift[h] = UP_BIAS && column < inner ? unpack_one(bias[column]) : 0.f;
    }
  }

  // 16 rows, 8 j and on: j even.
  RL_D void activate_rows(const float (&acc)[32], int j) {
    u32 out[4], slope[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v0 = acc[4 * j + 2 * i] + shift[i % 2], v1 = acc[4 * j + 2 * i + 1] + shift[i % 2];
      slope[i] = activate<GELU_TANH, true>(v0, v1);
      out[i] = pack_pair(v0, v1);
    }
    store_matrices_transposed(matrix + (made & 1) * PANEL_BYTES + j * 1024, out[0], out[1], out[2], out[3]);
    code[j] = encode_slopes(slope[0], slope[1]);
    code[j + 1] = encode_slopes(slope[2], slope[3]);
  }
  // What a product has left. The fence would wait for codes that are on their way: they go behind it.
  RL_D void activate_chunk(const float (&acc)[32], int chunk, int row) {
    barrier_wait(bar.hidden_empty(made & 1, me.group), (made >> 1 & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < 8; j += 2) activate_rows(acc, j);
    fence_async();
    sync_warp();
    if (me.lane == 0) barrier_arrive(bar.hidden_full(made & 1, me.group));
    ++made;
    if (row >= rows) return;
    u8* place = codes + 16 * (threadIdx.x % 32) +  // the lane, read anew: one register more would be spilled
                128 * static_cast<i64>(code_line(CHUNK * chunk, row + 64 * me.group, inner));
#pragma unroll
    for (int part = 0; part < 2; ++part)
      *reinterpret_cast<uint4*>(place + part * HALF_CODES) =
          uint4{code[4 * part], code[4 * part + 1], code[4 * part + 2], code[4 * part + 3]};
  }

  RL_D void release(int slot, bool ends_half, int half) const {
    if (me.lane != 0) return;
    ring.release(slot);
    if (ends_half) barrier_arrive(bar.h_empty(half));
  }
  RL_D void multiply(float (&acc)[32], const Cursor& now) {
    int last = 0;
#pragma unroll
    for (int quarter = 0; quarter < UP_PIECES; ++quarter) {
      ring.wait();
      if (now.chunk == 0 && quarter % 2 == 0) barrier_wait(bar.h_full(quarter / 2), now.tiles.round & 1);
      const u64 a = operand_k_major(ring.address());
      const u64 b = operand_k_major(warp_uniform(smem) + H + quarter * PANEL_BYTES + me.group * GROUP_BYTES);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)  // an operand's address is in units of 16 bytes
        wgmma<64, 0, 0>(acc, a + 2 * step, b + 2 * step, quarter + step > 0);
      wgmma_commit();
      if (quarter > 0) {
        wgmma_wait<1>();
        release(last, quarter == 2 && now.last(), 0);
      }
      last = ring.slot;
      ring.advance();
    }
    wgmma_wait<0>();
    wgmma_touch(acc);
    release(last, now.last(), 1);
  }

  RL_D void run(Cursor now) {
    float acc[32];
    for (; now.tiles.valid(); now.advance()) {
      load_bias(now.chunk);
      multiply(acc, now);
      activate_chunk(acc, now.chunk, now.tiles.row());
    }
  }
};
