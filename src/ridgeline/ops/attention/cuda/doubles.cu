// Causal attention in fp32 over short windows (T ≤ 256, head width 32), its products by the tensor cores in fp64.
//
// As in linear/doubles_tile.cuh only sums round, in fp64. A thread block owns a head, whose rows lie whole in shared memory.
// What one product leaves in a lane's registers is the next one's operand as it is: a product's four inner places may
// be any four rows of a tile, in any order, as long as both operands have them alike. So weights and their gradients
// never leave the registers, and warps never wait for each other: one pass makes the queries' gradients, another the
// keys' and values', which costs two products of seven once more and no sum between warps.
//
//   of rows of 32 numbers, inner:  place n (of half h) of lane member m is number 8 m + 4 h + n: quads of a row
//   of rows as results:            column 2 m + e of block j is number 8 m + 4 e + j
//   of columns of a square, inner: place n of member m is column 8 (n / 2) + 2 m + n % 2, as results lie
//
// Gradients of shared keys come by query head, to be summed by a second launch.
#include "ridgeline/doubles.cuh"

namespace rl {

constexpr int D = 32, QUADS = D / 4;
constexpr int LONGEST = 256, SQUARE = 32, ROWS = 16;  // positions: a window, columns at a time, rows of a fragment
constexpr int PITCH = D + 4;                          // floats between rows of a tile
constexpr int TILE = LONGEST * PITCH;
constexpr int FORWARD_THREADS = 4 * WARP, BACKWARD_THREADS = 8 * WARP;
constexpr float HIDDEN = -3e38f;  // a score behind the row
constexpr float LOG2E = 1.4426950408889634f;

struct Lane {
  int group = static_cast<int>(threadIdx.x) % WARP / 4, member = static_cast<int>(threadIdx.x) % 4;
};

RL_D float4 quad(const float* place) { return *reinterpret_cast<const float4*>(place); }
RL_D void put_quad(float* place, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(place) = make_float4(a, b, c, d);
}

RL_D float part(const float4& v, int n) { return n == 0 ? v.x : n == 1 ? v.y : n == 2 ? v.z : v.w; }

// The first `rows` rows of a head into a tile; from T on zeros, up to a whole square.
template <int THREADS>
RL_D void load_rows(float* tile, const float* src, int pitch, int rows) {
  for (int n = threadIdx.x; n < ceil_div(rows, SQUARE) * SQUARE * QUADS; n += THREADS) {
    const int row = n / QUADS, at = n % QUADS * 4;
    copy_quad(tile + row * PITCH + at, src + static_cast<i64>(row) * pitch + at, row < rows);
  }
}

// Sixteen rows of 32 numbers, as the left operand.
struct Rows {
  double of[2][4][2];  // by half and place; of a pair the second lies 8 rows down

  RL_D void load(const float* tile, int row) {
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 v = quad(tile + (row + lane.group + 8 * h) * PITCH + 8 * lane.member + 4 * half);
#pragma unroll
        for (int place = 0; place < 4; ++place) of[half][place][h] = part(v, place);
      }
  }
};

struct Square {  // of 16 rows and 32 columns: element 2 h + e of block n is row 8 h, column 8 n + 2 member + e
  double of[4][4] = {};
};

// out[i] = rows[i] · (32 rows of the tile)ᵀ. A place of the four lanes for all blocks before the next: products of one sum
// that follow each other wait for each other.
template <int COUNT>
RL_D void scores(Square (&out)[COUNT], const Rows (&rows)[COUNT], const float* tile) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) out[i] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 of_tile[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) of_tile[n] = quad(tile + (8 * n + lane.group) * PITCH + 8 * lane.member + 4 * half);
#pragma unroll
    for (int place = 0; place < 4; ++place)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const double b = part(of_tile[n], place);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) multiply_doubles(out[i].of[n], rows[i].of[half][place], b);
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
      float* to = dst + static_cast<i64>(lane.group + 8 * h) * pitch + 8 * lane.member;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int x = 2 * h + e;
        put_quad(to + 4 * e, of[0][x] * factor[h], of[1][x] * factor[h], of[2][x] * factor[h], of[3][x] * factor[h]);
      }
    }
  }
};

