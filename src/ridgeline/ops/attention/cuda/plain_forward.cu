// Forward of plain attention: output and log-sum-exp. The plan is in plain.cuh; here a warpgroup's block are 64 queries, and
// keys with their values stream by from the diagonal down.
#include "plain_queries.cuh"
#include "softmax.cuh"

namespace rl {

struct Arguments {
  const TensorMap *q, *k, *v;
  u16* o;
  float* lse;
  int T, blocks, heads, heads_per_group, units, o_pitch;
  float scale;
  int divisor;                                  // of a unit's number, see Turn
  u32 by_divisor, by_heads, by_heads_per_group;  // inverses, see `quotient`
  RL_D Turn turn(int number) const {
    const int whole = quotient(number, by_divisor);
    return Turn(Turn::by_length(units), whole, number - whole * divisor);
  }
  RL_D int sample(int head) const { return quotient(head, by_heads); }
  RL_D int key_head(int index) const { return quotient(index, by_heads_per_group); }
};
using Here = Place<1, false>;

// Probabilities of a warp's 16 rows, packed along columns, against a reference that suits them.
RL_D void exponentiate(u32 (&pairs)[16], const float (&s)[32], Softmax& x, float (&o)[D / 2], float scale) {
  float sum[2];
#pragma unroll 1
  while (true) {
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float p = exp2_fast(fmaf(s[4 * n + 2 * h], scale, -x.reference[h]));  // by name, or ptxas splits it
        const float q = exp2_fast(fmaf(s[4 * n + 2 * h + 1], scale, -x.reference[h]));
        sum[h] += p + q;
        pairs[2 * n + h] = pack_pair(p, q);
      }
    if (!any_in_warp(sum[0] > LIMIT || sum[1] > LIMIT)) break;
    raise_reference(x, o, s, scale);  // scores are larger by far than on the diagonal: rare
  }
  x.sum[0] += sum[0], x.sum[1] += sum[1];
}

// A query block's first square, the one on the diagonal, of whose columns the rows of warp WARP see 16 (WARP + 1) at most.
template <int WARP>
RL_D void exponentiate_seen(u32 (&pairs)[16], const float (&s)[32], Softmax& x, float scale, int lane) {
  const int row = lane >> 2, column = 2 * (lane & 3);  // of the two tiles of 8 × 8 that the diagonal goes through
  refer_to_own(x, s, scale, WARP, lane);
  x.sum[0] = x.sum[1] = 0.f;
  float nothing;  // for ptxas no constant: it would be there too early, while a product reads what was there before
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = 4 * n + 2 * h;
      if (n > 2 * WARP + h) {
        pairs[at / 2] = as_bits(nothing);
        continue;
      }
      float p = exp2_fast(fmaf(s[at], scale, -x.reference[h])), q = exp2_fast(fmaf(s[at + 1], scale, -x.reference[h]));
      if (at == 0) nothing = fminf(p, 0.f);
      if (n == 2 * WARP + h) p = column <= row ? p : 0.f, q = column < row ? q : 0.f;
      x.sum[h] += p + q;
      pairs[at / 2] = pack_pair(p, q);
    }
}
// Whether those references suit; if not, all is to be done again with the largest scores instead.
RL_D bool exponentiate_diagonal(u32 (&pairs)[16], float (&s)[32], Softmax& x, float scale, const Here& p) {
  if (p.warp < 2) {  // no switch: its jump would hide from ptxas that warps are whole
    if (p.warp < 1)
      exponentiate_seen<0>(pairs, s, x, scale, p.lane);
    else
      exponentiate_seen<1>(pairs, s, x, scale, p.lane);
  } else {
    if (p.warp < 3)
      exponentiate_seen<2>(pairs, s, x, scale, p.lane);
    else
      exponentiate_seen<3>(pairs, s, x, scale, p.lane);
  }
  if (!any_in_warp(x.sum[0] > LIMIT || x.sum[1] > LIMIT)) return true;
  mask_future(s, 0, p.warp, p.lane);
#pragma unroll
  for (int h = 0; h < 2; ++h) x.reference[h] = largest(s, h) * scale, x.sum[h] = 0.f;
  return false;
}

