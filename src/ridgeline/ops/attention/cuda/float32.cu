// Causal attention in IEEE fp32 over short windows (T ≤ 256, head width 32), forward and backward, on the ordinary lanes.
//
// A thread block owns a head. Its rows lie whole in shared memory, and a warp owns 16 of them: of queries in the forward
// pass, of keys in the backward pass, where they stay while blocks of 64 queries go by. A warp's lanes are 4 rows by 8
// columns; a lane's products are 4 rows by 8 columns (scores) or 4 rows by 4 of D (values and gradients), so that 128 or
// 64 multiplications need 12 or 8 loads of 16 bytes. Pitches are such that the lanes of a load never meet in a bank.
//
// Gradients of shared keys come by query head, to be summed by a second launch.
#include "ridgeline/common.cuh"

namespace rl {

constexpr int D = 32, QUADS = D / 4;
constexpr int LONGEST = 256, BLOCK = 64, GROUP = 16;  // positions of a window, of a block of columns, of a warp
constexpr int PITCH = D + 4;       // floats between rows of a tile
constexpr int SPAN = BLOCK + 8;    // floats between rows of a warp's square
constexpr int TILE = LONGEST * PITCH, SQUARE = GROUP * SPAN;
constexpr int FORWARD_WARPS = LONGEST / GROUP, BACKWARD_WARPS = 8, TURNS = FORWARD_WARPS / BACKWARD_WARPS;
constexpr float HIDDEN = -3e38f;  // a score behind the row
constexpr float LOG2E = 1.4426950408889634f;
static_assert(TURNS == 2, "a warp of the backward pass owns two groups of keys");

// Rows of neighbouring heads: row t of sample b and head h starts at (b T + t) · pitch + h · D.
struct Lane {
  int row = static_cast<int>(threadIdx.x) % WARP / 8, column = static_cast<int>(threadIdx.x) % 8;
};

#ifdef RL_EMULATED
RL_D float* shared_floats() { return &shared<float>(dynamic_smem()); }
#else
extern __shared__ float4 dynamic[];
RL_D float* shared_floats() { return reinterpret_cast<float*>(dynamic); }
#endif

RL_D float4 quad(const float* place) { return *reinterpret_cast<const float4*>(place); }
RL_D void put_quad(float* place, const float (&v)[4], float factor) {
  *reinterpret_cast<float4*>(place) = make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
}
RL_D float sum_of_columns(float x) {
  for (int mask = 1; mask < 8; mask *= 2) x += __shfl_xor_sync(FULL, x, mask);
  return x;
}

// The first `rows` rows of a head into a tile; from T on zeros, up to a whole block.
template <int THREADS>
RL_D void load_rows(float* tile, const float* src, int pitch, int rows) {
  for (int n = threadIdx.x; n < ceil_div(rows, BLOCK) * BLOCK * QUADS; n += THREADS) {
    const int row = n / QUADS, at = n % QUADS * 4;
    *reinterpret_cast<float4*>(tile + row * PITCH + at) =
        row < rows ? quad(src + static_cast<i64>(row) * pitch + at) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// out[i][m] = Σ_d rows[4 i] · columns[8 m], both from tiles.
RL_D void scores(float (&out)[4][8], const float* rows, const float* columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int m = 0; m < 8; ++m) out[i][m] = 0.f;
#pragma unroll
  for (int d = 0; d < D; d += 4) {
    float4 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = quad(rows + 4 * i * PITCH + d);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const float4 b = quad(columns + 8 * m * PITCH + d);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[i][m] += a[i].x * b.x, out[i][m] += a[i].y * b.y, out[i][m] += a[i].z * b.z, out[i][m] += a[i].w * b.w;
    }
  }
}

RL_D void add_product(float (&out)[4], float a, float4 b) {
  out[0] += a * b.x, out[1] += a * b.y, out[2] += a * b.z, out[3] += a * b.w;
}

// out[i] += Σ_n square[4 i][n] · tile[n], n up to `count`.
RL_D void mix(float (&out)[4][4], const float* square, const float* tile, int count) {
#pragma unroll 4
  for (int n = 0; n < count; n += 4) {
    float4 b[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e] = quad(tile + (n + e) * PITCH);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 a = quad(square + 4 * i * SPAN + n);
      add_product(out[i], a.x, b[0]), add_product(out[i], a.y, b[1]);
      add_product(out[i], a.z, b[2]), add_product(out[i], a.w, b[3]);
    }
  }
}

RL_D void put_square(float* square, const float (&values)[4][8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int m = 0; m < 8; ++m) square[4 * i * SPAN + 8 * m] = values[i][m];
}

// One block of keys: weights of the rows so far are rescaled to the new maximum.
RL_D void soften(float (&s)[4][8], float (&largest)[4], float (&sum)[4], float (&out)[4][4], int above, float factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float top = largest[i];
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      if (8 * m > above + 4 * i) s[i][m] = HIDDEN;
      top = fmaxf(top, s[i][m]);
    }
    for (int mask = 1; mask < 8; mask *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, mask));
    const float shrink = exp2_fast((largest[i] - top) * factor);
    float total = 0.f;
