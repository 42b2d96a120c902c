// D = epilogue(A[M, K] · B[N, K]ᵀ) for sm_90a with B in registers: 16-bit operands, fp32 accumulators, K up to 512, any M
// and N; rows of every matrix start at multiples of 16 bytes.
//
// Each of two consumer warpgroups holds 64 rows of B (output columns) for a whole segment as wgmma's left operand, and
// walks down A, 64 rows at a time. Both read the same rows of A, so shared memory serves only those: half of what a
// product from shared memory would read. The accumulators hold Dᵀ: a thread has two output columns. There are two sets
// of them, so that a warpgroup does the epilogue of one tile while its products of the next run.
//
// Macros (see stationary.py):
//   K_CHUNKS: ceil(K / 64), at most 8. LAPS: tiles of A in the ring. B_TRANSPOSED: B is given as [K, N].
//   EPILOGUE: 0 D = acc (+ bias)   1 D = gelu(acc + bias), U = gelu'(acc + bias)   2 D = C + dropout(acc + bias)
//             3 D = acc · C, with column sums of D
//   HAS_BIAS, GELU_TANH and STORE_U (epilogue 1), DROPOUT (epilogue 2; a sample has at least 64 rows).
//   Slopes (U, and C of epilogue 3) are in half precision, whatever the rest is in.
//   A norm without a pass of its own (stationary_rows.cuh):
//   STATS (epilogue 2): each row's sum and sum of squares over 64 columns of D are left beside it.
//   NORM (epilogues 0 and 1): A is a residual stream, B is W', the bias b' in fp32, acc / σ + b' takes the place of acc + bias.
//   SCALED (epilogue 3): D's rows times 1 / σ of a norm's rows, with column sums of D before that.
#include "stationary_layout.cuh"

#include "gelu.cuh"
#include "ridgeline/dropout.cuh"
#include "stationary_rows.cuh"

// B of each warpgroup, then the segment's rows of A, all through one ring.
RL_D void produce(const Problem& p, const int4* schedule, u32 smem, Barriers bar) {
  Ring ring;
  const auto slot = [&](int chunk) {  // free, and expecting a tile
    const int index = ring.first + chunk;
    barrier_wait(bar.empty(index), ring.phase ^ 1);
    barrier_expect(bar.full(index), TILE_BYTES);
    return index;
  };
  for (Segment now{*schedule}; now.valid(); now = {*++schedule}) {
    for (int group = 0; group < GROUPS; ++group, ring.advance())
      for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
        const int index = slot(chunk), column = now.column(group), k = chunk * 64;
        copy_2d(smem + index * TILE_BYTES, p.b, B_TRANSPOSED ? column : k, B_TRANSPOSED ? k : column, bar.full(index));
      }
    for (int tile = 0; tile < now.count(); ++tile, ring.advance())
      for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
        const int index = slot(chunk);
        copy_2d(smem + index * TILE_BYTES, p.a, chunk * 64, now.row(tile), bar.full(index));
      }
  }
}

// Tiles of C, and what the epilogue has for each row: a warp's work.
RL_D void produce_beside(const Problem& p, const Rows& rows, const int4* schedule, u32 smem, Barriers bar, int lane) {
  int sent = 0;
  RowScales next;
  for (Segment now{*schedule}; now.valid(); now = {*++schedule}) {
    if (BY_ROW) next.load(rows, now.row(0), lane);
    for (int tile = 0; tile < now.count(); ++tile, ++sent) {
      const int buffer = sent & 1;
      const u32 before = (sent >> 1 & 1) ^ 1;
      if (READS_C && lane == 0)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          barrier_wait(bar.c_empty(group, buffer), before);
          barrier_expect(bar.c_full(group, buffer), TILE_BYTES);
          copy_2d(c_tile(smem, group, buffer), p.c, now.column(group), now.row(tile), bar.c_full(group, buffer));
        }
      if (BY_ROW) {
        const RowScales mine = next;
        if (tile + 1 < now.count()) next.load(rows, now.row(tile + 1), lane);
        barrier_wait(bar.rows_empty(buffer), before);
        mine.store(smem + ROW_NUMBERS + buffer * ROW_NUMBERS_BYTES, lane);
        sync_warp();
        if (lane == 0) barrier_arrive(bar.rows_full(buffer));
      }
    }
  }
}

