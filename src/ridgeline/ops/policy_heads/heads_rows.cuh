// What a consumer warpgroup of the heads' Hopper kernel does with 64 rows: logits, loss, q.
#pragma once
#include "heads_state.cuh"

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
RL_D float infinite() { return from_bits(0x7f800000u); }

// d0 and d1 times d GELU / du at u0 and u1.
RL_D void multiply_slopes(float& d0, float& d1, float u0, float u1) {
  if (RL_FP16) {
    d0 *= gelu_derivative<false>(u0), d1 *= gelu_derivative<false>(u1);
    return;
  }
  u32 gate;
  const u32 slopes = gelu_derivative_pair<false>(half_pair(u0, u1), gate);
  d0 *= half_low(slopes), d1 *= half_high(slopes);
}

// A thread has columns 8 j + 2 (lane % 4) + e of every 32.
struct Consumer : Rows {
  u32 smem;
  Barriers bar;
  int group;
  u32 place[2];             // where this lane's row of four 8 × 8 matrices lies in a tile
  u32 dl[V_DEPTH / 16][4];  // times r
  float classes[V_COLUMNS / 4] = {}, losses = 0.f, counts = 0.f;  // sums over this thread's rows

  RL_D Consumer(const Problem& p, u32 smem, Barriers bar, int group, int warp, int lane)
      : Rows(p, warp, lane), smem(smem), bar(bar), group(group) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      place[j] = swizzle128(16 * warp + (lane & 7) + 8 * (lane >> 3 & 1), 2 * j + (lane >> 4));
  }

  // Pairs of columns, in the layout of accumulators.
  RL_D void load_pairs(u32 (&pairs)[4][2], u32 tile, int piece) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      u32 m[4];
      load_matrices(m, tile + (place[j] ^ 64 * (piece % 2)));
      pairs[2 * j][0] = m[0], pairs[2 * j][1] = m[1], pairs[2 * j + 1][0] = m[2], pairs[2 * j + 1][1] = m[3];
    }
  }
  RL_D void store_pairs(const u32 (&pairs)[4][2], u32 tile, int piece) const {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      store_matrices(tile + (place[j] ^ 64 * (piece % 2)), pairs[2 * j][0], pairs[2 * j][1], pairs[2 * j + 1][0],
                     pairs[2 * j + 1][1]);
  }
  RL_D uint4 vectors(int piece, int j) const {  // s, c, s, c of this lane's two columns
    return load_shared_16(smem + VECTORS + (piece * 32 + 8 * j + 2 * quad) * 8);
  }

  // [l | μ | 1 / r] into the narrow tile.
  RL_D void write_side(const float (&deviation)[2]) const {
    const u32 tile = narrow_tile(smem, group);
#pragma unroll
    for (int j = 0; j < SIDE_COLUMNS / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 pair = E > 0 && j < E_DEPTH / 8 ? earlier[j / 2][2 * (j & 1) + h] : 0;
        const u32 own = pack_pair(mean[h], deviation[h]);
        const auto element = [&](int column, u32 logit) {
          return column < E ? logit : column == E ? own & 0xffffu : column == E + 1 ? own >> 16 : 0u;
        };
        const int column = 8 * j + 2 * quad;
        store_shared_4(tile + swizzle128(row_of(0, h), V_COLUMNS / 8 + j) + 4 * quad,
                       element(column, pair & 0xffffu) | element(column + 1, pair >> 16) << 16);
      }
  }

  // 32 columns of p and what the heads before add to them.
  RL_D void begin(float (&x)[16], int piece, u32 phase) const {
    u32 pairs[4][2];
    barrier_wait(bar.p_full(group, piece / 2), phase);
    load_pairs(pairs, p_tile(smem, group, piece / 2), piece);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) x[4 * j + 2 * h] = pair_low(pairs[j][h]), x[4 * j + 2 * h + 1] = pair_high(pairs[j][h]);
    if (E > 0) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < E_DEPTH / 16; ++k)
        wgmma_registers<32, 1>(x, earlier[k], operand_mn_major(earlier_piece(piece) + 2048 * k, 0), 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_touch(x);
    }
  }
  RL_D u32 earlier_piece(int piece) const { return smem + EARLIER + piece / 2 * B_BYTES + piece % 2 * 64; }
  RL_D u32 down_piece(int piece) const { return smem + DOWN + piece / 2 * DOWN_BYTES + piece % 2 * 64; }

  // Logits of the tile, a in shared memory, v in p's place; what the tile at row `next` needs comes in beside them.
  RL_D void forward(float (&logits)[V_COLUMNS / 2], u32 phase, int next) {
    uint4 eights[2][SHARE];
    if (E == 0) ask_state(eights, 0, next);
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
      float x[16];
      u32 v[4][2], a[4][2];
      begin(x, piece, phase);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 sc = vectors(piece, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v0 = (x[4 * j + 2 * h] - mean[h] * from_bits(sc.x)) * scale[h];
          const float v1 = (x[4 * j + 2 * h + 1] - mean[h] * from_bits(sc.z)) * scale[h];
          v[j][h] = pack_pair(v0, v1);
          float u0 = v0 + from_bits(sc.y), u1 = v1 + from_bits(sc.w);
          activate<false, false>(u0, u1);
          a[j][h] = pack_pair(u0, u1);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 operand[4] = {a[2 * k][0], a[2 * k][1], a[2 * k + 1][0], a[2 * k + 1][1]};
        wgmma_registers<V_COLUMNS, 0>(logits, operand, operand_k_major(down_piece(piece) + 32 * k), 1);
      }
      wgmma_commit();
      store_pairs(v, p_tile(smem, group, piece / 2), piece);
      store_pairs(a, a_tile(smem, group, piece / 2), piece);
      if (E == 0) add_state(eights, piece), ask_state(eights, piece + 1, next);
      wgmma_wait<0>();
      wgmma_touch(logits);
    }
  }

  // Loss, and the logits' gradients as an operand and in the narrow tile.
  RL_D void lose(float (&logits)[V_COLUMNS / 2], u32 (&said)[V_COLUMNS / 8][2]) {
    const u32 tile = narrow_tile(smem, group);
#pragma unroll
    for (int i = 0; i < V_DEPTH / 16; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) dl[i][k] = 0;
#pragma unroll
    for (int j = 0; j < V_COLUMNS / 8; ++j) {
      const uint2 bias = load_shared_8(smem + BIAS + (8 * j + 2 * quad) * 4);  // -infinity behind the classes
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &low = logits[4 * j + 2 * h], &high = logits[4 * j + 2 * h + 1];
        low += from_bits(bias.x), high += from_bits(bias.y);
        if (HEARD) said[j][h] = pack_pair(low, high);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int target = targets[h];
      const bool valid = target != IGNORE;
      float highest = -infinite(), total = 0.f, chosen = 0.f;
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i) {
        const float logit = logits[4 * (i / 2) + 2 * h + i % 2];
        highest = fmaxf(highest, logit);
        if (8 * (i / 2) + 2 * quad + i % 2 == target) chosen = logit;
      }
      highest = quad_largest(highest), chosen = quad_sum(chosen);
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i) {
        float& e = logits[4 * (i / 2) + 2 * h + i % 2];
        e = exp2_fast((e - highest) * LOG2_E);
        total += e;
      }
      total = quad_sum(total);
      if (target < 0 || target >= V) chosen = from_bits(0x7fffffffu);
      if (valid) losses += highest + LN_2 * log2_fast(total) - chosen, counts += 1.f;
      const float share = valid ? reciprocal_fast(total) : 0.f;
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i) {
        float& e = logits[4 * (i / 2) + 2 * h + i % 2];
        e = e * share - (valid && 8 * (i / 2) + 2 * quad + i % 2 == target ? 1.f : 0.f);
        classes[i] += e;
      }
