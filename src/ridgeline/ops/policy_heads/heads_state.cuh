// What the heads' Hopper kernel knows of a tile's rows before it comes to their columns: targets, the logits that are heard,
// mean and scale.
#pragma once
#include "heads_layout.cuh"

constexpr int IGNORE = -100;

RL_D int target_of(const Problem& p, int row) {
  const i64 place = static_cast<i64>(row) * p.target_stride;
  if (TARGET_BYTES == 8) return static_cast<int>(static_cast<const i64*>(p.targets)[place]);
  if (TARGET_BYTES == 4) return static_cast<const int*>(p.targets)[place];
  if (TARGET_BYTES == 2) return static_cast<const short*>(p.targets)[place];
  return TARGET_SIGNED ? static_cast<const signed char*>(p.targets)[place] : static_cast<const u8*>(p.targets)[place];
}

// The sum, or the largest, over the four lanes that share a row.
RL_D float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
RL_D float quad_largest(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
RL_D float over_rows(float x) {  // the sum over the eight lanes of a column
  x += shuffle_xor(x, 4);
  x += shuffle_xor(x, 8);
  return x + shuffle_xor(x, 16);
}

// What a tile needs of memory besides p, asked for while the tile before goes forward: nothing there waits for it, where
// every fence of the way back would. Of the state the first head sums what comes, the others know mean and squares.
constexpr int STEPS = (WIDTH + 31) / 32, SHARE = (STEPS + PIECES - 1) / PIECES;  // of a row, 8 columns a lane; in a piece
struct Ahead {
  int targets[2];
  float origin[2], total[2], squares[2];         // first head: about the row's first number; else mean (total) and squares
  u32 heard[E > 0 ? E_DEPTH / 8 : 1][2];
};

// A thread has rows lane / 4 + 8 h of its warp's sixteen.
struct Rows {
  const Problem& p;
  int warp, lane, quad;
  float mean[2], scale[2];  // of this tile's rows: μ, r
  int targets[2];
  u32 earlier[E > 0 ? E_DEPTH / 16 : 1][4];
  Ahead ahead;

  RL_D Rows(const Problem& p, int warp, int lane) : p(p), warp(warp), lane(lane), quad(lane & 3) {}
  RL_D int row_of(int first, int h) const { return first + 16 * warp + (lane >> 2) + 8 * h; }

  RL_D void ask(int first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first, h);
      const bool inside = row < p.rows;
      ahead.targets[h] = inside ? target_of(p, row) : IGNORE;
      ahead.total[h] = E > 0 && inside ? p.state[row] : 0.f;
      ahead.squares[h] = E > 0 && inside ? p.state[p.rows + row] : 0.f;
#pragma unroll
      for (int j = 0; j < (E > 0 ? E_DEPTH / 8 : 0); ++j) {
        const int column = 8 * j + 2 * quad;
        ahead.heard[j][h] = 0;
        if (inside && column < E)
          ahead.heard[j][h] = *reinterpret_cast<const u32*>(p.heard + static_cast<i64>(row) * p.heard_stride + column);
      }
    }
  }
  RL_D const u16* state_row(int row) const { return p.x + static_cast<i64>(row < p.rows ? row : 0) * WIDTH; }
  RL_D int state_column(int piece, int i) const { return 8 * quad + 32 * (piece * SHARE + i); }
  RL_D void ask_state(uint4 (&eights)[2][SHARE], int piece, int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        const int column = state_column(piece, i);
        if (column < WIDTH) eights[h][i] = *reinterpret_cast<const uint4*>(state_row(row_of(first, h)) + column);
      }
  }
  RL_D void add_state(const uint4 (&eights)[2][SHARE], int piece) {
    if (piece == 0)
#pragma unroll
      for (int h = 0; h < 2; ++h) ahead.origin[h] = pair_low(shuffle(eights[h][0].x, lane & 28));
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        if (state_column(piece, i) >= WIDTH) continue;
        const u32 pairs[4] = {eights[h][i].x, eights[h][i].y, eights[h][i].z, eights[h][i].w};
#pragma unroll
        for (u32 pair : pairs) {
          const float low = pair_low(pair) - ahead.origin[h], high = pair_high(pair) - ahead.origin[h];
          ahead.total[h] += low + high;
          ahead.squares[h] = fused_multiply_add(low, low, fused_multiply_add(high, high, ahead.squares[h]));
        }
      }
  }

  // Mean of the state's rows and the sum of squares about it, for the heads to come, too.
  RL_D void measure_state(int first, float (&squares)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first, h);
      const float total = quad_sum(ahead.total[h]);
      mean[h] = ahead.origin[h] + total * (1.f / WIDTH);
      squares[h] = quad_sum(ahead.squares[h]) - total * total * (1.f / WIDTH);
      if (quad == 0 && row < p.rows) p.state[row] = mean[h], p.state[p.rows + row] = squares[h];
    }
  }
  // The same of the state and the earlier logits, which become an operand.
  RL_D void measure_heard(float (&squares)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = 0.f, square = 0.f;
#pragma unroll
      for (int j = 0; j < E_DEPTH / 8; ++j) {
        u32 pair = ahead.heard[j][h];
        if (8 * j + 2 * quad + 1 >= E) pair &= 0xffffu;
        earlier[j / 2][2 * (j & 1) + h] = pair;
        total += pair_low(pair) + pair_high(pair);
      }
      mean[h] = (ahead.total[h] * WIDTH + quad_sum(total)) * (1.f / (WIDTH + E));
#pragma unroll
      for (int j = 0; j < E_DEPTH / 8; ++j) {
        const int column = 8 * j + 2 * quad;
        const u32 pair = earlier[j / 2][2 * (j & 1) + h];
        const float low = column < E ? pair_low(pair) - mean[h] : 0.f, high = column + 1 < E ? pair_high(pair) - mean[h] : 0.f;
        square += low * low + high * high;
      }
      const float apart = ahead.total[h] - mean[h];
      squares[h] = ahead.squares[h] + apart * apart * WIDTH + quad_sum(square);
    }
  }
  RL_D void measure(int first, float (&deviation)[2]) {
    float squares[2];
    if (E == 0) measure_state(first, squares);
    else measure_heard(squares);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float variance = squares[h] * (1.f / (WIDTH + E)) + p.eps;
      targets[h] = ahead.targets[h], scale[h] = rsqrtf(variance), deviation[h] = variance * scale[h];
    }
  }
};
