// Causal attention in fp32 over short windows (T ≤ 256, head width 32), its products by the tensor cores in fp64.
//
// As in linear/doubles_tile.cuh only sums round, in fp64, and a number is converted once, on its way into shared memory. A
// thread block owns a head: two tiles of all its rows lie there, one side of a pass; the other side's rows are registers.
// What one product leaves in a lane's registers is the next one's operand as it is: a fragment's sixteen inner places may
// be any sixteen rows of a tile, in any order, as long as both operands have them alike. So weights and their gradients
// never leave the registers, and warps never wait for each other: one pass makes the queries' gradients, another the
// keys' and values', which costs two products of seven once more and no sum between warps.
//
//   of rows of 32 numbers, inner:  place n (of half h) of lane member m is number 16 h + 8 (n / 2) + 2 m + n % 2
//   of rows as results:            column c of block j is number 16 (j / 2) + 2 c + j % 2
//   of columns of a square, inner: place n of member m is column 8 (n / 2) + 2 m + n % 2 of each 16, as results lie
//
// A pass begins with the rows that need half a tile only, so that the other half may be on its way meanwhile.
//
// Gradients of shared keys come by query head, to be summed by a second launch.
#include "ridgeline/doubles.cuh"

namespace rl {

constexpr int D = 32, HALF = 128, SQUARE = 32, ROWS = 16;  // half a window, columns at a time, rows of a fragment
constexpr int TILE = 2 * HALF * D;                         // doubles
constexpr int THREADS = 8 * WARP, HELD = HALF * D / 4 / THREADS;
constexpr float HIDDEN = -3e38f;  // a score behind the row
constexpr float LOG2E = 1.4426950408889634f;

struct Lane {
  int group = static_cast<int>(threadIdx.x) % WARP / 4, member = static_cast<int>(threadIdx.x) % 4;
};
struct alignas(16) Doubles {
  double first, second;
};
struct alignas(8) Floats {
  float first, second;
};

// Pair `pair` of a row of a tile. The places of a row's pairs differ from row to row, so that neither eight rows' pairs
// nor every other row's meet in a bank.
RL_D int place(int row, int pair) { return row * D + 2 * (pair ^ (row & 6) ^ (row & 1) << 2); }

// The value itself, of which the compiler knows nothing: places that depend on it are computed anew where they are needed,
// not kept in registers from one use to the next.
RL_D int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Half of the rows of two tiles on their way: from T on zeros.
struct Halves {
  float4 held[2][HELD];

  RL_D void load(const float* a, int a_pitch, const float* b, int b_pitch, int first, int T) {
    const int thread = anew(threadIdx.x);
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int at = thread + n * THREADS, row = first + at / (D / 4), column = at % (D / 4) * 4;
      const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
      held[0][n] = row < T ? *reinterpret_cast<const float4*>(a + static_cast<i64>(row) * a_pitch + column) : none;
      held[1][n] = row < T ? *reinterpret_cast<const float4*>(b + static_cast<i64>(row) * b_pitch + column) : none;
    }
  }
  RL_D void store(double* tiles, int first) const {
    const int thread = anew(threadIdx.x);
#pragma unroll
    for (int n = 0; n < HELD; ++n)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int at = thread + n * THREADS, row = first + at / (D / 4), pair = at % (D / 4) * 2;
        const float4 v = held[tile][n];
        *reinterpret_cast<Doubles*>(tiles + tile * TILE + place(row, pair)) = {v.x, v.y};
        *reinterpret_cast<Doubles*>(tiles + tile * TILE + place(row, pair + 1)) = {v.z, v.w};
      }
  }
};

// Two whole tiles, for all threads.
RL_D void bring(double* tiles, const float* a, int a_pitch, const float* b, int b_pitch, int T) {
  Halves halves[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) halves[half].load(a, a_pitch, b, b_pitch, half * HALF, T);
#pragma unroll
  for (int half = 0; half < 2; ++half) halves[half].store(tiles, half * HALF);
  __syncthreads();
}

// Sixteen rows of 32 numbers, as the left operand; from T on zeros.
struct Rows {
  double of[2][8];

