// What the kernels with keys as rows of a square share: a square's gradients, and the end of a block of keys.
#pragma once
#include "tiles.cuh"

namespace rl {

// Log-sum-exp and delta of the queries of a lane's two columns among columns 8 n to 8 n + 7.
RL_D uint4 load_statistics(u32 from, int n, int lane) { return load_shared_16(from + 64 * n + 16 * (lane & 3)); }
// P and dS from S and dP, packed along columns. stats(n): what load_statistics gives.
template <int HALF, typename Statistics>
RL_D void differentiate(u32 (&pairs_p)[HALF / 2], u32 (&pairs_ds)[HALF / 2], const float (&s)[HALF], const float (&dp)[HALF],
                        float scale, Statistics stats) {
#pragma unroll
  for (int n = 0; n < HALF / 4; ++n) {
    const uint4 x = stats(n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * n + 2 * h;
      const float p = exp2_fast(s[at] * scale - from_bits(x.x)), q = exp2_fast(s[at + 1] * scale - from_bits(x.z));
      pairs_p[2 * n + h] = pack_pair(p, q);
      pairs_ds[2 * n + h] = pack_pair(p * (dp[at] - from_bits(x.y)), q * (dp[at + 1] - from_bits(x.w)));
    }
  }
}
RL_D void store_part(float* out, const float (&d)[D / 2], float scale, int rows, int lane) {
  out += (lane >> 2) * D + 2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if ((lane >> 2) + 8 * h < rows)
        store_global_8(out + 8 * h * D + 8 * n, as_bits(d[4 * n + 2 * h] * scale), as_bits(d[4 * n + 2 * h + 1] * scale));
}
// dK and dV of key block j, by a warp.
template <typename Arguments, typename Unit>
RL_D void finish(const Arguments& a, const Unit& unit, int j, int warp, int lane, const float (&dk)[D / 2],
                 const float (&dv)[D / 2]) {
  const int row = 64 * j + 16 * warp;
  if (a.parts > 1) {  // another kernel sums them
    const i64 at = (static_cast<i64>(unit.part) * a.T + row) * D;
    store_part(a.dk_parts + at, dk, a.scale, a.T - row, lane);
    store_part(a.dv_parts + at, dv, 1.f, a.T - row, lane);
  } else {
    const i64 at = (static_cast<i64>(unit.batch) * a.T + row) * a.kv_pitch + unit.group * D;
    store_rows(a.dk + at, a.kv_pitch, dk, a.scale, a.scale, a.T - row, lane);
    store_rows(a.dv + at, a.kv_pitch, dv, 1.f, 1.f, a.T - row, lane);
  }
}

}  // namespace rl