#pragma unroll
    for (int m = 0; m < 8; ++m) s[i][m] = exp2_fast((s[i][m] - top) * factor), total += s[i][m];
    sum[i] = sum[i] * shrink + total;
#pragma unroll
    for (int e = 0; e < 4; ++e) out[i][e] *= shrink;
    largest[i] = top;
  }
}

// Gradients that a warp keeps of its 16 keys: rows 4 apart, four neighbours of D.
struct KeySums {
  float dk[4][4] = {}, dv[4][4] = {};

  RL_D void write(float* dk_row, float* dv_row, int pitch, int rows, float scale) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * i >= rows) continue;
      put_quad(dk_row + static_cast<i64>(4 * i) * pitch, dk[i], scale);
      put_quad(dv_row + static_cast<i64>(4 * i) * pitch, dv[i], 1.f);
    }
  }
};

// Shared memory of a backward block.
struct Window {
  float *q, *k, *v, *d_out, *squares, *halves, *lse, *delta;

  RL_D Window() {
    q = shared_floats(), k = q + TILE, v = k + TILE, d_out = v + TILE;
    squares = d_out + TILE, halves = squares + BACKWARD_WARPS * SQUARE;
    lse = halves + BLOCK * PITCH, delta = lse + LONGEST;
  }
};

// δ = Σ_d out · d_out of each row, and log-sum-exp in base 2; from T on such that no weight is left.
RL_D void load_statistics(const Window& w, const float* out, int pitch, const float* lse, int T) {
  const Lane lane;
  for (int row = threadIdx.x / 8; row < ceil_div(T, BLOCK) * BLOCK; row += BACKWARD_WARPS * WARP / 8) {
    float total = 0.f;
    if (row < T) {
      const float4 a = quad(out + static_cast<i64>(row) * pitch + 4 * lane.column);
      const float4 b = quad(w.d_out + row * PITCH + 4 * lane.column);
      total = a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    total = sum_of_columns(total);
    if (lane.column == 0) w.delta[row] = total, w.lse[row] = row < T ? lse[row] * LOG2E : -HIDDEN;
  }
}

// A warp's keys against the block of queries from `start` on: its sums grow, and its square holds dS.
RL_D void turn(const Window& w, KeySums& sums, float* square, int key, int start, float factor) {
  const Lane lane;
  const int above = start + lane.column - key;  // of the first query over the first key
  const float *const q_row = w.q + (start + lane.column) * PITCH, *const d_row = w.d_out + (start + lane.column) * PITCH;
  float p[4][8], d[4][8];
  scores(p, w.k + key * PITCH, q_row);
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const float lse = w.lse[start + lane.column + 8 * m];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i][m] = 4 * i > above + 8 * m ? 0.f : exp2_fast(p[i][m] * factor - lse);
  }
  put_square(square + lane.column, p);
  scores(d, w.v + key * PITCH, d_row);
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const float delta = w.delta[start + lane.column + 8 * m];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i][m] = p[i][m] * (d[i][m] - delta);
  }
  __syncwarp();
  mix(sums.dv, square, w.d_out + start * PITCH + 4 * lane.column, BLOCK);
  __syncwarp();
  put_square(square + lane.column, d);
  __syncwarp();
  mix(sums.dk, square, w.q + start * PITCH + 4 * lane.column, BLOCK);
}

// dq[i] += Σ_keys dS[key][query + i] · K[key] over 16 keys.
RL_D void add_queries(float (&dq)[4][4], const float* square, const float* keys) {
#pragma unroll 4
  for (int n = 0; n < GROUP; ++n) {
    const float4 a = quad(square + n * SPAN), b = quad(keys + n * PITCH);
    add_product(dq[0], a.x, b), add_product(dq[1], a.y, b), add_product(dq[2], a.z, b), add_product(dq[3], a.w, b);
  }
}

// dQ of a block of queries: four warps have each other's queries and half of the keys of every turn.
struct QuerySums {
  float dq[4][4] = {};
  int half = static_cast<int>(threadIdx.x) / WARP / 4, local = static_cast<int>(threadIdx.x) / WARP % 4 * GROUP + 4 * Lane().row;

  RL_D void take(const Window& w, int first_key, int groups) {
    const int middle = ceil_div(groups, 2), last = half ? groups : middle;
    for (int g = half ? middle : 0; g < last; ++g)
      add_queries(dq, w.squares + g * SQUARE + local, w.k + (first_key + g * GROUP) * PITCH + 4 * Lane().column);
  }
  RL_D void write(const Window& w, float* dst, int pitch, int rows, float scale) const {
    const int column = 4 * Lane().column;
    if (half)
      for (int i = 0; i < 4; ++i) put_quad(w.halves + (local + i) * PITCH + column, dq[i], 1.f);
    __syncthreads();
    if (half) return;
    for (int i = 0; i < 4 && local + i < rows; ++i) {
      const float4 other = quad(w.halves + (local + i) * PITCH + column);
      const float sum[4] = {dq[i][0] + other.x, dq[i][1] + other.y, dq[i][2] + other.z, dq[i][3] + other.w};
      put_quad(dst + static_cast<i64>(local + i) * pitch + column, sum, scale);
    }
  }
};

}  // namespace rl