// Sends a warpgroup's finished tiles to memory: one lane's work, or with STATS a warp's.
RL_D void deliver(const Problem& p, const Rows& rows, const int4* schedule, u32 smem, Barriers bar, int group, int lane) {
  int sent = 0;
  for (Segment now{*schedule}; now.valid(); now = {*++schedule})
    for (int tile = 0; tile < now.count(); ++tile, ++sent) {
      const int buffer = sent & 1, column = now.column(group), row = now.row(tile);
      barrier_wait(bar.staged(group, buffer), sent >> 1 & 1);
      if (lane == 0) {
        store_2d(p.d, staging(smem, group, buffer, 0), column, row);
        if (BOTH) store_2d(p.u, staging(smem, group, buffer, 1), column, row);
        store_commit();
        store_wait_read<1>();
        if (sent > 0) barrier_arrive(bar.vacant(group, buffer ^ 1));
      }
      if (STATS) {
        sum_rows(rows, staging(smem, group, buffer, 0), column, row, p.n, lane);
        sync_warp();
      }
    }
  if (lane == 0) store_wait_read<0>();
}

// A descriptor from its low word; the high one is a constant.
RL_D u64 operand(u32 low) { return static_cast<u64>(operand_k_major(0) >> 32) << 32 | low; }

// Dropout of a tile of D. Four neighbouring columns of a row share a counter; the four lanes that hold them draw four rows'
// counters each, and pass on one bit a column.
struct Mask {
  DropoutKeys site;
  u32 bias;
  float scale;
  int rows_per_sample, quads, first_sample;
};

struct Consumer {
  const Problem& p;
  u32 smem;
  Barriers bar;
  int group, warp, lane;
  u32 matrix;          // where this lane's row of four 8 × 8 matrices lies in a tile of D, U or C: [tokens, columns]
  Ring ring;
  int sent = 0;        // tiles
  u32 weights[4 * K_CHUNKS][4];
  float bias[2], sums[2];
  u32 c[4];            // of two parts
  float scales[2][2];  // BY_ROW: 1 / σ of both rows of a part, and of the next part's
  Mask mask;
  DropoutKeys keys[2];  // of the sample that the tile's first row belongs to, and of the next
  int position;         // of the first row in its sample
  u32 kept[4];          // bit 4 (2 h + e), from each of the four lanes: whether this lane's column is kept