// The end of a query block: log-sum-exp and output.
RL_D void finish(const Arguments& a, const Here& p, const Unit& unit, int i, Softmax& x, const float (&o)[D / 2]) {
  float share[2];
  const int seen = a.T - 64 * i - 16 * p.warp;  // rows of the warp that there are
  float* lse = a.lse + (static_cast<i64>(unit.head) * a.T + 64 * i) + (16 * p.warp + (p.lane >> 2));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    x.sum[h] += shuffle_xor(x.sum[h], 1);
    x.sum[h] += shuffle_xor(x.sum[h], 2);
    share[h] = reciprocal_fast(x.sum[h]);
    if ((p.lane & 3) == 0 && (p.lane >> 2) + 8 * h < seen) lse[8 * h] = (x.reference[h] + log2_fast(x.sum[h])) * LN_2;
  }
  u16* out = a.o + ((static_cast<i64>(unit.batch) * a.T + 64 * i) * a.o_pitch + unit.index * D);
  store_rows(out + 16 * p.warp * a.o_pitch, a.o_pitch, o, share[0], share[1], seen, p.lane);
}

RL_D void run(const Arguments& a, const Here& p) {
  await_previous();
  const float scale = a.scale * LOG2_E;
  float s[32], o[D / 2];
  u32 pairs[16], tile = 0;
#pragma unroll 1
  for (int round = 0; unit_in(round) < a.units; ++round) {
    const Unit unit(a, unit_in(round));
    const int i = unit.block(p.group, round);
    const u32 queries = operand_at(p.own(p.group, round));
    Softmax x;
    int speaking = 1;  // lanes that give back the last tile: whose keys these are speaks for those who do not see them
    p.wait_own(round);
#pragma unroll 1
    for (int j = unit.top; j >= 0; --j, ++tile) {
      if (j <= i && i < a.blocks) {
        p.wait_full(tile);
        const u32 keys = operand_at(p.pair(tile));
        wgmma_fence();
        multiply_tiles(s, queries, keys, true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_touch(s);
        wgmma_touch(o);
        if (j < i) p.release(tile - 1, speaking);
        speaking = j < i ? 1 : 1 + unit.before(i);
        if (j < i || !exponentiate_diagonal(pairs, s, x, scale, p)) exponentiate(pairs, s, x, o, scale);
        wgmma_fence();
        multiply_pairs(o, pairs, keys + units(TILE), j == i);
        wgmma_commit();
      } else if (i >= a.blocks) {
        p.wait_full(tile);
        p.release(tile);
      }
    }
    wgmma_wait<0>();
    wgmma_touch(o);
    p.release_own(round);
    if (i < a.blocks) {
      p.release(tile - 1, speaking);
      finish(a, p, unit, i, x, o);
    }
  }
}

}  // namespace rl

// Grid: as many blocks as fit on the card, at most one for each unit. Tensor maps of (B, T, heads, D) tensors with boxes of
// 1 × 64 × 1 × D.
extern "C" __global__ void __launch_bounds__(rl::THREADS, BLOCKS_PER_PROCESSOR)
    attention_plain_forward(const __grid_constant__ rl::TensorMap q, const __grid_constant__ rl::TensorMap k,
                            const __grid_constant__ rl::TensorMap v, rl::u16* o, float* lse, int T, int heads,
                            int heads_per_group, int units, int o_pitch, float scale, int divisor, rl::u32 by_divisor,
                            rl::u32 by_heads, rl::u32 by_heads_per_group) {
  using namespace rl;
  const Arguments a{&q, &k, &v, o, lse, T, ceil_div(T, 64), heads, heads_per_group, units, o_pitch, scale, divisor, by_divisor,
                    by_heads, by_heads_per_group};
  const Here p;
  p.start();
  share_registers(p.copies());
  if (!p.copies())
    run(a, p);
  else
    copy_all(a, p, [&](const Unit& unit, int row, u32 to, u32 barrier) {
      barrier_expect(barrier, TILE);
      copy_4d(to, a.q, 0, unit.index, row, unit.batch, barrier);
    });
}