#pragma unroll
      for (int j = 0; j < V_COLUMNS / 8; ++j) {
        const float low = logits[4 * j + 2 * h], high = logits[4 * j + 2 * h + 1];
        dl[j / 2][2 * (j & 1) + h] = pack_pair(low * scale[h], high * scale[h]);
        store_shared_4(tile + swizzle128(row_of(0, h), j) + 4 * quad, pack_pair(low, high));
      }
    }
  }
  // Logits for the heads to come. Behind a fence, which would wait for these stores.
  RL_D void say(const u32 (&said)[V_COLUMNS / 8][2], int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first, h);
      u16* out = p.heard + static_cast<i64>(row) * p.heard_stride + E + 2 * quad;
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i)
        if (row < p.rows && 8 * (i / 2) + 2 * quad + i % 2 < V)
          out[8 * (i / 2) + i % 2] = static_cast<u16>(said[i / 2][h] >> 16 * (i % 2));
    }
  }

  // q in v's place, and the rows' c1 and c2.
  RL_D void backward(float (&c1)[2], float (&c2)[2]) {
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
      const u32 tile = p_tile(smem, group, piece / 2);
      float x[16];
      u32 v[4][2], q[4][2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < V_DEPTH / 16; ++k)
        wgmma_registers<32, 1>(x, dl[k], operand_mn_major(down_piece(piece) + 2048 * k, 0), k > 0);
      wgmma_commit();
      load_pairs(v, tile, piece);
      wgmma_wait<0>();
      wgmma_touch(x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 sc = vectors(piece, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v0 = pair_low(v[j][h]), v1 = pair_high(v[j][h]);
          float q0 = x[4 * j + 2 * h], q1 = x[4 * j + 2 * h + 1];
          multiply_slopes(q0, q1, v0 + from_bits(sc.y), v1 + from_bits(sc.w));
          c1[h] = fused_multiply_add(q0, from_bits(sc.x), fused_multiply_add(q1, from_bits(sc.z), c1[h]));
          c2[h] = fused_multiply_add(q0, v0, fused_multiply_add(q1, v1, c2[h]));
          q[j][h] = pack_pair(q0, q1);
        }
      }
      store_pairs(q, tile, piece);
      if (piece % 2 == 1 || piece + 1 == PIECES) publish(bar.q_ready(group, piece / 2));
    }
  }
  RL_D void write_slopes(const float (&c1)[2], const float (&c2)[2], int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first, h);
      const float slope_h = -scale[h] * (1.f / (WIDTH + E)) * quad_sum(c2[h]);
      const float shift = -(1.f / (WIDTH + E)) * quad_sum(c1[h]) - mean[h] * slope_h;
      if (quad == 0 && row < p.rows) p.slopes[row] = shift, p.slopes[p.rows + row] = slope_h;
    }
  }
  RL_D void publish(u32 barrier) const {
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  RL_D void consume() {
    Tiles tiles(group);
    ask(tiles.row());
    if (E == 0)
#pragma unroll 1
      for (int piece = 0; piece < PIECES; ++piece) {
        uint4 eights[2][SHARE];
        ask_state(eights, piece, tiles.row()), add_state(eights, piece);
      }
    barrier_wait(bar.weights(), 0);
    for (; tiles.valid(p); tiles.advance()) {
      const u32 phase = tiles.round & 1;
      const int next = tiles.next();
      float logits[V_COLUMNS / 2] = {}, deviation[2];
      measure(tiles.row(), deviation);
      barrier_wait(bar.narrow_free(group), phase ^ 1);
      write_side(deviation);
      ask(next);
      barrier_wait(bar.a_free(group), phase ^ 1);
      forward(logits, phase, next);
      u32 said[V_COLUMNS / 8][2];
      lose(logits, said);
      publish(bar.narrow_ready(group));
      if (HEARD) say(said, tiles.row());
      float c1[2] = {}, c2[2] = {};
      backward(c1, c2);
      write_slopes(c1, c2, tiles.row());
    }
    write_sums();
  }
  RL_D void write_sums() const {
    float* sums = p.sums + (group * 4 + warp) * p.sums_stride;
#pragma unroll
    for (int i = 0; i < V_COLUMNS / 4; ++i) {
      const int column = 8 * (i / 2) + 2 * quad + i % 2;
      const float total = over_rows(classes[i]);
      if (lane < 4 && column < V) sums[CLASS_AT + column] = total;
    }
    const float all_losses = over_rows(losses), all_counts = over_rows(counts);
    if (lane == 0) sums[LOSS_AT] = all_losses, sums[LOSS_AT + 1] = all_counts;
  }
};
