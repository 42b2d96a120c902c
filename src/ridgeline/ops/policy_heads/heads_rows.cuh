// What a consumer warpgroup of the heads' Hopper kernel does with 64 rows: logits, loss, q.
#pragma once
#include "heads_state.cuh"

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
RL_D float infinite() { return from_bits(0x7f800000u); }

// What a tile's forward part sums over its columns, by products with W2: the logits, and what the sums over columns of
// du s and du v are the products of dl with, row by row: for du = (dl W2) slope, Σ du v = Σ dl (W2 (slope v)).
struct Totals {
  float logits[V_COLUMNS / 2] = {}, s[V_COLUMNS / 2] = {}, v[V_COLUMNS / 2] = {};
};

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

  RL_D void add_product(float (&sum)[V_COLUMNS / 2], const u32 (&pairs)[4][2], int piece) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32 operand[4] = {pairs[2 * k][0], pairs[2 * k][1], pairs[2 * k + 1][0], pairs[2 * k + 1][1]};
      wgmma_registers<V_COLUMNS, 0>(sum, operand, operand_k_major(down_piece(piece) + 32 * k), 1);
    }
  }
  // The tile's totals, a in shared memory, gelu' in half precision in p's place; what the tile at row `next` needs comes in
  // beside them.
  RL_D void forward(Totals& totals, u32 phase, int next) {
    uint4 eights[2][SHARE];
    if (E == 0) ask_state(eights, 0, next);
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
      float x[16];
      u32 slope[4][2], a[4][2], s_slope[4][2], v_slope[4][2];
      begin(x, piece, phase);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 sc = vectors(piece, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v0 = (x[4 * j + 2 * h] - mean[h] * from_bits(sc.x)) * scale[h];
          const float v1 = (x[4 * j + 2 * h + 1] - mean[h] * from_bits(sc.z)) * scale[h];
          float u0 = v0 + from_bits(sc.y), u1 = v1 + from_bits(sc.w);
          const u32 here = activate<false, true>(u0, u1);
          slope[j][h] = here, a[j][h] = pack_pair(u0, u1);
          v_slope[j][h] = pack_pair(v0 * half_low(here), v1 * half_high(here));
          s_slope[j][h] = pack_pair(from_bits(sc.x) * half_low(here), from_bits(sc.z) * half_high(here));
        }
      }
      store_pairs(slope, p_tile(smem, group, piece / 2), piece);
      wgmma_fence();
      add_product(totals.logits, a, piece);
      add_product(totals.v, v_slope, piece);
      add_product(totals.s, s_slope, piece);
      wgmma_commit();
      store_pairs(a, a_tile(smem, group, piece / 2), piece);
      if (E == 0) add_state(eights, piece), ask_state(eights, piece + 1, next);
      wgmma_wait<0>();
      wgmma_touch(totals.logits);
      wgmma_touch(totals.v);
      wgmma_touch(totals.s);
    }
  }

  // Loss, the logits' gradients as an operand and in the narrow tile, and the rows' α and β.
  RL_D void lose(Totals& totals, u32 (&said)[V_COLUMNS / 8][2], float (&shift)[2], float (&slope)[2]) {
    const u32 tile = narrow_tile(smem, group);
    auto& logits = totals.logits;
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
      const float part = valid ? reciprocal_fast(total) : 0.f;
      float c1 = 0.f, c2 = 0.f;
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i) {
        float& e = logits[4 * (i / 2) + 2 * h + i % 2];
        e = e * part - (valid && 8 * (i / 2) + 2 * quad + i % 2 == target ? 1.f : 0.f);
        classes[i] += e;
        c1 = fused_multiply_add(e, totals.s[4 * (i / 2) + 2 * h + i % 2], c1);
        c2 = fused_multiply_add(e, totals.v[4 * (i / 2) + 2 * h + i % 2], c2);
      }
      const float share = -scale[h] * (1.f / (WIDTH + E));
      slope[h] = share * scale[h] * quad_sum(c2), shift[h] = share * quad_sum(c1) - mean[h] * slope[h];
#pragma unroll
      for (int j = 0; j < V_COLUMNS / 8; ++j) {
        const float low = logits[4 * j + 2 * h], high = logits[4 * j + 2 * h + 1];
        dl[j / 2][2 * (j & 1) + h] = pack_pair(low * scale[h], high * scale[h]);
        store_shared_4(tile + swizzle128(row_of(0, h), j) + 4 * quad, pack_pair(low, high));
      }
    }
  }
  // α and β, and logits for the heads to come. Behind a fence, which would wait for these stores.
  RL_D void say(const u32 (&said)[V_COLUMNS / 8][2], const float (&shift)[2], const float (&slope)[2], int first) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(first, h);
      if (quad == 0 && row < p.rows) p.slopes[row] = shift[h], p.slopes[p.rows + row] = slope[h];
      if (!HEARD) continue;
      u16* out = p.heard + static_cast<i64>(row) * p.heard_stride + E + 2 * quad;
#pragma unroll
      for (int i = 0; i < V_COLUMNS / 4; ++i)
        if (row < p.rows && 8 * (i / 2) + 2 * quad + i % 2 < V)
          out[8 * (i / 2) + i % 2] = static_cast<u16>(said[i / 2][h] >> 16 * (i % 2));
    }
  }

  // q in gelu's derivative's place.
  RL_D void backward() const {
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const u32 tile = p_tile(smem, group, chunk);
      float x[32];
      u32 slope[2][4][2], q[4][2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < V_DEPTH / 16; ++k)
        wgmma_registers<64, 1>(x, dl[k], operand_mn_major(down_piece(2 * chunk) + 2048 * k, 0), k > 0);
      wgmma_commit();
#pragma unroll
      for (int half = 0; half < 2; ++half) load_pairs(slope[half], tile, half);
      wgmma_wait<0>();
      wgmma_touch(x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int i = 16 * half + 4 * j + 2 * h;
            q[j][h] = pack_pair(x[i] * half_low(slope[half][j][h]), x[i + 1] * half_high(slope[half][j][h]));
          }
        store_pairs(q, tile, half);
      }
      publish(bar.q_ready(group, chunk));
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
      Totals totals;
      float deviation[2], shift[2], slope[2];
      measure(tiles.row(), deviation);
      barrier_wait(bar.narrow_free(group), phase ^ 1);
      write_side(deviation);
      if (E == 0) ask(next);
      barrier_wait(bar.a_free(group), phase ^ 1);
      forward(totals, phase, next);
      if (E > 0) ask(next);
      u32 said[V_COLUMNS / 8][2];
      lose(totals, said, shift, slope);
      publish(bar.narrow_ready(group));
      say(said, shift, slope, tiles.row());
      backward();
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
