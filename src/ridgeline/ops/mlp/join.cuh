// What follows a product whose rows a block holds whole: forward the join (bias, dropout, residual, norm), backward the
// join's gradient. Values come as in layout.cuh, so a lane reads and writes 16 bytes of eight neighbouring columns.
//
// Macros: RMS, DROPOUT; forward RESIDUAL, NORM_BIAS; backward RESIDUAL, NORM_BIAS, BRANCH_BIAS.
#pragma once
#include "columns.cuh"
#include "ridgeline/dropout.cuh"
#include "tile.cuh"

namespace rl {

struct Mask {
  DropoutKeys site;
  u32 bias;
  float scale;
  int rows_per_sample, first_sample;
  RL_D static Mask make(const i64* seed_step, u32 site, u32 threshold, float scale, int rows_per_sample, int first_sample) {
    if (!DROPOUT) return {};
    return {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, first_sample};
  }
};
// The mask of one row: eight values at a time.
struct RowMask {
  DropoutKeys keys;
  u32 counter;
  RL_D RowMask(const Mask& mask, int row) : keys{}, counter(0) {
    if (!DROPOUT) return;
    const int sample = row / mask.rows_per_sample;
    keys = dropout_stream(mask.site, sample + mask.first_sample);
    counter = static_cast<u32>(row - sample * mask.rows_per_sample) * (WIDTH / 4);
  }
  RL_D void apply(float* v, int column, const Mask& mask) const {
#pragma unroll
    for (int half = 0; half < 2 * DROPOUT; ++half) {
      const DropoutWords words = dropout_words(counter + column / 4 + half, keys);
      const u32 bits[2] = {dropout_keep_bits(words.word_0, mask.bias), dropout_keep_bits(words.word_1, mask.bias)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = v[4 * half + i];
        x = bits[i / 2] >> (i % 2 ? 31 : 15) & 1 ? x * mask.scale : 0.f;
      }
    }
  }
};

RL_D void unpack_eight(float* v, uint4 pairs) {
  v[0] = pair_low(pairs.x), v[1] = pair_high(pairs.x), v[2] = pair_low(pairs.y), v[3] = pair_high(pairs.y);
  v[4] = pair_low(pairs.z), v[5] = pair_high(pairs.z), v[6] = pair_low(pairs.w), v[7] = pair_high(pairs.w);
}
// A row's share of this lane, all loads under way at once: what follows may store where it cannot be known not to alias.
RL_D void load_row(uint4 (&row)[GROUPS], const u16* pointer, bool inside) {
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) row[g] = inside ? load_here(pointer + 32 * g) : uint4{0, 0, 0, 0};
}
RL_D uint4 pack_eight(const float* v) {
  return {pack_pair(v[0], v[1]), pack_pair(v[2], v[3]), pack_pair(v[4], v[5]), pack_pair(v[6], v[7])};
}
// COUNT vectors of WIDTH that every tile reads are kept in shared memory, one after the other; a null one is zeros. The
// consumers copy them, all loads under way at once. `more` copies something else in between.
constexpr int VECTOR_BYTES = WIDTH * 2, CONSUMERS = 256;
template <int COUNT, class More>
RL_D void copy_vectors(u32 address, const u16* a, const u16* b, const u16* c, int thread, More more) {
  constexpr int WORDS = WIDTH / 2, TURNS = ceil_div(COUNT * WORDS, CONSUMERS);
  u32 words[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int word = thread + i * CONSUMERS;
    const u16* source = word < WORDS ? a : word < 2 * WORDS ? b : c;
    words[i] = source && word < COUNT * WORDS ? reinterpret_cast<const u32*>(source)[word % WORDS] : 0;
  }
  more();
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
    if (thread + i * CONSUMERS < COUNT * WORDS) store_shared_u32(address + 4 * (thread + i * CONSUMERS), words[i]);
  sync_consumers();
}