// sums[i] += square[i] · (32 rows of the tile)
template <int COUNT>
RL_D void mix(Sums (&sums)[COUNT], const Square (&square)[COUNT], const float* tile) {
  const Lane lane;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 of_tile = quad(tile + (8 * (n / 2) + 2 * lane.member + n % 2) * PITCH + 4 * lane.group);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const double b = part(of_tile, j);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const double a[2] = {square[i].of[n / 2][n % 2], square[i].of[n / 2][n % 2 + 2]};
        multiply_doubles(sums[i].of[j], a, b);
      }
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

// Shared memory of a backward block.
struct Window {
  float *q, *k, *v, *d_out, *lse, *delta;

  RL_D Window() {
    q = shared_floats(), k = q + TILE, v = k + TILE, d_out = v + TILE, lse = d_out + TILE, delta = lse + LONGEST;
  }
};

// δ = Σ_d out · d_out of each row, and log-sum-exp in base 2; from T on such that no weight is left.
RL_D void load_statistics(const Window& w, const float* out, int pitch, const float* lse, int T) {
  const int column = threadIdx.x % 8;
  for (int row = threadIdx.x / 8; row < ceil_div(T, SQUARE) * SQUARE; row += BACKWARD_THREADS / 8) {
    float total = 0.f;
    if (row < T) {
      const float4 a = quad(out + static_cast<i64>(row) * pitch + 4 * column), b = quad(w.d_out + row * PITCH + 4 * column);
      total = a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    for (int mask = 1; mask < 8; mask *= 2) total += __shfl_xor_sync(FULL, total, mask);
    if (column == 0) w.delta[row] = total, w.lse[row] = row < T ? lse[row] * LOG2E : -HIDDEN;
  }
}

// A weight of the forward pass from its score.
RL_D double weight_of(double score, double factor, float lse, bool hidden) {
  return hidden ? 0.f : exp2_fast(static_cast<float>(score * factor - lse));
}

// Gradients of sixteen queries.
RL_D void query_gradients(const Window& w, int row, float* dq, int pitch, int T, float scale) {
  const Lane lane;
  const double factor = scale * LOG2E;
  Rows queries[1], slopes[1];
  queries[0].load(w.q, row), slopes[0].load(w.d_out, row);
  float lse[2], delta[2];
  for (int h = 0; h < 2; ++h) lse[h] = w.lse[row + lane.group + 8 * h], delta[h] = w.delta[row + lane.group + 8 * h];
  Sums sums[1];
#pragma unroll 1
  for (int start = 0; start <= row; start += SQUARE) {
    Square p[1], d[1];
    const int above = row + lane.group - start - 2 * lane.member;
    scores(p, queries, w.k + start * PITCH);
    scores(d, slopes, w.v + start * PITCH);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int h = x / 2;
        const double weight = weight_of(p[0].of[n][x], factor, lse[h], 8 * n + x % 2 > above + 8 * h);
        d[0].of[n][x] = weight * (d[0].of[n][x] - delta[h]);
      }
    mix(sums, d, w.k + start * PITCH);
  }
  sums[0].write(dq + static_cast<i64>(row) * pitch, pitch, T - row, {scale, scale});
}

// Gradients of sixteen keys and values.
RL_D void key_gradients(const Window& w, int row, float* dk, float* dv, int pitch, int T, float scale) {
  const Lane lane;
  const double factor = scale * LOG2E;
  Rows keys[1], values[1];
  keys[0].load(w.k, row), values[0].load(w.v, row);
  Sums dk_sums[1], dv_sums[1];
#pragma unroll 1
  for (int start = row / SQUARE * SQUARE; start < T; start += SQUARE) {
    Square p[1], d[1];
    const int above = start + 2 * lane.member - row - lane.group;  // of the lane's first query over its first key
    scores(p, keys, w.q + start * PITCH);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float lse = w.lse[start + 8 * n + 2 * lane.member + x % 2];
        p[0].of[n][x] = weight_of(p[0].of[n][x], factor, lse, 8 * (x / 2) > above + 8 * n + x % 2);
      }
    mix(dv_sums, p, w.d_out + start * PITCH);
    scores(d, values, w.d_out + start * PITCH);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float delta = w.delta[start + 8 * n + 2 * lane.member + x % 2];
        d[0].of[n][x] = p[0].of[n][x] * (d[0].of[n][x] - delta);
      }
    mix(dk_sums, d, w.q + start * PITCH);
  }
  const i64 at = static_cast<i64>(row) * pitch;
  dk_sums[0].write(dk + at, pitch, T - row, {scale, scale});
  dv_sums[0].write(dv + at, pitch, T - row, {1., 1.});
}

}  // namespace rl

