// GELU, exact and tanh, as polynomials. Also compiles as host C++.
#pragma once
#include "ridgeline/common.cuh"
#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cmath>
#include <cstring>
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

// ---- The same for pairs of numbers in half precision, two an instruction: half the instructions and a sixth of a bf16's
// rounding as error, so for bf16 results only. Φ(x) = (1 + tanh(x (a + b x²))) / 2, for the exact form with the a and b of
// least largest error (1.4e-4); infinite squares do no harm, because a and b are positive.

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
RL_D u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
RL_D float half_low(u32 pair) {
  float value;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;}" : "=f"(value) : "r"(pair));
  return value;
}
RL_D float half_high(u32 pair) {
  float value;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;}" : "=f"(value) : "r"(pair));
  return value;
}
RL_D u32 half_multiply(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
RL_D u32 half_multiply_add(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
RL_D u32 half_clamp(u32 a, u32 limit) {  // to ± limit
  u32 r;
  asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(limit));
  return r;
}
RL_D u32 half_tanh(u32 a) {
  u32 r;
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
#else
inline u32 half_pair(float low, float high) {
  const _Float16 values[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  u32 pair;
  std::memcpy(&pair, values, 4);
  return pair;
}
inline float half_low(u32 pair) {
  _Float16 value;
  std::memcpy(&value, &pair, 2);
  return value;
}
inline float half_high(u32 pair) { return half_low(pair >> 16); }
inline u32 half_multiply_add(u32 a, u32 b, u32 c) {
  return half_pair(half_low(a) * half_low(b) + half_low(c), half_high(a) * half_high(b) + half_high(c));
}
inline u32 half_multiply(u32 a, u32 b) { return half_pair(half_low(a) * half_low(b), half_high(a) * half_high(b)); }
inline u32 half_clamp(u32 a, u32 limit) {
  const auto clamp = [](float x, float most) { return std::abs(x) > most ? std::copysign(most, x) : x; };
  return half_pair(clamp(half_low(a), half_low(limit)), clamp(half_high(a), half_high(limit)));
}
inline u32 half_tanh(u32 a) { return half_pair(std::tanh(half_low(a)), std::tanh(half_high(a))); }
#endif

constexpr u32 HALF_HALF = 0x38003800u, MINUS_ONES = 0xbc00bc00u;  // (0.5, 0.5), (-1, -1)

template <bool TANH>
RL_HD u32 gelu_tanh_pair(u32 x, u32 square) {
  // tanh form: 0.7978846, 0.0356774; exact: 0.7988012, 0.0352822
  const u32 a = TANH ? 0x3a623a62u : 0x3a643a64u, b = TANH ? 0x28912891u : 0x28842884u;
  return half_tanh(half_multiply(x, half_multiply_add(square, b, a)));
}
template <bool TANH>
RL_HD u32 gelu_gate_pair(u32 x, u32 square) {
  return half_multiply_add(gelu_tanh_pair<TANH>(x, square), HALF_HALF, HALF_HALF);
}

// d GELU / dx, and Φ(x) in `gate`: Φ' = (1 - t²) (c + d x²) for t = 2 Φ - 1; in the tanh form c = a / 2 and d = 3 b / 2, for
// the exact form fitted. (An exponential would cost twice the time of a tanh again.)
template <bool TANH>
RL_HD u32 gelu_derivative_pair(u32 x, u32& gate) {
  x = half_clamp(x, 0x4c004c00u);  // ± 16: squares stay finite
  const u32 square = half_multiply(x, x), t = gelu_tanh_pair<TANH>(x, square);
  gate = half_multiply_add(t, HALF_HALF, HALF_HALF);
  // tanh form: 0.3989423, 0.0535161; exact: 0.3997, 0.0529
  const u32 c = TANH ? 0xb662b662u : 0xb665b665u, d = TANH ? 0xaadaaadau : 0xaac5aac5u;  // negative, as is t² - 1
  const u32 density = half_multiply(half_multiply_add(t, t, MINUS_ONES), half_multiply_add(square, d, c));
  return half_multiply_add(x, density, gate);
}

#ifdef RL_D
// v0 and v1 become their GELU; returns d GELU / dx of both in half precision (if SLOPE). Only fp16 results need arithmetic
// of more bits than that.
template <bool TANH, bool SLOPE>
RL_D u32 activate(float& v0, float& v1) {
  u32 gate, slope = 0;
  if (RL_FP16) {
    if (SLOPE) slope = half_pair(gelu_derivative<TANH>(v0), gelu_derivative<TANH>(v1));
    v0 = gelu<TANH>(v0), v1 = gelu<TANH>(v1);
    return slope;
  }
  const u32 x = half_pair(v0, v1);
  if (SLOPE) slope = gelu_derivative_pair<TANH>(x, gate);
  else gate = gelu_gate_pair<TANH>(x, half_multiply(x, x));
  v0 *= half_low(gate), v1 *= half_high(gate);
  return slope;
}
#endif

}  // namespace rl