// Sums over whole rows, in both warpgroups where they are abreast: over the four lanes of a row, then by way of `area`, which
// nobody has read since all consumers last met.
constexpr int STATISTICS_BYTES = 2 * 4 * 64 * 4;
template <int COUNT>
RL_D void row_sums(float (&x)[COUNT], u32 area, const Place& me) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 2);
  }
  if (ABREAST == 1) return;
  const u32 place = area + (16 * me.warp + me.lane / 4) * 4;
  if (me.lane % 4 == 0)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) store_shared(place + (me.group * COUNT + i) * 256, x[i]);
  sync_consumers();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] += load_shared(place + ((me.group ^ 1) * COUNT + i) * 256);
}

// Registers last for all that a join reads of a thread's rows; otherwise for one of them.
constexpr bool HOLDS = OWN_ROWS * LANE <= 64;
constexpr int AHEAD_ROWS = HOLDS ? OWN_ROWS : 1;

// ---- forward: v holds branch + bias. r = residual + dropout(v), rounded; h = norm(r).
struct JoinForward {
  const u16* residual;
  u32 weight, bias;  // in shared memory
  u16 *r, *h;
  float *mean, *rstd;
  float eps;
  int rows;
  Mask mask;
  u32 statistics;  // two areas of `row_sums`
};

// The residual of this thread's rows, or of its first, loaded while there is something to wait for.
struct Residual {
  uint4 row[AHEAD_ROWS][GROUPS];
  RL_D void load(const JoinForward& p, int first, const Place& me) {
#pragma unroll
    for (int i = 0; i < AHEAD_ROWS * RESIDUAL; ++i)
      load_row(row[i], p.residual + static_cast<i64>(first + 8 * i) * WIDTH + me.column() + 8 * (me.lane % 4),
               first + 8 * i < p.rows);
  }
};

RL_D void join_forward(const JoinForward& p, float (&v)[OWN_ROWS][LANE], Residual& ahead, int row, const Place& me) {
  const int first = me.column() + 8 * (me.lane % 4);
  const i64 base = static_cast<i64>(row) * WIDTH + first;
  float mean[OWN_ROWS] = {}, squares[OWN_ROWS] = {};
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const RowMask mask(p.mask, row + 8 * i);
    uint4 residuals[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS * RESIDUAL; ++g) residuals[g] = ahead.row[HOLDS ? i : 0][g];
    if (!HOLDS && i + 1 < OWN_ROWS) ahead.load(p, row + 8, me);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float* x = v[i] + 8 * g;
      mask.apply(x, 32 * g + first, p.mask);
      if (RESIDUAL) {
        float residual[8];
        unpack_eight(residual, residuals[g]);
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] += residual[k];
      }
      const uint4 out = pack_eight(x);
      if (row + 8 * i < p.rows) *reinterpret_cast<uint4*>(p.r + base + 8 * i * WIDTH + 32 * g) = out;
      unpack_eight(x, out);
#pragma unroll
      for (int k = 0; k < 8; ++k) mean[i] += x[k];
    }
  }
  if (!RMS) row_sums(mean, p.statistics, me);
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    mean[i] = RMS ? 0.f : mean[i] * (1.f / WIDTH);
#pragma unroll
    for (int k = 0; k < LANE; ++k) {
      v[i][k] -= mean[i];
      squares[i] += v[i][k] * v[i][k];
    }
  }
  row_sums(squares, p.statistics + STATISTICS_BYTES, me);
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const bool inside = row + 8 * i < p.rows;
    const float rstd = reciprocal_root(squares[i] * (1.f / WIDTH) + p.eps);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float* x = v[i] + 8 * g;
      float weight[8], bias[8] = {};
      unpack_eight(weight, load_shared_16(p.weight + 64 * g + 2 * first));
      if (NORM_BIAS) unpack_eight(bias, load_shared_16(p.bias + 64 * g + 2 * first));
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = x[k] * rstd * weight[k] + bias[k];
      if (inside) *reinterpret_cast<uint4*>(p.h + base + 8 * i * WIDTH + 32 * g) = pack_eight(x);
    }
    if (inside && me.lane % 4 == 0 && me.column() == 0) {
      if (!RMS) p.mean[row + 8 * i] = mean[i];
      p.rstd[row + 8 * i] = rstd;
    }
  }
}

