// The epilogues of the Hopper GEMM: what a consumer warp does with its share of a finished tile.
#pragma once
#include "gemm_layout.cuh"

#include "ridgeline/dropout.cuh"
#include "slope_codes.cuh"

// ---- epilogues, one panel (16 rows × 64 columns) a warp at a time; thread (row l / 4 + 8 h, columns 8 j + 2 (l % 4) + e)

constexpr bool BOTH = EPILOGUE == 1 && STORE_U, READS_CODES = CODED && EPILOGUE == 3;

struct Panel {
  u32 address;  // in shared memory
  int lane;
  RL_D u32 pair_of_groups(int j) const {  // where this lane's matrix row lies when column groups j and j + 1 move
    const int matrix = lane >> 3;
    return address + swizzle128((lane & 7) + 8 * (matrix & 1), j + (matrix >> 1));
  }
  RL_D void write(const u32 (&values)[8][2]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      store_matrices(pair_of_groups(j), values[j][0], values[j][1], values[j + 1][0], values[j + 1][1]);
  }
  RL_D void read(u32 (&values)[8][2]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 m[4];
      load_matrices(m, pair_of_groups(j));
      values[j][0] = m[0], values[j][1] = m[1], values[j + 1][0] = m[2], values[j + 1][1] = m[3];
    }
  }
  RL_D u32 code_place(int half) const {
    return address + half * HALF_CODES + (swizzle128(lane >> 3, lane & 7) ^ half * 64);
  }
  RL_D void write_codes(const u32 (&slopes)[8][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = encode_slopes(slopes[4 * half + j][0], slopes[4 * half + j][1]);
      store_shared_16(code_place(half), codes[0], codes[1], codes[2], codes[3]);
    }
  }
  RL_D void read_codes(u32 (&slopes)[8][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = load_shared_16(code_place(half));
      const u32 codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        slopes[4 * half + j][0] = decode_slopes<0>(codes[j]), slopes[4 * half + j][1] = decode_slopes<1>(codes[j]);
    }
    sync_warp();  // what follows writes where other lanes have read
  }
};
RL_D void publish() {  // what the warp wrote to shared memory, to the copy engine
  fence_async();
  __syncwarp();
}

template <int PENDING>
RL_D void wait_sent() {  // all but the last PENDING panels of this warp have left shared memory
  if (elected()) store_wait_read<PENDING>();
  __syncwarp();
}

// Dropout of rows y, y + 8 and columns x + 8 j + …: two lanes share a counter, each draws one row's and passes half on.
struct Mask {
  DropoutKeys site;
  u32 bias;
  float scale;
  int rows_per_sample, quads, first_sample;
  // Keep bits of this lane's pairs of column group at `x` (bit 15 first element, bit 31 second) for rows y and y + 8.
  RL_D void draw(u32 (&bits)[2], DropoutKeys keys, u32 row_counter, int x, int lane) const {
    const DropoutWords words = dropout_words(row_counter + (x >> 2), keys);
    const bool odd = lane & 1;
    const u32 other = __shfl_xor_sync(FULL, odd ? words.word_0 : words.word_1, 1);
    bits[0] = dropout_keep_bits(odd ? other : words.word_0, bias);
    bits[1] = dropout_keep_bits(odd ? words.word_1 : other, bias);
  }
};

struct Consumer {
  const Problem& p;
  const Mask& mask;
  u32 smem;
  Barriers bar;
  int group, warp, lane;       // warpgroup 0 or 1, warp in it
  u32 bias[TILE_N / 8];        // packed pairs of this lane's columns
  float sums[EPILOGUE == 3 ? TILE_N / 8 : 1][2];