// out, and lse[B, H, T]: the natural log-sum-exp of each row's scaled scores.  Grid B · H, 512 threads.
extern "C" __global__ void __launch_bounds__(512)
    attention_forward_float(const float* q, const float* k, const float* v, float* out, float* lse, int T, int H, int share,
                            int q_pitch, int kv_pitch, int out_pitch, float scale) {
  using namespace rl;
  float *const q_tile = shared_floats(), *const k_tile = q_tile + TILE, *const v_tile = k_tile + TILE;
  const int sample = blockIdx.x / H, head = blockIdx.x % H;
  const i64 first = static_cast<i64>(sample) * T;
  load_rows<512>(q_tile, q + first * q_pitch + head * D, q_pitch, T);
  load_rows<512>(k_tile, k + first * kv_pitch + head / share * D, kv_pitch, T);
  load_rows<512>(v_tile, v + first * kv_pitch + head / share * D, kv_pitch, T);
  __syncthreads();
  const Lane lane;
  const int warp = threadIdx.x / WARP, row = warp * GROUP + lane.row;
  if (warp * GROUP >= T) return;
  float* const square = v_tile + TILE + warp * SQUARE + lane.row * SPAN;
  float s[4][8], sums[4][4] = {}, sum[4] = {}, largest[4] = {HIDDEN, HIDDEN, HIDDEN, HIDDEN};
  for (int start = 0; start < (warp + 1) * GROUP; start += BLOCK) {
    scores(s, q_tile + row * PITCH, k_tile + (start + lane.column) * PITCH);
    soften(s, largest, sum, sums, row - start - lane.column, scale * LOG2E);
    __syncwarp();
    put_square(square + lane.column, s);
    __syncwarp();
    const int last = (warp + 1) * GROUP - start;
    mix(sums, square, v_tile + start * PITCH + 4 * lane.column, last < BLOCK ? last : BLOCK);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float total = sum_of_columns(sum[i]);
    const int t = row + 4 * i;
    if (t >= T) continue;
    put_quad(out + (first + t) * out_pitch + head * D + 4 * lane.column, sums[i], 1.f / total);
    if (lane.column == 0) lse[static_cast<i64>(blockIdx.x) * T + t] = largest[i] * scale + logf(total);
  }
}

// Gradients. dk and dv are those of each query head: head h writes part h % share (parts `part` floats apart), where key
// head h / share lies.  Grid B · H, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_float(const float* q, const float* k, const float* v, const float* out, const float* d_out,
                             const float* lse, float* dq, float* dk, float* dv, rl::i64 part, int T, int H, int share,
                             int q_pitch, int kv_pitch, int out_pitch, int dq_pitch, int dkv_pitch, float scale) {
  using namespace rl;
  constexpr int THREADS = BACKWARD_WARPS * WARP;
  const Window w;
  const int sample = blockIdx.x / H, head = blockIdx.x % H, group = head / share;
  const i64 first = static_cast<i64>(sample) * T;
  load_rows<THREADS>(w.q, q + first * q_pitch + head * D, q_pitch, T);
  load_rows<THREADS>(w.k, k + first * kv_pitch + group * D, kv_pitch, T);
  load_rows<THREADS>(w.v, v + first * kv_pitch + group * D, kv_pitch, T);
  load_rows<THREADS>(w.d_out, d_out + first * out_pitch + head * D, out_pitch, T);
  __syncthreads();
  load_statistics(w, out + first * out_pitch + head * D, out_pitch, lse + static_cast<i64>(blockIdx.x) * T, T);
  __syncthreads();
  const Lane lane;
  const int warp = threadIdx.x / WARP, groups = ceil_div(T, GROUP);
  float* const square = w.squares + warp * SQUARE + lane.row * SPAN;
  KeySums sums[TURNS];
  for (int start = 0; start < T; start += BLOCK) {
    const int seen = groups < (start + BLOCK) / GROUP ? groups : (start + BLOCK) / GROUP;  // groups of keys up to here
    QuerySums queries;
#pragma unroll
    for (int n = 0; n < TURNS; ++n) {
      const int before = n * BACKWARD_WARPS;
      if (before >= seen) continue;
      if (before + warp < seen) turn(w, sums[n], square, (before + warp) * GROUP + lane.row, start, scale * LOG2E);
      __syncthreads();
      queries.take(w, before * GROUP, seen - before < BACKWARD_WARPS ? seen - before : BACKWARD_WARPS);
      __syncthreads();
    }
    queries.write(w, dq + (first + start) * dq_pitch + head * D, dq_pitch, T - start, scale);
  }
  const i64 to = first * dkv_pitch + head % share * part + group * D + 4 * lane.column;
#pragma unroll
  for (int n = 0; n < TURNS; ++n) {
    const int key = (n * BACKWARD_WARPS + warp) * GROUP + lane.row;
    const i64 at = to + static_cast<i64>(key) * dkv_pitch;
    sums[n].write(dk + at, dv + at, dkv_pitch, T - key, scale);
  }
}