// Sums begin at the bias (in shared memory) of the columns that this lane will own, or at zero.
template <bool HAS_BIAS, int PARTS, int COUNT>
RL_D void begin_sums(float (&z)[PARTS][COUNT], u32 bias, bool add, const Place& me) {
#pragma unroll
  for (int g = 0; g < PARTS * COUNT / 16; ++g) {
    float b[8] = {};
    if (HAS_BIAS && add) unpack_eight(b, load_shared_16(bias + 64 * g + 16 * (me.lane % 4)));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int low = 16 * g + i / 2 * 4 + i % 2;
      z[low / COUNT][low % COUNT] = z[low / COUNT][low % COUNT + 2] = b[i];
    }
  }
}

// ---- backward: v holds dh, columns as the product leaves them.

// The four lanes of a row transpose 4 × 4 pairs of every column group: positions become owned columns.
template <int COUNT>
RL_D void own_columns(float (&v)[OWN_ROWS][COUNT], const Place& me) {
  const bool odd = me.lane & 1, high = me.lane & 2;
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i)
#pragma unroll
    for (int k = 0; k < COUNT; k += 8)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float* x = v[i] + k + e;  // x[2 j]
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const float got = shuffle_xor(odd ? x[2 * j] : x[2 * j + 2], 1);
          (odd ? x[2 * j] : x[2 * j + 2]) = got;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float got = shuffle_xor(high ? x[2 * j] : x[2 * j + 4], 2);
          (high ? x[2 * j] : x[2 * j + 4]) = got;
        }
      }
}

// Sum over a warpgroup's warps of column `column` of rows of `columns` floats at `address`, always in the same order.
RL_D float warps_sum(u32 address, int columns, int column) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) sum += load_shared(address + (warp * columns + column) * 4);
  return sum;
}

constexpr int SUMS = 1 + NORM_BIAS + BRANCH_BIAS;  // of scale, shift, branch bias
constexpr int SUMS_BYTES = SUMS * 4 * WIDTH * 4;   // of 64 rows: [sum][warp][column]

struct JoinBackward {
  const u16 *r, *dresidual;
  u32 weight;  // in shared memory
  const float *mean, *rstd;
  u16 *dr, *dbranch;
  float* partials;  // [row of partials][sum][column], rows `stride` apart
  i64 stride;
  int rows;
  Mask mask;
};

// What join_backward reads first, loaded while there is something to wait for.
struct Ahead {
  float mean[OWN_ROWS], rstd[OWN_ROWS];
  uint4 r[AHEAD_ROWS][GROUPS];         // of this thread's rows, or its first
  uint4 residual[AHEAD_ROWS][GROUPS];  // of its rows, if they are held
  RL_D void load(const JoinBackward& p, int row, const Place& me) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const bool inside = row + 8 * i < p.rows;
      mean[i] = !RMS && inside ? p.mean[row + 8 * i] : 0.f;
      rstd[i] = inside ? p.rstd[row + 8 * i] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < AHEAD_ROWS; ++i) {
      const i64 base = static_cast<i64>(row + 8 * i) * WIDTH + me.column() + 8 * (me.lane % 4);
      load_row(r[i], p.r + base, row + 8 * i < p.rows);
      if (HOLDS && RESIDUAL) load_row(residual[i], p.dresidual + base, row + 8 * i < p.rows);
    }
  }
};