  // Row `row` begins a tile of dropout.
  RL_D void begin_mask(int row) {
    const int sample = row / mask.rows_per_sample;
    position = row - sample * mask.rows_per_sample;
#pragma unroll
    for (int next = 0; next < 2; ++next) keys[next] = dropout_stream(mask.site, sample + next + mask.first_sample);
  }
  // Bits for parts j to j + 3: the lane of quad member i draws for part j + i.
  RL_D void draw(int j, int column) {
    const int member = lane >> 2 & 3;
    u32 bits = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int place = position + 8 * (j + member) + 2 * (lane & 3) + e, next = place >= mask.rows_per_sample;
        const u32 row_counter = (place - (next ? mask.rows_per_sample : 0)) * mask.quads;
        const u32 counter = row_counter + (column + 16 * warp + 8 * h) / 4 + (lane >> 4);
        const DropoutKeys mine{next ? keys[1].key_0 : keys[0].key_0, next ? keys[1].key_1 : keys[0].key_1};
        const DropoutWords words = dropout_words(counter, mine);
        const u32 low = (dropout_keep_bits(words.word_0, mask.bias) & 0x80008000u) >> 15;
        const u32 high = (dropout_keep_bits(words.word_1, mask.bias) & 0x80008000u) >> 13;
        bits |= (low | high) << (4 * (2 * h + e));
      }
#pragma unroll
    for (int from = 0; from < 4; ++from)
      kept[from] = __shfl_sync(FULL, bits, (lane & 0x13) | from << 2) >> ((member & 1) * 16 + (member >> 1) * 2);
  }

  RL_D void release(int slot) const {
    if (lane == 0) barrier_arrive(bar.empty(slot));
  }
  RL_D int slot_before() const { return (ring.first == 0 ? STAGES : ring.first) - 1; }  // the last tile's last

  RL_D void load_weights(const u16* pointer, const Rows& rows, int column) {
    const int q = lane >> 3, low = q & 1, high = q >> 1;
#pragma unroll
    for (int owner = 0; owner < GROUPS; ++owner) {
#pragma unroll
      for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
        barrier_wait(bar.full(ring.first + chunk), ring.phase);
        const u32 tile = smem + (ring.first + chunk) * TILE_BYTES;
        if (owner == group)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            u32(&fragment)[4] = weights[4 * chunk + k];
            const int row = lane & 7;
            if (B_TRANSPOSED)
              load_matrices_transposed(fragment, tile + swizzle128(16 * k + 8 * high + row, 2 * warp + low));
            else load_matrices(fragment, tile + swizzle128(16 * warp + 8 * low + row, 2 * k + high));
          }
        if (owner == group) fence_async();  // an arrival may overtake the reads: all is read before the engine writes there
        sync_warp();
        release(ring.first + chunk);
      }
      ring.advance();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int x = column + 16 * warp + (lane >> 2) + 8 * h;
      if (NORM) bias[h] = x < p.n ? rows.shift[x] : 0.f;
      else bias[h] = HAS_BIAS && x < p.n ? unpack_one(pointer[x]) : 0.f;
      sums[h] = 0.f;
    }
  }

  RL_D void load_scales(int j) {
    const uint2 v = load_shared_8(smem + ROW_NUMBERS + (sent & 1) * ROW_NUMBERS_BYTES + 32 * j + 8 * (lane & 3));
    scales[j & 1][0] = from_bits(v.x), scales[j & 1][1] = from_bits(v.y);
  }

  // Eight rows of a tile: columns lane / 4 (+ 8), rows 8 j + 2 (lane % 4) (+ 1).
  RL_D void part(float (&acc)[32], int j, int column, int row) {
    if (EPILOGUE == 2 && DROPOUT && j == 0) begin_mask(row);
    if (EPILOGUE == 2 && DROPOUT && j % 4 == 0) draw(j, column);
    if (READS_C && j == 0) barrier_wait(bar.c_full(group, sent & 1), sent >> 1 & 1);
    if (READS_C && j % 2 == 0) load_matrices_transposed(c, c_tile(smem, group, sent & 1) + matrix + j * 1024);
    if (BY_ROW && j == 0) {
      barrier_wait(bar.rows_full(sent & 1), sent >> 1 & 1);
      load_scales(0);
    }
    if (BY_ROW && j < 7) load_scales(j + 1);
    const float(&by_row)[2] = scales[j & 1];
    u32 out[2], slope[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 here = c[2 * (j & 1) + h];
      float v0 = acc[4 * j + 2 * h], v1 = acc[4 * j + 2 * h + 1];
      if (EPILOGUE == 3) {
        v0 *= half_low(here), v1 *= half_high(here);
        sums[h] += v0 + v1;
        if (SCALED) v0 *= by_row[0], v1 *= by_row[1];
      } else if (NORM) {
        v0 = fmaf(v0, by_row[0], bias[h]), v1 = fmaf(v1, by_row[1], bias[h]);
      } else if (HAS_BIAS) {
        v0 += bias[h], v1 += bias[h];
      }
      if (EPILOGUE == 2) {
        if (DROPOUT) {
          v0 = kept[j & 3] >> (8 * h) & 1 ? v0 * mask.scale : 0.f;
          v1 = kept[j & 3] >> (8 * h + 4) & 1 ? v1 * mask.scale : 0.f;
        }
        v0 += pair_low(here), v1 += pair_high(here);
      }
      if (EPILOGUE == 1) slope[h] = activate<GELU_TANH, STORE_U>(v0, v1);
      out[h] = pack_pair(v0, v1);
    }
    const u32 place = matrix + j * 1024;
    if (j == 0) barrier_wait(bar.vacant(group, sent & 1), (sent >> 1 & 1) ^ 1);
    store_matrix_pair_transposed(staging(smem, group, sent & 1, 0) + place, out[0], out[1]);
    if (BOTH) store_matrix_pair_transposed(staging(smem, group, sent & 1, 1) + place, slope[0], slope[1]);
    if (j == 7 && (READS_C || BY_ROW)) {  // what was read of both has been used, too: an arrival may overtake reads
      sync_warp();
      if (READS_C && lane == 0) barrier_arrive(bar.c_empty(group, sent & 1));
      if (BY_ROW && lane == 0) barrier_arrive(bar.rows_empty(sent & 1));
    }
  }
  RL_D void send() {  // the tile is whole
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(bar.staged(group, sent & 1));
    ++sent;
  }

  // Products of a tile into `acc`, and meanwhile the epilogue of the tile before (if OLD), whose row is `row`.
  template <bool OLD>
  RL_D void tile(float (&acc)[32], float (&old)[32], int column, int row) {
    const int first = ring.first;
    const u32 start = static_cast<u32>(operand_k_major(smem)) + first * (TILE_BYTES / 16);
#pragma unroll
    for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
      barrier_wait(bar.full(first) + 8 * chunk, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_registers<ROWS, 0>(acc, weights[4 * chunk + k], operand(start + chunk * (TILE_BYTES / 16) + 2 * k),
                                 chunk + k > 0);
      wgmma_commit();
      if (OLD && chunk == 0) {  // what the epilogue reads
        wgmma_wait<1>();
        wgmma_touch(old);
        release(slot_before());
      }
      if (OLD)
#pragma unroll
        for (int j = 8 * chunk / K_CHUNKS; j < 8 * (chunk + 1) / K_CHUNKS; ++j) part(old, j, column, row);
      if (chunk > 0) {
        wgmma_wait<1>();
        release(first + chunk - 1);
      }
    }
    ring.advance();
    if (OLD) send();
  }
  RL_D void finish(float (&acc)[32], int column, int row) {
    wgmma_wait<0>();
    wgmma_touch(acc);
    release(slot_before());
#pragma unroll
    for (int j = 0; j < 8; ++j) part(acc, j, column, row);
    send();
  }
  RL_D void write_sums(float* partials, int column) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float s = sums[h];
      s += __shfl_xor_sync(FULL, s, 1);
      s += __shfl_xor_sync(FULL, s, 2);
      const int x = column + 16 * warp + (lane >> 2) + 8 * h;
      if ((lane & 3) == 0 && x < p.n) partials[x] = s;
    }
  }

  RL_D void consume(const int4* schedule, const u16* bias_pointer, const Rows& rows, float* partials) {
    float even[32], odd[32];
    for (Segment now{*schedule}; now.valid(); now = {*++schedule}) {
      const int column = now.column(group), count = now.count();
      load_weights(bias_pointer, rows, column);
      tile<false>(even, odd, column, 0);
      int next = 1;
      for (; next + 1 < count; next += 2) {
        tile<true>(odd, even, column, now.row(next - 1));
        tile<true>(even, odd, column, now.row(next));
      }
      if (next < count) {
        tile<true>(odd, even, column, now.row(next - 1));
        finish(odd, column, now.row(next));
      } else {
        finish(even, column, now.row(next - 1));
      }
      if (EPILOGUE == 3) write_sums(partials + static_cast<i64>(now.sums_row()) * p.n, column);
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    stationary(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
               const __grid_constant__ TensorMap map_c, const __grid_constant__ TensorMap map_d,
               const __grid_constant__ TensorMap map_u, const int4* schedule, int segments, const u16* bias, float* partials,
               const i64* seed_step, int n, u32 site, u32 threshold, float scale, int rows_per_sample, int first_sample,
               float2* shares, const float* rstd, const float* shift, int count) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Problem p{&map_a, &map_b, &map_c, &map_d, &map_u, n};
  const Rows rows{shares, rstd, shift, count};
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    prefetch_map(p.d);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(bar.full(i), 1);
      barrier_init(bar.empty(i), 4 * GROUPS);
    }
    for (int i = 0; i < 2 * GROUPS; ++i) {
      barrier_init(bar.c_full(0, i), 1);
      barrier_init(bar.c_empty(0, i), 4);
      barrier_init(bar.staged(0, i), 4);
      barrier_init(bar.vacant(0, i), 1);
    }
    for (int i = 0; BY_ROW && i < 2; ++i) {
      barrier_init(bar.rows_full(i), 1);
      barrier_init(bar.rows_empty(i), 4 * GROUPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  schedule += static_cast<i64>(blockIdx.x) * segments;
  if (group < 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(p, schedule, smem, bar);
    if (warp == 1 && (BY_ROW || (READS_C && lane == 0))) produce_beside(p, rows, schedule, smem, bar, lane);
    if (warp >= 2 && (STATS || lane == 0)) deliver(p, rows, schedule, smem, bar, warp - 2, lane);
  } else {
    registers_up<232>();
    const int quarter = lane >> 3;
    Consumer me{p, smem, bar, group, warp, lane,
                swizzle128((lane & 7) + 8 * (quarter >> 1), 2 * warp + (quarter & 1))};
    if (EPILOGUE == 2 && DROPOUT)
      me.mask = {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, n / 4,
                 first_sample};
    me.consume(schedule, bias, rows, partials);
  }
}
