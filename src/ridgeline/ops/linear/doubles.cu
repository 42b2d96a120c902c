// out = A · Bᵀ of fp32 matrices with what follows: bias, GELU and its derivative, a factor, a residual (doubles_tile.cuh).
#include "doubles_tile.cuh"

using namespace rl;

enum { PLAIN, BIAS, GELU, FACTOR, RESIDUAL };

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

// `other`: written with GELU's derivative if given, or read as factor or residual; laid out as `out`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    product_of_floats(const float* a, const float* b, float* out, const float* bias, float* other, int M, int N, int K,
                      int a_pitch, int b_pitch, int out_pitch) {
  using Work = Tile<A_ROWS, B_ROWS>;
  const int across = ceil_div(N, COLUMNS_N);
  const int row = static_cast<int>(blockIdx.x) / across * ROWS_M, column = static_cast<int>(blockIdx.x) % across * COLUMNS_N;
  const Place place;
  Sums sums;
  Totals totals;
  wait_for_previous();
  let_next_start();
  Work::run<false>(sums, totals, {a, a_pitch, M}, {b, b_pitch, N}, row, column, 0, K, place);
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + place.row + 16 * i + 8 * h + place.group;
      if (r >= M) continue;
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const int c = column + place.column + 8 * j + 2 * place.member;
        if (c >= N) continue;
        const i64 at = static_cast<i64>(r) * out_pitch + c;
        float value[2], slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const double sum = sums.of[i][j][2 * h + e];
          value[e] = static_cast<float>(bias ? sum + bias[c + e] : sum);
        }
        if (EPILOGUE == GELU) {
#pragma unroll
          for (int e = 0; e < 2; ++e) value[e] = gelu(value[e], slope[e]);
          if (other) *reinterpret_cast<Pair*>(other + at) = {slope[0], slope[1]};
        } else if (EPILOGUE != PLAIN) {
          const Pair with = *reinterpret_cast<const Pair*>(other + at);
          if (EPILOGUE == FACTOR) value[0] *= with.first, value[1] *= with.second;
          else value[0] += with.first, value[1] += with.second;
        }
        *reinterpret_cast<Pair*>(out + at) = {value[0], value[1]};
      }
    }
}