// dr = dresidual + norm'(dh); dbranch = dropout'(dr), which is what is left in v; sums over the warpgroup's rows into one row
// of partials. `statistics`: an area of `row_sums`.
RL_D void join_backward(const JoinBackward& p, float (&v)[OWN_ROWS][LANE], const Ahead& ahead, int row, u32 sums,
                        u32 statistics, int partial_row, const Place& me) {
  const int first = me.column() + 8 * (me.lane % 4), mine = first + me.lane / 4;
  const u32 target = sums + (me.warp * WIDTH + mine) * 4;
  constexpr int KIND = 4 * WIDTH * 4;
  float whole[2 * OWN_ROWS] = {};  // of dh' · normal, of dh', for each row
  uint4 second[GROUPS];
  if (!HOLDS) load_row(second, p.r + static_cast<i64>(row + 8) * WIDTH + first, row + 8 < p.rows);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float weight[8], dweight[8] = {}, dbias[8] = {};
    unpack_eight(weight, load_shared_16(p.weight + 64 * g + 2 * first));
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      float* dh = v[i] + 8 * g;
      float x[8];
      unpack_eight(x, HOLDS ? ahead.r[HOLDS ? i : 0][g] : i == 0 ? ahead.r[0][g] : second[g]);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float normal = (x[k] - ahead.mean[i]) * ahead.rstd[i];
        dweight[k] += dh[k] * normal;
        dbias[k] += dh[k];
        dh[k] *= weight[k];
        whole[2 * i] += dh[k] * normal;
        whole[2 * i + 1] += dh[k];
      }
    }
    store_shared(target + 32 * g * 4, column_sum(dweight, me.lane));
    if (NORM_BIAS) store_shared(target + KIND + 32 * g * 4, column_sum(dbias, me.lane));
  }
  row_sums(whole, statistics, me);
#pragma unroll
  for (int i = 0; i < OWN_ROWS; ++i) {
    const bool inside = row + 8 * i < p.rows;
    const float inner = whole[2 * i] * (1.f / WIDTH), plain = RMS ? 0.f : whole[2 * i + 1] * (1.f / WIDTH);
    const i64 base = static_cast<i64>(row + 8 * i) * WIDTH + first;
    const RowMask mask(p.mask, row + 8 * i);
    uint4 again[GROUPS], residuals[GROUPS];
    if (!HOLDS) load_row(again, p.r + base, inside);  // registers do not last for both rows
    if (!HOLDS && RESIDUAL) load_row(residuals, p.dresidual + base, inside);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float* d = v[i] + 8 * g;
      float x[8], residual[8] = {};
      unpack_eight(x, HOLDS ? ahead.r[HOLDS ? i : 0][g] : again[g]);
      if (RESIDUAL) unpack_eight(residual, HOLDS ? ahead.residual[HOLDS ? i : 0][g] : residuals[g]);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        d[k] = (d[k] - plain - (x[k] - ahead.mean[i]) * ahead.rstd[i] * inner) * ahead.rstd[i] + residual[k];
      if (inside) *reinterpret_cast<uint4*>(p.dr + base + 32 * g) = pack_eight(d);
      mask.apply(d, 32 * g + first, p.mask);
      if (DROPOUT && inside) *reinterpret_cast<uint4*>(p.dbranch + base + 32 * g) = pack_eight(d);
    }
  }
  if (BRANCH_BIAS)
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      float dbranch_bias[8] = {};
#pragma unroll
      for (int i = 0; i < OWN_ROWS; ++i)
#pragma unroll
        for (int k = 0; k < 8; ++k) dbranch_bias[k] += v[i][8 * g + k];
      store_shared(target + (1 + NORM_BIAS) * KIND + 32 * g * 4, column_sum(dbranch_bias, me.lane));
    }
  named_barrier<128>(1 + me.group);
  float* out = p.partials + partial_row * p.stride;
#pragma unroll
  for (int kind = 0; kind < SUMS; ++kind)
#pragma unroll
    for (int column = me.column() + me.thread(); column < me.column() + HELD; column += 128)
      out[kind * WIDTH + column] = warps_sum(sums + kind * KIND, WIDTH, column);
  named_barrier<128>(1 + me.group);
}

}  // namespace rl
