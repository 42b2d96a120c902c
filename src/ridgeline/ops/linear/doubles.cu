// out = A · Bᵀ of fp32 matrices with what follows: bias, GELU and its derivative, a factor, a residual (doubles_tile.cuh).
#include "doubles_tile.cuh"

using namespace rl;

enum { PLAIN, GELU, FACTOR, RESIDUAL };

RL_D float reciprocal(float x) {
#ifdef RL_EMULATED
  return 1 / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// GELU of u, and its derivative. The tanh form is u · s with s = 1 / (1 + exp(−2 z)), z = √(2/π) u (1 + 0.044715 u²).
RL_D float gelu(float u, float& slope) {
  constexpr float LOG2_E = 1.44269504088896f, SQRT_2_OVER_PI = 0.79788456080287f, CUBE = 0.044715f;
#if TANH
  const float z = u * (1.f + CUBE * u * u) * SQRT_2_OVER_PI;
  const float opposite = exp2_fast(fminf(z * (-2.f * LOG2_E), 80.f)), s = reciprocal(1.f + opposite);
  slope = s + u * s * (opposite * s) * ((2.f + 6.f * CUBE * u * u) * SQRT_2_OVER_PI);
  return u * s;
#else
  const float share = 0.5f + 0.5f * erff(u * 0.70710678118655f);
  slope = share + u * exp2_fast(u * u * (-0.5f * LOG2_E)) * 0.39894228040143f;
  return u * share;
#endif
}

struct alignas(8) Pair {
  float first, second;
};

// `bias` with BIAS. `other`: written with GELU's derivative if given, or read as factor or residual; laid out as `out`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    product_of_floats(const float* a, const float* b, float* out, const float* bias, float* other, int M, int N, int K,
                      int a_pitch, int b_pitch, int out_pitch) {
  using Work = Tile<A_ROWS, B_ROWS>;
  constexpr bool BESIDE = EPILOGUE == FACTOR || EPILOGUE == RESIDUAL;
  const int across = ceil_div(N, COLUMNS_N);
  const int row = static_cast<int>(blockIdx.x) / across * ROWS_M, column = static_cast<int>(blockIdx.x) % across * COLUMNS_N;
  const Place place;
  Sums sums;
  Totals totals;
  wait_for_previous();
  let_next_start();
  float shift[FRAGMENTS_N][2] = {};  // asked for now, and kept: behind the sums each is a wait, one after the other
  if (BIAS)
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (const int c = column + place.column + 8 * j + 2 * place.member + e; c < N) shift[j][e] = bias[c];
  Work::run<false, BESIDE>(sums, totals, {a, a_pitch, M}, {b, b_pitch, N}, row, column, 0, K, place,
                           {other + static_cast<i64>(row) * out_pitch + column, out_pitch, M - row, N - column});
  const auto sum = [&](int i, int h, int j, int e) {
    const double whole = sums.of[i][j][2 * h + e];
    return static_cast<float>(BIAS ? whole + shift[j][e] : whole);
  };
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int line = place.row + 16 * i + 8 * h + place.group, r = row + line;
      if (r >= M) continue;
      const float* beside = Work::row_beside(line, K) + place.column + 2 * place.member;
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const int c = column + place.column + 8 * j + 2 * place.member;
        const i64 at = static_cast<i64>(r) * out_pitch + c;
        Pair value = {sum(i, h, j, 0), sum(i, h, j, 1)};
        if (EPILOGUE == GELU) {
          Pair slope;
          value = {gelu(value.first, slope.first), gelu(value.second, slope.second)};
          if (other && c < N) *reinterpret_cast<Pair*>(other + at) = slope;
        } else if (BESIDE) {
          const Pair with = *reinterpret_cast<const Pair*>(beside + 8 * j);
          value = EPILOGUE == FACTOR ? Pair{value.first * with.first, value.second * with.second}
                                     : Pair{value.first + with.first, value.second + with.second};
        }
        if (c < N) *reinterpret_cast<Pair*>(out + at) = value;
      }
    }
}