// out, and lse[B, H, T]: the natural log-sum-exp of each row's scaled scores.  Grid B · H.
extern "C" __global__ void __launch_bounds__(128, 2)
    attention_forward_float(const float* q, const float* k, const float* v, float* out, float* lse, int T, int H, int share,
                            int q_pitch, int kv_pitch, int out_pitch, float scale) {
  using namespace rl;
  float *const q_tile = shared_floats(), *const k_tile = q_tile + TILE, *const v_tile = k_tile + TILE;
  const int sample = blockIdx.x / H, head = blockIdx.x % H;
  const i64 first = static_cast<i64>(sample) * T;
  wait_for_previous();
  let_next_start();
  load_rows<FORWARD_THREADS>(q_tile, q + first * q_pitch + head * D, q_pitch, T);
  load_rows<FORWARD_THREADS>(k_tile, k + first * kv_pitch + head / share * D, kv_pitch, T);
  copies_commit();
  load_rows<FORWARD_THREADS>(v_tile, v + first * kv_pitch + head / share * D, kv_pitch, T);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  const Lane lane;
  const int warp = threadIdx.x / WARP;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // rows of both ends, so that warps have alike to do
    const int row = 2 * ROWS * (turn ? warp : 7 - warp);
    if (row >= T) continue;
    Rows rows[2];
    rows[0].load(q_tile, row);
    Sums sums[2];
    Softmax softmax[2];
#pragma unroll 1
    for (int start = 0; start <= row; start += SQUARE) {
      Square s[2];
      rows[1].load(q_tile, row + ROWS);  // again each time: there are not registers for both
      scores(s, rows, k_tile + start * PITCH);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        softmax[i].take(s[i], sums[i], row + ROWS * i + lane.group - start - 2 * lane.member, scale * LOG2E);
      mix(sums, s, v_tile + start * PITCH);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float totals[2] = {softmax[i].whole(0), softmax[i].whole(1)};
      const int at = row + ROWS * i;
      sums[i].write(out + (first + at) * out_pitch + head * D, out_pitch, T - at, {1. / totals[0], 1. / totals[1]});
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (const int t = at + lane.group + 8 * h; lane.member == 0 && t < T)
          lse[static_cast<i64>(blockIdx.x) * T + t] = softmax[i].largest[h] * scale + logf(totals[h]);
    }
  }
}

// Gradients. dk and dv are those of each query head: head h writes part h % share (parts `part` floats apart), where key
// head h / share lies.  Grid B · H.
extern "C" __global__ void __launch_bounds__(256, 1)
    attention_backward_float(const float* q, const float* k, const float* v, const float* out, const float* d_out,
                             const float* lse, float* dq, float* dk, float* dv, rl::i64 part, int T, int H, int share,
                             int q_pitch, int kv_pitch, int out_pitch, int dq_pitch, int dkv_pitch, float scale) {
  using namespace rl;
  const Window w;
  const int sample = blockIdx.x / H, head = blockIdx.x % H, group = head / share;
  const i64 first = static_cast<i64>(sample) * T;
  wait_for_previous();
  let_next_start();
  load_rows<BACKWARD_THREADS>(w.q, q + first * q_pitch + head * D, q_pitch, T);
  load_rows<BACKWARD_THREADS>(w.k, k + first * kv_pitch + group * D, kv_pitch, T);
  load_rows<BACKWARD_THREADS>(w.v, v + first * kv_pitch + group * D, kv_pitch, T);
  load_rows<BACKWARD_THREADS>(w.d_out, d_out + first * out_pitch + head * D, out_pitch, T);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  load_statistics(w, out + first * out_pitch + head * D, out_pitch, lse + static_cast<i64>(blockIdx.x) * T, T);
  __syncthreads();
  const i64 to = first * dkv_pitch + head % share * part + group * D;
  const int warp = threadIdx.x / WARP;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn)  // rows of both ends, so that warps have alike to do
    if (const int row = ROWS * (turn ? warp : 15 - warp); row < T)
      query_gradients(w, row, dq + first * dq_pitch + head * D, dq_pitch, T, scale);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn)
    if (const int row = ROWS * (turn ? warp : 15 - warp); row < T)
      key_gradients(w, row, dk + to, dv + to, dkv_pitch, T, scale);
}
