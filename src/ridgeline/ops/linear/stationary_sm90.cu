// D = epilogue(A[M, K] · B[N, K]ᵀ) for sm_90a with B in registers: 16-bit operands, fp32 accumulators, K up to 768, any M
// and N; rows of every matrix start at multiples of 16 bytes. Beyond K 512 a third of B stays in shared memory.
//
// Each of two consumer warpgroups holds 64 rows of B (output columns) for a whole segment as wgmma's left operand, and
// walks down A, 64 rows at a time. Both read the same rows of A, so shared memory serves only those: half of what a
// product from shared memory would read. The accumulators hold Dᵀ: a thread has two output columns. There are two sets
// of them, so that a warpgroup does the epilogue of one tile while its products of the next run.
//
// Macros (see stationary.py):
//   K_CHUNKS: ceil(K / 64), at most 12. LAPS: tiles of A in the ring. B_TRANSPOSED: B is given as [K, N].
//   EPILOGUE: 0 D = acc (+ bias)   1 D = gelu(acc + bias), U = gelu'(acc + bias)   2 D = C + dropout(acc + bias)
//             3 D = acc · C, with column sums of D
//   HAS_BIAS, GELU_TANH and STORE_U (epilogue 1), DROPOUT (epilogue 2; a sample has at least 64 rows).
//   Slopes (U, and C of epilogue 3) are in half precision, whatever the rest is in; or with CODED in 8 bits in an order
//   of the kernel's own (slope_codes.cuh).
//   A norm without a pass of its own (stationary_rows.cuh):
//   STATS (epilogue 2): each row's sum and sum of squares over 64 columns of D are left beside it.
//   NORM (epilogues 0 and 1): A is a residual stream, B is W', the bias b' in fp32, acc / σ + b' takes the place of acc + bias.
//   SCALED (epilogue 3): D's rows times 1 / σ of a norm's rows, with column sums of D before that.
#include "ridgeline/dropout.cuh"
#include "stationary_copies.cuh"

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
  u32 zero = 0;        // which nobody knows
  u32 segment = 0;     // its parity
  u32 weights[4 * (K_CHUNKS - RESIDENT)][4];
  float bias[2], sums[2];
  u32 c[4];            // of two parts; with CODED of four, or what is written of four
  u32 code;            // where this lane's codes of the first half of rows lie in a tile
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
      for (int unit = 0; unit < UNITS; ++unit) {
        const int index = ring.first + unit;
        barrier_wait(bar.full(index), ring.phase);
        if (owner == group)
#pragma unroll
          for (int step = 0; step < 4 * PER_UNIT; ++step) {
            const int chunk = unit * PER_UNIT + step / 4;
            if (resident(chunk)) continue;
            u32(&fragment)[4] = weights[4 * held(chunk) + step % 4];
            const u32 tile = smem + index * UNIT_BYTES + step / 4 * TILE_BYTES;
            const int row = lane & 7, k = step % 4;
            if (B_TRANSPOSED)
              load_matrices_transposed(fragment, tile + swizzle128(16 * k + 8 * high + row, 2 * warp + low));
            else load_matrices(fragment, tile + swizzle128(16 * warp + 8 * low + row, 2 * k + high));
          }
        if (owner == group) fence_async();  // an arrival may overtake the reads: all is read before the engine writes there
        sync_warp();
        release(index);
      }
      ring.advance();
    }
    if (RESIDENT) barrier_wait(bar.b_full(group), segment);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int x = column + 16 * warp + (lane >> 2) + 8 * h;
      if (NORM) bias[h] = x < p.n ? rows.shift[x] : 0.f;
      else bias[h] = HAS_BIAS && x < p.n ? unpack_one(pointer[x]) : 0.f;
      sums[h] = 0.f;
    }
  }

  static RL_D constexpr int held(int chunk) { return chunk - (RESIDENT ? chunk / 3 : 0); }  // of chunks in registers, which
  RL_D void load_scales(int j) {
    const uint2 v = load_shared_8(smem + ROW_NUMBERS + (sent & 1) * ROW_NUMBERS_BYTES + 32 * j + 8 * (lane & 3));
    scales[j & 1][0] = from_bits(v.x), scales[j & 1][1] = from_bits(v.y);
  }

  RL_D u32 code_place(u32 tile, int half) const { return tile + half * HALF_CODES + (code ^ half * 64); }  // swizzled

  // Eight rows of a tile: columns lane / 4 (+ 8), rows 8 j + 2 (lane % 4) (+ 1).
  RL_D void part(float (&acc)[32], int j, int column, int row) {
    if (EPILOGUE == 2 && DROPOUT && j == 0) begin_mask(row);
    if (EPILOGUE == 2 && DROPOUT && j % 4 == 0) draw(j, column);
    if (READS_C && j == 0) barrier_wait(bar.c_full(group, sent & 1), sent >> 1 & 1);
    if (CODED && READS_C && j % 4 == 0) {
      const uint4 v = load_shared_16(code_place(c_tile(smem, group, sent & 1), j / 4));
      c[0] = v.x, c[1] = v.y, c[2] = v.z, c[3] = v.w;
    }
    if (!CODED && READS_C && j % 2 == 0) load_matrices_transposed(c, c_tile(smem, group, sent & 1) + matrix + j * 1024);
    if (BY_ROW && j == 0) {
      barrier_wait(bar.rows_full(sent & 1), sent >> 1 & 1);
      load_scales(0);
    }
    if (BY_ROW && j < 7) load_scales(j + 1);
    const float(&by_row)[2] = scales[j & 1];
    u32 out[2], slope[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 here = !CODED ? c[2 * (j & 1) + h] : h ? decode_slopes<1>(c[j & 3]) : decode_slopes<0>(c[j & 3]);
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
    if (BOTH && !CODED) store_matrix_pair_transposed(staging(smem, group, sent & 1, 1) + place, slope[0], slope[1]);
    if (BOTH && CODED) {
      c[j & 3] = encode_slopes(slope[0], slope[1]);
      if (j % 4 == 3) store_shared_16(code_place(staging(smem, group, sent & 1, 1), j / 4), c[0], c[1], c[2], c[3]);
    }
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
    const u32 start = static_cast<u32>(operand_k_major(smem)) + zero + first * (UNIT_BYTES / 16);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      barrier_wait(bar.full(first) + 8 * unit, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4 * PER_UNIT; ++step) {
        const u32 low = start + unit * (UNIT_BYTES / 16) + step / 4 * (TILE_BYTES / 16) + 2 * (step % 4);
        product(acc, unit * PER_UNIT + step / 4, step % 4, low, unit + step > 0);
      }
      wgmma_commit();
      if (OLD && unit == 0) {  // what the epilogue reads
        wgmma_wait<1>();
        wgmma_touch(old);
        release(slot_before());
      }
      if (OLD)
#pragma unroll
        for (int j = 8 * unit / UNITS; j < 8 * (unit + 1) / UNITS; ++j) part(old, j, column, row);
      if (unit > 0) {
        wgmma_wait<1>();
        release(first + unit - 1);
      }
    }
    ring.advance();
    if (OLD) send();
    // With one tile in the ring all operands lie where the last tile's did. Known, that would keep a register for each.
    if (LAPS == 1) zero += static_cast<u32>(p.rows >> 31);
  }
  // acc += B · Aᵀ for 16 of K: step `k` of a chunk.
  RL_D void product(float (&acc)[32], int chunk, int k, u32 a_low, bool accumulate) const {
    if (resident(chunk)) {
      const u32 tile = resident_tile(smem, group, chunk);
      const u32 b = static_cast<u32>(B_TRANSPOSED ? operand_mn_major(tile, TILE_BYTES) : operand_k_major(tile)) + zero;
      wgmma<ROWS, B_TRANSPOSED, 0>(acc, operand(b + k * (B_TRANSPOSED ? 128 : 2)), operand(a_low), accumulate);
    } else {
      wgmma_registers<ROWS, 0>(acc, weights[4 * held(chunk) + k], operand(a_low), accumulate);
    }
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
      if (RESIDENT && lane == 0) barrier_arrive(bar.b_empty(group));
      segment ^= 1;
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
  const Problem p{&map_a, &map_b, &map_c, &map_d, &map_u, n, count};
  const Rows rows{shares, rstd, shift, count};
  const int group = warp_uniform(threadIdx.x / 128) - 1, warp = warp_uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
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
    for (int i = 0; RESIDENT && i < GROUPS; ++i) {
      barrier_init(bar.b_full(i), 1);
      barrier_init(bar.b_empty(i), 4);
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
    registers_down<24>();
    if (warp == 0) produce(p, schedule, smem, bar);
    if (warp == 1 && (BY_ROW || READS_C)) produce_beside(p, rows, schedule, smem, bar, lane);
    if (warp >= 2 && (STATS || lane == 0)) deliver(p, rows, schedule, smem, bar, warp - 2, lane);
  } else {
    registers_up<240>();
    const int quarter = lane >> 3;
    Consumer me{p, smem, bar, group, warp, lane,
                swizzle128((lane & 7) + 8 * (quarter >> 1), 2 * warp + (quarter & 1))};
    if (CODED) me.code = WARP_CODES * warp + swizzle128(lane >> 3, lane & 7);
    if (EPILOGUE == 2 && DROPOUT)
      me.mask = {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, n / 4,
                 first_sample};
    me.consume(schedule, bias, rows, partials);
  }
}
