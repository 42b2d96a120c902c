// Gradients of K and V whose query heads were shared out: the sums over the shares of a key head.
#pragma once
#include "ridgeline/common.cuh"

namespace rl {

RL_D void add(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
// Four neighbouring elements, number `index`, of [B, T, groups, WIDTH] in rows of `pitch` elements, from
// [B, groups · shares, T, WIDTH].
template <int WIDTH>
RL_D void sum_shares(const float4* from, u16* to, int index, int T, int groups, int shares, int pitch) {
  constexpr int QUADS = WIDTH / 4;
  const int quad = index % QUADS, group = index / QUADS % groups, row = index / (QUADS * groups);  // row: b * T + t
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int s = 0; s < shares; ++s) {
    const i64 head = static_cast<i64>(row / T) * groups * shares + group * shares + s;
    add(sum, from[(head * T + row % T) * QUADS + quad]);
  }
  to += static_cast<i64>(row) * pitch + group * WIDTH + 4 * quad;
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair(sum.x, sum.y), pack_pair(sum.z, sum.w));
}

}  // namespace rl
