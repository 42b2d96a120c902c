// The join's part of kernels for many rows: whole rows between shared memory and the accumulators of a product, and the
// gradient of a norm with what is added to it.
//
// Macros: RMS, NORM_BIAS (backward: sums for it are wanted).
#pragma once
#include "many.cuh"

constexpr int KINDS = 1 + NORM_BIAS;  // of column sums

// A warp's 16 whole rows in an area of 64: where this lane finds four 8 × 8 matrices, of columns 8 j … 8 j + 15 (j even).
// A lane has of them what it has in acc[4 j …]: matrix 2 (j % 2) + h is row l / 4 + 8 h.
struct Lines {
  u32 start, base, turn;
  RL_D Lines(u32 area, const Place& me)
      : start(area + me.warp * 2048), base(start + (me.lane % 16) * 128), turn((me.lane / 16 ^ me.lane % 8) << 4) {}
  RL_D u32 at(int j) const { return base + j / 8 * PANEL_BYTES + ((j % 8 * 16) ^ turn); }
  // 64 columns of the rows leave by `store(from, column)`, the ones that end with matrices 2 (j % 2), all written before by
  // the whole warp.
  template <class Store>
  RL_D void send(int j, const Place& me, Store store) const {
    if (j % 8 != 6) return;
    fence_async();
    sync_warp();
    if (me.lane == 0) {
      store(start + j / 8 * PANEL_BYTES, j / 8 * 64);
      store_commit();
    }
  }
};

// The four lanes of a row have its sum each.
RL_D float row_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

RL_D float half_of(u32 pair, int e) { return e ? pair_high(pair) : pair_low(pair); }

// 1 / σ and μ of this lane's rows, and −μ / σ, which is reckoned when both have come.
struct Statistics {
  float rstd[2], mean[2], shift[2];
  // Rows `row` and `row + step` of `rows`.
  RL_D void load(const float* means, const float* rstds, int row, int step, int rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int here = row + step * h;
      rstd[h] = here < rows ? rstds[here] : 0.f;
      mean[h] = !RMS && here < rows ? means[here] : 0.f;
    }
  }
  RL_D void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[h] = RMS ? 0.f : -mean[h] * rstd[h];
  }
};

RL_D int sum_column(const Place& me) { return 8 * (me.lane / 8) + 2 * (me.lane % 4) + me.lane / 4 % 2; }

// Where a norm's gradient goes, and its statistics.
struct Backward {
  const TensorMap* dr;
  const float *mean, *rstd;
  float* partials;  // rows [kind][column], `stride` apart
  i64 stride;
};

// dr = dh'/ σ + slope · r + offset + dresidual, two numbers a row, where dh' = dh · weight.
struct Line {
  float slope[2], offset[2];
};

// What needs nothing of r: a row's sums of dh' and all rows' sums of dh, which go to `take` as below.
template <class Take>
RL_D void sum_plain(float (&plain)[2], const float (&acc)[WIDTH / 2], u32 vector, const Place& me, Take take) {
  const u32 weight = vector + 4 * (me.lane % 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float shift[8] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 w = load_shared_u32(weight + 16 * (4 * i + n));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float d = acc[4 * (4 * i + n) + k];
        shift[2 * n + k % 2] += d;
        plain[k / 2] = fmaf(d, half_of(w, k % 2), plain[k / 2]);
      }
    }
    if (NORM_BIAS) take(1, i, column_sum(shift, me.lane));
  }
}

// acc holds dh, and dh' after. With ADDED that is divided by σ already, and dresidual (`beside`) added, and `plain` is there
// (`sum_plain`). Sums over all rows of the warp, of dh · normal and of dh, of column 32 i + `sum_column`, go to
// `take(kind, i, sum)`.
template <bool ADDED, class Take>
RL_D Line sum_rows(float (&acc)[WIDTH / 2], float (&plain)[2], const Statistics& s, u32 vector, const Lines& held,
                   const Lines& beside, const Place& me, Take take) {
  const u32 weight = vector + 4 * (me.lane % 4);
  float inner[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float scale[8] = {}, shift[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 4 * i + 2 * half;
      u32 x[4], y[4];
      load_matrices(x, held.at(j));
      if (ADDED) load_matrices(y, beside.at(j));
      const u32 weights[2] = {load_shared_u32(weight + 16 * j), load_shared_u32(weight + 16 * (j + 1))};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int which = n / 4, h = n / 2 % 2, e = n % 2, column = 4 * half + 2 * which + e;
        float& d = acc[4 * (j + which) + 2 * h + e];
        const float normal = fmaf(half_of(x[2 * which + h], e), s.rstd[h], s.shift[h]);
        scale[column] += d * normal;
        if (!ADDED) shift[column] += d;
        d *= half_of(weights[which], e);
        inner[h] += d * normal;
        if (!ADDED) plain[h] += d;
        if (ADDED) d = fmaf(d, s.rstd[h], half_of(y[2 * which + h], e));
      }
    }
    take(0, i, column_sum(scale, me.lane));
    if (NORM_BIAS && !ADDED) take(1, i, column_sum(shift, me.lane));
  }
  Line line;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float whole = row_sum(inner[h]) * (1.f / WIDTH) * s.rstd[h];
    line.slope[h] = -s.rstd[h] * whole;
    line.offset[h] = RMS ? 0.f : -s.shift[h] * whole - row_sum(plain[h]) * (1.f / WIDTH) * s.rstd[h];
  }
  return line;
}

// dr takes the place of r, columns 8 FROM to 8 TO, and leaves by `store`.
template <bool ADDED, int FROM, int TO, class Store>
RL_D void finish_rows(const float (&acc)[WIDTH / 2], const Line& line, const Statistics& s, const Lines& held,
                      const Lines& beside, const Place& me, Store store) {
  u32 rows[2][4];  // these, and the next ones, which are under way
  load_matrices(rows[0], held.at(FROM));
#pragma unroll
  for (int j = FROM; j < TO; j += 2) {
    const u32(&x)[4] = rows[j / 2 % 2];
    u32 out[4];
    if (j + 2 < TO) load_matrices(rows[(j / 2 + 1) % 2], held.at(j + 2));
    if (!ADDED) load_matrices(out, beside.at(j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* d = acc + 4 * (j + i / 2) + 2 * (i % 2);
      const float slope = line.slope[i % 2], offset = line.offset[i % 2];
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        v[e] = ADDED ? fmaf(half_of(x[i], e), slope, d[e] + offset)
                     : fmaf(d[e], s.rstd[i % 2], fmaf(half_of(x[i], e), slope, half_of(out[i], e) + offset));
      out[i] = pack_pair(v[0], v[1]);
    }
    store_matrices(held.at(j), out[0], out[1], out[2], out[3]);
    held.send(j, me, store);
  }
}