  RL_D void load(const float* src, int pitch, int row, int T) {
    const Lane lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int mine = row + lane.group + 8 * h;
      const float* from = src + static_cast<i64>(mine) * pitch + 2 * lane.member;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const Floats v = mine < T ? *reinterpret_cast<const Floats*>(from + 8 * q) : Floats{0.f, 0.f};
        of[q / 2][q % 2 * 4 + h] = v.first, of[q / 2][q % 2 * 4 + 2 + h] = v.second;
      }
    }
  }
};

struct Square {  // of 16 rows and 32 columns: element 2 h + e of block n is row 8 h, column 8 n + 2 member + e
  double of[4][4];
};

// out = rows · (32 rows of the tile from `first` on)ᵀ
RL_D void scores(Square& out, const Rows& rows, const double* tile, int first) {
  const Lane lane;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    out.of[n][0] = out.of[n][1] = out.of[n][2] = out.of[n][3] = 0.;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      double b[4];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const double* at = tile + first * D + 8 * n * D + place(lane.group, 8 * half + 4 * q + lane.member);
        const Doubles v = *reinterpret_cast<const Doubles*>(at);
        b[2 * q] = v.first, b[2 * q + 1] = v.second;
      }
      multiply_doubles(out.of[n], rows.of[half], b);
    }
  }
}

struct Sums {  // of 16 rows and 32 numbers
  double of[4][4] = {};

  // Row `group` + 8 h, times factor[h].
  RL_D void write(float* dst, int pitch, int rows, const double (&factor)[2]) const {
    const Lane lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane.group + 8 * h >= rows) continue;
      float* to = dst + static_cast<i64>(lane.group + 8 * h) * pitch + 4 * lane.member;
      const double f = factor[h];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int x = 2 * h;
        *reinterpret_cast<float4*>(to + 8 * j) =
            make_float4(of[j][x] * f, of[j + 1][x] * f, of[j][x + 1] * f, of[j + 1][x + 1] * f);
      }
    }
  }
};

// sums += square · (32 rows of the tile from `first` on)
RL_D void mix(Sums& sums, const Square& square, const double* tile, int first) {
  const Lane lane;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    double a[8];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) a[2 * n + h] = square.of[2 * s + n / 2][n % 2 + 2 * h];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      double b[2][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const double* at = tile + (first + 16 * s + 8 * (n / 2)) * D + place(2 * lane.member + n % 2, 4 * j + lane.group);
        const Doubles v = *reinterpret_cast<const Doubles*>(at);
        b[0][n] = v.first, b[1][n] = v.second;
      }
      multiply_doubles(sums.of[j], a, b[0]);
      multiply_doubles(sums.of[j + 1], a, b[1]);
    }
  }
}

// Of 16 rows: largest score so far and, by lane, sum of weights, for rows `group` and 8 below.
struct Softmax {
  float largest[2] = {HIDDEN, HIDDEN}, sum[2] = {};

  // Scores become weights, and the sums so far are rescaled. `above`: of row `group` over the first of the lane's columns.
  RL_D void take(Square& s, Sums& sums, int above, float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4][2], top = largest[h];
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[n][e] = 8 * n + e > above + 8 * h ? HIDDEN : static_cast<float>(s.of[n][2 * h + e]);
          top = fmaxf(top, x[n][e]);
        }
      for (int mask = 1; mask < 4; mask *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, mask));
      const float shrink = exp2_fast((largest[h] - top) * factor);
      float total = 0.f;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = exp2_fast((x[n][e] - top) * factor);
          total += weight, s.of[n][2 * h + e] = weight;
        }
      sum[h] = sum[h] * shrink + total, largest[h] = top;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.of[j][2 * h] *= shrink, sums.of[j][2 * h + 1] *= shrink;
    }
  }
  RL_D float whole(int h) const {
    float total = sum[h];
    for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(FULL, total, mask);
    return total;
  }
};