  RL_D Panel panel(int i) const {
    const int index = READS_C ? warp * PANELS + i : (group * 4 + warp) * 2 + i;
    return {smem + PANEL_POOL + index * PANEL_BYTES, lane};
  }
  RL_D int codes_of(int x, int y) const { return code_line(x, y, p.n) + warp * (WARP_CODES / ROW_BYTES); }  // lines
  RL_D void load_bias(const u16* pointer, int column) {
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      const int x = column + 8 * j + 2 * (lane & 3);
      bias[j] = 0;
      if (HAS_BIAS && x + 1 < p.n) bias[j] = *reinterpret_cast<const u32*>(pointer + x);
      else if (HAS_BIAS && x < p.n) bias[j] = pointer[x];
    }
  }
  // C panel i of the tile at (column, row), which warpgroup `reader` takes, into its slot; the slot must be free.
  RL_D void fetch_c(int reader, int i, int column, int row) const {
    const u32 full = bar.c_full(reader, warp, i);
    barrier_expect(full, READS_CODES ? WARP_CODES : PANEL_BYTES);
    const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES);
    if (READS_CODES) copy_2d(panel(i).address, p.c, 0, codes_of(x, y), full);
    else copy_2d(panel(i).address, p.c, x, y + 16 * warp, full);
  }

  // Epilogues 0 and 1. Arithmetic comes before the waits, so that panels sent earlier have had time to leave.
  RL_D void linear(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row) {
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      u32 out[8][2], slope[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v0 = v[4 * j + 2 * h], v1 = v[4 * j + 2 * h + 1];
          if (HAS_BIAS) v0 += pair_low(bias[8 * (i % N_HALVES) + j]), v1 += pair_high(bias[8 * (i % N_HALVES) + j]);
          if (EPILOGUE == 1) slope[j][h] = activate<GELU_TANH, STORE_U>(v0, v1);
          out[j][h] = pack_pair(v0, v1);
        }
      wait_sent<BOTH ? 0 : 1>();
      if (BOTH && CODED) panel(1).write_codes(slope);
      if (BOTH && !CODED) panel(1).write(slope);
      const Panel target = panel(BOTH ? 0 : i & 1);
      target.write(out);
      publish();
      if (elected()) {
        if (BOTH) store_2d(p.u, panel(1).address, CODED ? 0 : x, CODED ? codes_of(x, y) : y);
        store_2d(p.d, target.address, x, y);
        store_commit();
      }
    }
  }

  // Epilogues that read C. Its panels come through the slots D leaves through; once a panel has left, its slot is
  // filled for the tile that follows, which the other warpgroup's warp of the same number takes.
  RL_D void with_c(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row, u32 phase, const Tiles& next) {
    const int next_column = next.column(), next_row = next.row();
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      const Panel here = panel(i);
      u32 c[8][2];
      float terms[2][2];
      if (EPILOGUE == 4) load_terms(terms, y);
      barrier_wait(bar.c_full(group, warp, i), phase);
      if (READS_CODES) here.read_codes(c);
      else here.read(c);
      if (EPILOGUE == 3) multiply(c, v, 8 * (i % N_HALVES));
      if (EPILOGUE == 2) add_residual(c, v, 8 * (i % N_HALVES), x, y);
      if (EPILOGUE == 4) add_terms(c, v, terms);
      here.write(c);
      publish();
      if (elected()) {
        store_2d(p.d, here.address, x, y);
        store_commit();
        if (i > 0 && next.valid()) {
          store_wait_read<1>();
          fetch_c(1 - group, i - 1, next_column, next_row);
        }
      }
    }
    if (next.valid() && elected()) {
      store_wait_read<0>();
      fetch_c(1 - group, PANELS - 1, next_column, next_row);
    }
  }
  RL_D void multiply(u32 (&c)[8][2], const float* v, int group_of_columns) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float d0 = v[4 * j + 2 * h] * half_low(c[j][h]);
        const float d1 = v[4 * j + 2 * h + 1] * half_high(c[j][h]);
        sums[group_of_columns + j][0] += d0;
        sums[group_of_columns + j][1] += d1;
        c[j][h] = pack_pair(d0, d1);
      }
  }
  RL_D void load_terms(float (&terms)[2][2], int y) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = y + (lane >> 2) + 8 * h;
      terms[h][0] = row < p.m ? p.terms[row] : 0.f;
      terms[h][1] = row < p.m ? p.terms[p.m + row] : 0.f;
    }
  }
  RL_D void add_terms(u32 (&c)[8][2], const float* v, const float (&terms)[2][2]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float t0 = fused_multiply_add(terms[h][1], pair_low(c[j][h]), terms[h][0]);
        const float t1 = fused_multiply_add(terms[h][1], pair_high(c[j][h]), terms[h][0]);
        c[j][h] = pack_pair(fused_multiply_add(p.factor, v[4 * j + 2 * h], t0),
                            fused_multiply_add(p.factor, v[4 * j + 2 * h + 1], t1));
      }
  }
  RL_D void add_residual(u32 (&c)[8][2], const float* v, int group_of_columns, int x, int y) {
    const int r = y + (lane >> 2) + 8 * (lane & 1);  // the row whose mask this lane draws
    const int sample = r / mask.rows_per_sample;
    const DropoutKeys keys = dropout_stream(mask.site, sample + mask.first_sample);
    const u32 row_counter = static_cast<u32>(r - sample * mask.rows_per_sample) * mask.quads;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 b = bias[group_of_columns + j];
      u32 keep[2];
      if (DROPOUT) mask.draw(keep, keys, row_counter, x + 8 * j + 2 * (lane & 3), lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float t0 = v[4 * j + 2 * h], t1 = v[4 * j + 2 * h + 1];
        if (HAS_BIAS) t0 += pair_low(b), t1 += pair_high(b);
        if (DROPOUT) {
          t0 = keep[h] & 0x8000u ? t0 * mask.scale : 0.f;
          t1 = static_cast<int>(keep[h]) < 0 ? t1 * mask.scale : 0.f;
        }
        c[j][h] = pack_pair(pair_low(c[j][h]) + t0, pair_high(c[j][h]) + t1);
      }
    }
  }
  // A segment's column sums: a row of `partials` for each consumer warp.
  RL_D void write_sums(float* partials, int column) {
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float s = sums[j][e];
        s += __shfl_xor_sync(FULL, s, 4);
        s += __shfl_xor_sync(FULL, s, 8);
        s += __shfl_xor_sync(FULL, s, 16);
        const int x = column + 8 * j + 2 * lane + e;
        if (lane < 4 && x < p.n) partials[x] = s;
        sums[j][e] = 0.f;
      }
  }
};
