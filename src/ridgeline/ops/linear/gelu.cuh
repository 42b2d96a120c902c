// GELU, exact and tanh, as polynomials. Also compiles as host C++.
#pragma once
#include "ridgeline/common.cuh"
#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace rl {

// Φ(x) - 1/2, and the same of the tanh form, are odd: x · P(x²). P is the minimax polynomial of degree 8 on |x| < 4.25
// (4.1), found by Lawson's iteration; past that the product grows monotonically, so clamping to [0, 1], which is a
// free modifier of the last multiply-add, finishes the job. Largest error of Φ in fp32: 1.1e-5, everywhere.
template <bool TANH>
struct GeluSeries;
template <>
struct GeluSeries<false> {
  static constexpr float coefficient[9] = {3.989023268e-01f, -6.634449214e-02f, 9.815973230e-03f, -1.108561759e-03f,
                                           9.341887198e-05f, -5.626445727e-06f, 2.255438574e-07f, -5.327791985e-09f,
                                           5.564903052e-11f};
};
template <>
struct GeluSeries<true> {
  static constexpr float coefficient[9] = {3.989103138e-01f, -6.670168042e-02f, 1.007635240e-02f, -1.185547793e-03f,
                                           1.058635316e-04f, -6.823411695e-06f, 2.939191290e-07f, -7.467972907e-09f,
                                           8.388564843e-11f};
};

RL_HD float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

RL_HD float multiply_add_saturate(float a, float b, float c) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __saturatef(__fmaf_rn(a, b, c));
#else
  const float value = std::fma(a, b, c);
  return value > 0.f ? (value < 1.f ? value : 1.f) : 0.f;
#endif
}

// The share of x that GELU lets through, Φ(x): 10 instructions.
template <bool TANH>
RL_HD float gelu_gate(float x, float square) {
  constexpr auto& c = GeluSeries<TANH>::coefficient;
  float p = fused_multiply_add(c[8], square, c[7]);
  p = fused_multiply_add(p, square, c[6]);
  p = fused_multiply_add(p, square, c[5]);
  p = fused_multiply_add(p, square, c[4]);
  p = fused_multiply_add(p, square, c[3]);
  p = fused_multiply_add(p, square, c[2]);
  p = fused_multiply_add(p, square, c[1]);
  p = fused_multiply_add(p, square, c[0]);
  return multiply_add_saturate(x, p, 0.5f);
}

template <bool TANH>
RL_HD float gelu(float x) {
  return x * gelu_gate<TANH>(x, x * x);
}

// d GELU / dx. Exact: Φ + x φ. Tanh form: with s = Φ, Φ' = 2 k (1 + 3 · 0.044715 x²) s (1 - s), k = √(2/π).
template <bool TANH>
RL_HD float gelu_derivative(float x) {
  const float square = x * x, gate = gelu_gate<TANH>(x, square);
  float density;
  if (TANH) {
    density = fused_multiply_add(square, 0.2140644436f, 1.5957691216f) * fused_multiply_add(-gate, gate, gate);
  } else {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    density = exp2_fast(fused_multiply_add(square, -0.7213475204f, -1.3257480647f));
#else
    density = std::exp2(fused_multiply_add(square, -0.7213475204f, -1.3257480647f));
#endif
  }
  return fused_multiply_add(x, density, gate);
}

}  // namespace rl