// δ = Σ_d out · d_out of each row, and log-sum-exp in base 2; from T on such that no weight is left.
RL_D void load_statistics(float* statistics, const float* out, const float* d_out, int pitch, const float* lse, int T) {
  const int column = threadIdx.x % 8;
  for (int row = threadIdx.x / 8; row < ceil_div(T, SQUARE) * SQUARE; row += THREADS / 8) {
    float total = 0.f;
    if (row < T) {
      const i64 at = static_cast<i64>(row) * pitch + 4 * column;
      const float4 a = *reinterpret_cast<const float4*>(out + at), b = *reinterpret_cast<const float4*>(d_out + at);
      total = a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    for (int mask = 1; mask < 8; mask *= 2) total += __shfl_xor_sync(FULL, total, mask);
    if (column == 0) statistics[row] = row < T ? lse[row] * LOG2E : -HIDDEN, statistics[2 * HALF + row] = total;
  }
}

// A weight of the forward pass from its score.
RL_D double weight_of(double score, double factor, float lse, bool hidden) {
  return hidden ? 0.f : exp2_fast(static_cast<float>(score * factor - lse));
}

// Gradients of sixteen queries; the tiles are keys and values.
RL_D void query_gradients(const double* tiles, const float* statistics, const float* q, int q_pitch, const float* d_out,
                          int out_pitch, int row, float* dq, int pitch, int T, float scale) {
  const Lane lane;
  const double factor = scale * LOG2E;
  Rows queries, slopes;
  queries.load(q, q_pitch, row, T), slopes.load(d_out, out_pitch, row, T);
  float lse[2], delta[2];
  for (int h = 0; h < 2; ++h) {
    lse[h] = statistics[row + lane.group + 8 * h], delta[h] = statistics[2 * HALF + row + lane.group + 8 * h];
  }
  Sums sums;
#pragma unroll 1
  for (int start = 0; start <= row; start += SQUARE) {
    Square p, d;
    const int above = row + lane.group - start - 2 * lane.member;
    scores(p, queries, tiles, start);
    scores(d, slopes, tiles + TILE, start);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int h = x / 2;
        const double weight = weight_of(p.of[n][x], factor, lse[h], 8 * n + x % 2 > above + 8 * h);
        d.of[n][x] = weight * (d.of[n][x] - delta[h]);
      }
    mix(sums, d, tiles, start);
  }
  sums.write(dq + static_cast<i64>(row) * pitch, pitch, T - row, {scale, scale});
}

// Gradients of sixteen keys and values; the tiles are queries and the outputs' gradients.
RL_D void key_gradients(const double* tiles, const float* statistics, const float* k, const float* v, int kv_pitch, int row,
                        float* dk, float* dv, int pitch, int T, float scale) {
  const Lane lane;
  const double factor = scale * LOG2E;
  Rows keys, values;
  keys.load(k, kv_pitch, row, T), values.load(v, kv_pitch, row, T);
  Sums dk_sums, dv_sums;
#pragma unroll 1
  for (int start = row / SQUARE * SQUARE; start < T; start += SQUARE) {
    Square p, d;
    const int above = start + 2 * lane.member - row - lane.group;  // of the lane's first query over its first key
    const float* lse = statistics + start + 2 * lane.member;
    scores(p, keys, tiles, start);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x)
        p.of[n][x] = weight_of(p.of[n][x], factor, lse[8 * n + x % 2], 8 * (x / 2) > above + 8 * n + x % 2);
    mix(dv_sums, p, tiles + TILE, start);
    scores(d, values, tiles + TILE, start);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) d.of[n][x] = p.of[n][x] * (d.of[n][x] - lse[2 * HALF + 8 * n + x % 2]);
    mix(dk_sums, d, tiles, start);
  }
  const i64 at = static_cast<i64>(row) * pitch;
  dk_sums.write(dk + at, pitch, T - row, {scale, scale});
  dv_sums.write(dv + at, pitch, T - row, {1., 1.});
}

}  // namespace rl

// out, and lse[B, H, T]: the natural log-sum-exp of each row's scaled scores.  Grid B · H.
extern "C" __global__ void __launch_bounds__(256, 1)
    attention_forward_float(const float* q, const float* k, const float* v, float* out, float* lse, int T, int H, int share,
                            int q_pitch, int kv_pitch, int out_pitch, float scale) {
  using namespace rl;
  double* const tiles = reinterpret_cast<double*>(shared_floats());
  const int sample = blockIdx.x / H, head = blockIdx.x % H, warp = threadIdx.x / WARP;
  const i64 first = static_cast<i64>(sample) * T;
  q += first * q_pitch + head * D, k += first * kv_pitch + head / share * D, v += first * kv_pitch + head / share * D;
  out += first * out_pitch + head * D, lse += static_cast<i64>(blockIdx.x) * T;
  wait_for_previous();
  let_next_start();
  const Lane lane;
  Halves halves;
  halves.load(k, kv_pitch, v, kv_pitch, 0, T);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // rows of both ends, so that warps have alike to do
    halves.store(tiles, turn * HALF);
    __syncthreads();
    if (turn == 0) halves.load(k, kv_pitch, v, kv_pitch, HALF, T);
    const int row = ROWS * (turn ? 15 - warp : warp);
    if (row >= T) continue;
    Rows rows;
    rows.load(q, q_pitch, row, T);
    Sums sums;
    Softmax softmax;
#pragma unroll 1
    for (int start = 0; start <= row; start += SQUARE) {
      Square s;
      scores(s, rows, tiles, start);
      softmax.take(s, sums, row + lane.group - start - 2 * lane.member, scale * LOG2E);
      mix(sums, s, tiles + TILE, start);
    }
    const float totals[2] = {softmax.whole(0), softmax.whole(1)};
    sums.write(out + static_cast<i64>(row) * out_pitch, out_pitch, T - row, {1. / totals[0], 1. / totals[1]});
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (const int t = row + lane.group + 8 * h; lane.member == 0 && t < T)
        lse[t] = softmax.largest[h] * scale + logf(totals[h]);
  }
}

// Gradients. dk and dv are those of each query head: head h writes part h % share (parts `part` floats apart), where key
// head h / share lies.  Grid B · H.
extern "C" __global__ void __launch_bounds__(256, 1)
    attention_backward_float(const float* q, const float* k, const float* v, const float* out, const float* d_out,
                             const float* lse, float* dq, float* dk, float* dv, rl::i64 part, int T, int H, int share,
                             int q_pitch, int kv_pitch, int out_pitch, int dq_pitch, int dkv_pitch, float scale) {
  using namespace rl;
  double* const tiles = reinterpret_cast<double*>(shared_floats());
  float* const statistics = reinterpret_cast<float*>(tiles + 2 * TILE);
  const int sample = blockIdx.x / H, head = blockIdx.x % H, group = head / share, warp = threadIdx.x / WARP;
  const i64 first = static_cast<i64>(sample) * T;
  q += first * q_pitch + head * D, k += first * kv_pitch + group * D, v += first * kv_pitch + group * D;
  out += first * out_pitch + head * D, d_out += first * out_pitch + head * D, dq += first * dq_pitch + head * D;
  dk += first * dkv_pitch + head % share * part + group * D, dv += first * dkv_pitch + head % share * part + group * D;
  wait_for_previous();
  let_next_start();
  Halves halves;
  halves.load(k, kv_pitch, v, kv_pitch, 0, T);
  load_statistics(statistics, out, d_out, out_pitch, lse + static_cast<i64>(blockIdx.x) * T, T);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // rows of both ends, so that warps have alike to do
    halves.store(tiles, turn * HALF);
    __syncthreads();
    if (turn == 0) halves.load(k, kv_pitch, v, kv_pitch, HALF, T);
    else halves.load(q, q_pitch, d_out, out_pitch, HALF, T);
    if (const int row = ROWS * (turn ? 15 - warp : warp); row < T)
      query_gradients(tiles, statistics, q, q_pitch, d_out, out_pitch, row, dq, dq_pitch, T, scale);
  }
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (turn == 1) halves.load(q, q_pitch, d_out, out_pitch, 0, T);  // there are no registers to do so ahead
    halves.store(tiles, (1 - turn) * HALF);
    __syncthreads();
    if (const int row = ROWS * (turn ? warp : 15 - warp); row < T)
      key_gradients(tiles, statistics, k, v, kv_pitch, row, dk, dv, dkv_pitch, T, scale);
  }
}
