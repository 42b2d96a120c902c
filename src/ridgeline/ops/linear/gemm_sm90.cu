// D = epilogue(A[M, K] · B[N, K]ᵀ) for sm_90a: 16-bit operands, fp32 accumulators, any M, N and K; rows of every matrix
// start at multiples of 16 bytes.
//
// One producer warp feeds shared memory through the bulk copy engine; two consumer warpgroups take whole output tiles in
// turn, so that one's epilogue runs under the other's products. A block keeps its columns of B (RESIDENT) and walks down
// the rows of A, so that only A streams.
//
// Macros (a configuration is a set of them, see gemm.py):
//   TILE_M 64 or 128, TILE_N 64, 128 or 256: a warpgroup's output tile. STAGES: ring slots.
//   K_CHUNKS: ceil(K / 64). RESIDENT: B stays for a whole segment. B_TRANSPOSED: B is given as [K, N].
//   EPILOGUE: 0 D = acc (+ bias)   1 GELU: U = acc + bias, D = gelu(U)   2 D = C + dropout(acc + bias)
//             3 D = acc · gelu'(C), with column sums of D
//   HAS_BIAS, GELU_TANH, STORE_U (epilogue 1), DROPOUT (epilogue 2).
#include "gelu.cuh"
#include "ridgeline/dropout.cuh"
#include "ridgeline/hopper.cuh"

using namespace rl;

constexpr int BLOCK_K = 64, ROW_BYTES = 128;              // a ring slot's rows are 64 values: one swizzle span
constexpr int M_BLOCKS = TILE_M / 64, N_HALVES = TILE_N / 64;
// A slot holds 64 columns of K for 64 rows of A where only A streams, so that few bytes wait for products to end; else of
// the whole tile and of B.
constexpr int PIECES = RESIDENT ? M_BLOCKS : 1, PIECE_M = TILE_M / PIECES;
constexpr int A_BYTES = PIECE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES;
constexpr int SLOT_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
constexpr int RESIDENT_BYTES = RESIDENT ? K_CHUNKS * B_BYTES : 0;
constexpr int PANEL_BYTES = 16 * ROW_BYTES;               // 16 rows × 64 columns of output: a warp's unit of work
constexpr int PANELS = M_BLOCKS * N_HALVES;               // panels a warp has in a tile
constexpr bool READS_C = EPILOGUE >= 2;
constexpr int BARRIER_BYTES = 1024;
// dynamic shared memory: resident B, ring, panels, barriers
constexpr int RING = RESIDENT_BYTES, PANEL_POOL = RING + STAGES * SLOT_BYTES;
constexpr int POOL_PANELS = READS_C ? 4 * PANELS : 2 * 4 * 2;
constexpr int BARRIERS = PANEL_POOL + POOL_PANELS * PANEL_BYTES;

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 b_full(int chunk) const { return base + 8 * (2 * STAGES + chunk); }
  RL_D u32 b_free() const { return base + 8 * (2 * STAGES + K_CHUNKS); }
  RL_D u32 c_full(int group, int warp, int panel) const {
    return base + 8 * (2 * STAGES + K_CHUNKS + 1 + (group * 4 + warp) * PANELS + panel);
  }
  static constexpr int COUNT = 2 * STAGES + K_CHUNKS + 1 + 8 * PANELS;
};
static_assert(PANELS % 2 == 0, "panels leave through two slots in turn");
static_assert(8 * Barriers::COUNT <= BARRIER_BYTES, "barriers overflow");

// A block's work: segments {column tile + 65536 · row of partial sums, first row tile, row tile step, count}, ended by a
// count of 0.
struct Tiles {
  const int4* segment;
  int4 now;
  int index;  // inside the segment
  RL_D explicit Tiles(const int4* first) : segment(first), now(*first), index(0) {}
  RL_D bool valid() const { return now.w > 0; }
  RL_D int column() const { return (now.x & 0xffff) * TILE_N; }
  RL_D int sums_row() const { return now.x >> 16; }
  RL_D int row() const { return (now.y + index * now.z) * TILE_M; }
  RL_D void advance() {
    if (++index == now.w) {
      now = *++segment;
      index = 0;
    }
  }
};

struct Problem {  // what every part of the kernel needs to know of its operands
  const TensorMap *a, *b, *c, *d, *u;
  int n;
};

RL_D void load_b(const Problem& p, u32 destination, int column, int chunk, u32 barrier) {
  if (B_TRANSPOSED) {
#pragma unroll
    for (int half = 0; half < N_HALVES; ++half)
      copy_2d(destination + half * BLOCK_K * ROW_BYTES, p.b, column + 64 * half, chunk * BLOCK_K, barrier);
  } else {
    copy_2d(destination, p.b, chunk * BLOCK_K, column, barrier);
  }
}

RL_D void prefetch(const Problem& p, int chunk, int row) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) prefetch_2d(p.a, chunk * BLOCK_K, row + piece * PIECE_M);
}

RL_D void produce(const Problem& p, Tiles tiles, u32 smem, Barriers bar) {
  int slot = 0, segments = 0;
  u32 phase = 0;
  // Blocks of different columns walk the same rows (a step above 1): each brings its share of the next rows' chunks into
  // L2 a tile ahead, so that nobody waits for memory.
  const int columns = ceil_div(p.n, TILE_N), sharers = columns < K_CHUNKS ? columns : K_CHUNKS;
  while (tiles.valid()) {
    const int column = tiles.column(), row = tiles.row();
    const bool new_b = RESIDENT && tiles.index == 0;
    if (new_b) {
      if (segments > 0) barrier_wait(bar.b_free(), (segments - 1) & 1);
      ++segments;
    }
    const int share = tiles.now.z > 1 ? sharers : 1, mine = (tiles.now.x & 0xffff) % share;
    tiles.advance();
    for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
      if (new_b) {
        barrier_expect(bar.b_full(chunk), B_BYTES);
        load_b(p, smem + chunk * B_BYTES, column, chunk, bar.b_full(chunk));
      }
      if (tiles.valid() && chunk % share == mine) prefetch(p, chunk, tiles.row());
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const u32 target = smem + RING + slot * SLOT_BYTES, full = bar.full(slot);
        barrier_wait(bar.empty(slot), phase ^ 1);
        barrier_expect(full, SLOT_BYTES);
        copy_2d(target, p.a, chunk * BLOCK_K, row + piece * PIECE_M, full);
        if (!RESIDENT) load_b(p, target + A_BYTES, column, chunk, full);
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
    }
  }
}

RL_D void release(Barriers bar, int slot, int lane) {
  if (lane == 0) barrier_arrive(bar.empty(slot));
}

// An operand descriptor's low word; byte offsets are added to it shifted right by 4. (Its high word is a constant.)
RL_D u32 operand_low(u32 address) {
  return static_cast<u32>(B_TRANSPOSED ? operand_mn_major(address, BLOCK_K * ROW_BYTES) : operand_k_major(address));
}
RL_D u64 operand(u32 low) { return static_cast<u64>(operand_k_major(0) >> 32) << 32 | low; }

// The products of one tile. `step` counts ring slots since the kernel began; `fresh`: B may still be on its way.
RL_D void multiply(float (&acc)[M_BLOCKS][TILE_N / 2], u32 smem, Barriers bar, int step, bool fresh, u32 b_phase, int group,
                   int lane) {
  int slot = step % STAGES, last = 0;
  u32 phase = step / STAGES & 1;
  const u32 a_ring = static_cast<u32>(operand_k_major(smem + RING));
  const u32 b_start = operand_low(RESIDENT ? smem : smem + RING + A_BYTES);
  for (int chunk = 0; chunk < K_CHUNKS; ++chunk) {
    if (RESIDENT && fresh) barrier_wait(bar.b_full(chunk), b_phase);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      barrier_wait(bar.full(slot), phase);
      const u32 a = a_ring + slot * (SLOT_BYTES / 16);
      const u32 b = b_start + (RESIDENT ? chunk * (B_BYTES / 16) : slot * (SLOT_BYTES / 16));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_K / 16; ++k)
#pragma unroll
        for (int i = 0; i < PIECE_M / 64; ++i)
          wgmma<TILE_N, 0, B_TRANSPOSED>(acc[piece + i], operand(a + i * (64 * ROW_BYTES / 16) + k * (32 / 16)),
                                         operand(b + k * ((B_TRANSPOSED ? 16 * ROW_BYTES : 32) / 16)), chunk + k > 0);
      wgmma_commit();
      if (chunk + piece > 0) {
        wgmma_wait<1>();
        release(bar, last, lane);
      }
      last = slot;
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
  }
  named_arrive<256>(2 - group);  // the other warpgroup's turn
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < M_BLOCKS; ++i) wgmma_touch(acc[i]);
  release(bar, last, lane);
}

// ---- epilogues, one panel (16 rows × 64 columns) a warp at a time; thread (row l / 4 + 8 h, columns 8 j + 2 (l % 4) + e)

struct Panel {
  u32 address;  // in shared memory
  int lane;
  RL_D u32 pair_of_groups(int j) const {  // where this lane's matrix row lies when column groups j and j + 1 move
    const int matrix = lane >> 3;
    return address + swizzle128((lane & 7) + 8 * (matrix & 1), j + (matrix >> 1));
  }
  RL_D void write(const u32 (&values)[8][2]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      store_matrices(pair_of_groups(j), values[j][0], values[j][1], values[j + 1][0], values[j + 1][1]);
  }
  RL_D void read(u32 (&values)[8][2]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 m[4];
      load_matrices(m, pair_of_groups(j));
      values[j][0] = m[0], values[j][1] = m[1], values[j + 1][0] = m[2], values[j + 1][1] = m[3];
    }
  }
};
RL_D void publish() {  // what the warp wrote to shared memory, to the copy engine
  fence_async();
  __syncwarp();
}

template <int PENDING>
RL_D void wait_sent(int lane) {  // all but the last PENDING panels of this warp have left shared memory
  if (lane == 0) store_wait_read<PENDING>();
  __syncwarp();
}

// Dropout of rows y, y + 8 and columns x + 8 j + …: two lanes share a counter, each draws one row's and passes half on.
struct Mask {
  DropoutKeys site;
  u32 bias;
  float scale;
  int rows_per_sample, quads, first_sample;
  // Keep bits of this lane's pairs of column group at `x` (bit 15 first element, bit 31 second) for rows y and y + 8.
  RL_D void draw(u32 (&bits)[2], DropoutKeys keys, u32 row_counter, int x, int lane) const {
    const DropoutWords words = dropout_words(row_counter + (x >> 2), keys);
    const bool odd = lane & 1;
    const u32 other = __shfl_xor_sync(FULL, odd ? words.word_0 : words.word_1, 1);
    bits[0] = dropout_keep_bits(odd ? other : words.word_0, bias);
    bits[1] = dropout_keep_bits(odd ? words.word_1 : other, bias);
  }
};

struct Consumer {
  const Problem& p;
  const Mask& mask;
  u32 smem;
  Barriers bar;
  int group, warp, lane;       // warpgroup 0 or 1, warp in it
  u32 bias[TILE_N / 8];        // packed pairs of this lane's columns
  float sums[EPILOGUE == 3 ? TILE_N / 8 : 1][2];

  RL_D Panel panel(int i) const {
    const int index = READS_C ? warp * PANELS + i : (group * 4 + warp) * 2 + i;
    return {smem + PANEL_POOL + index * PANEL_BYTES, lane};
  }
  RL_D void load_bias(const u16* pointer, int column) {
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j) {
      const int x = column + 8 * j + 2 * (lane & 3);
      bias[j] = 0;
      if (HAS_BIAS && x + 1 < p.n) bias[j] = *reinterpret_cast<const u32*>(pointer + x);
      else if (HAS_BIAS && x < p.n) bias[j] = pointer[x];
    }
  }
  // C panel i of the tile at (column, row), which warpgroup `reader` takes, into its slot; the slot must be free.
  RL_D void fetch_c(int reader, int i, int column, int row) const {
    const u32 full = bar.c_full(reader, warp, i);
    barrier_expect(full, PANEL_BYTES);
    copy_2d(panel(i).address, p.c, column + 64 * (i % N_HALVES), row + 64 * (i / N_HALVES) + 16 * warp, full);
  }

  // Epilogues 0 and 1. Arithmetic comes before the waits, so that panels sent earlier have had time to leave.
  RL_D void linear(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row) {
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      u32 out[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &u0 = v[4 * j + 2 * h], &u1 = v[4 * j + 2 * h + 1];
          if (HAS_BIAS) u0 += pair_low(bias[8 * (i % N_HALVES) + j]), u1 += pair_high(bias[8 * (i % N_HALVES) + j]);
          out[j][h] = EPILOGUE == 1 ? pack_pair(gelu<GELU_TANH>(u0), gelu<GELU_TANH>(u1)) : pack_pair(u0, u1);
        }
      constexpr bool BOTH = EPILOGUE == 1 && STORE_U;
      wait_sent<BOTH ? 0 : 1>(lane);
      if (BOTH) {
        u32 pre[8][2];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) pre[j][h] = pack_pair(v[4 * j + 2 * h], v[4 * j + 2 * h + 1]);
        panel(1).write(pre);
      }
      const Panel target = panel(BOTH ? 0 : i & 1);
      target.write(out);
      publish();
      if (lane == 0) {
        if (BOTH) store_2d(p.u, panel(1).address, x, y);
        store_2d(p.d, target.address, x, y);
        store_commit();
      }
    }
  }

  // Epilogues that read C. Its panels come through the slots D leaves through; once a panel has left, its slot is
  // filled for the tile that follows, which the other warpgroup's warp of the same number takes.
  RL_D void with_c(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row, u32 phase, const Tiles& next) {
    const int next_column = next.column(), next_row = next.row();
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      const Panel here = panel(i);
      u32 c[8][2];
      barrier_wait(bar.c_full(group, warp, i), phase);
      here.read(c);
      if (EPILOGUE == 3) multiply_derivative(c, v, 8 * (i % N_HALVES));
      if (EPILOGUE == 2) add_residual(c, v, 8 * (i % N_HALVES), x, y);
      here.write(c);
      publish();
      if (lane == 0) {
        store_2d(p.d, here.address, x, y);
        store_commit();
        if (i > 0 && next.valid()) {
          store_wait_read<1>();
          fetch_c(1 - group, i - 1, next_column, next_row);
        }
      }
    }
    if (lane == 0 && next.valid()) {
      store_wait_read<0>();
      fetch_c(1 - group, PANELS - 1, next_column, next_row);
    }
  }
  RL_D void multiply_derivative(u32 (&c)[8][2], const float* v, int group_of_columns) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float d0 = v[4 * j + 2 * h] * gelu_derivative<GELU_TANH>(pair_low(c[j][h]));
        const float d1 = v[4 * j + 2 * h + 1] * gelu_derivative<GELU_TANH>(pair_high(c[j][h]));
        sums[group_of_columns + j][0] += d0;
        sums[group_of_columns + j][1] += d1;
        c[j][h] = pack_pair(d0, d1);
      }
  }
  RL_D void add_residual(u32 (&c)[8][2], const float* v, int group_of_columns, int x, int y) {
    const int r = y + (lane >> 2) + 8 * (lane & 1);  // the row whose mask this lane draws
    const int sample = r / mask.rows_per_sample;
    const DropoutKeys keys = dropout_stream(mask.site, sample + mask.first_sample);
    const u32 row_counter = static_cast<u32>(r - sample * mask.rows_per_sample) * mask.quads;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 b = bias[group_of_columns + j];
      u32 keep[2];
      if (DROPOUT) mask.draw(keep, keys, row_counter, x + 8 * j + 2 * (lane & 3), lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float t0 = v[4 * j + 2 * h], t1 = v[4 * j + 2 * h + 1];
        if (HAS_BIAS) t0 += pair_low(b), t1 += pair_high(b);
        if (DROPOUT) {
          t0 = keep[h] & 0x8000u ? t0 * mask.scale : 0.f;
          t1 = static_cast<int>(keep[h]) < 0 ? t1 * mask.scale : 0.f;
        }
        c[j][h] = pack_pair(pair_low(c[j][h]) + t0, pair_high(c[j][h]) + t1);
      }
    }
  }
  // A segment's column sums: a row of `partials` for each consumer warp.
  RL_D void write_sums(float* partials, int column) {
#pragma unroll
    for (int j = 0; j < TILE_N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float s = sums[j][e];
        s += __shfl_xor_sync(FULL, s, 4);
        s += __shfl_xor_sync(FULL, s, 8);
        s += __shfl_xor_sync(FULL, s, 16);
        const int x = column + 8 * j + 2 * lane + e;
        if (lane < 4 && x < p.n) partials[x] = s;
        sums[j][e] = 0.f;
      }
  }
};

RL_D void consume(Consumer& me, Tiles tiles, const u16* bias, float* partials) {
  float acc[M_BLOCKS][TILE_N / 2];
  const Problem& p = me.p;
  if (EPILOGUE == 3)
    for (int j = 0; j < TILE_N / 8; ++j) me.sums[j][0] = me.sums[j][1] = 0.f;
  if (READS_C && me.group == 0 && me.lane == 0 && tiles.valid())
#pragma unroll
    for (int i = 0; i < PANELS; ++i) me.fetch_c(0, i, tiles.column(), tiles.row());
  int segment = 0;
  for (int tile = 0; tiles.valid(); ++tile) {
    const int column = tiles.column(), row = tiles.row();
    if (tiles.index == 0 && EPILOGUE != 3) me.load_bias(bias, column);
    Tiles next = tiles;
    next.advance();
    const bool last = next.index == 0;  // of this segment
    if ((tile & 1) == me.group) {
      // Products strictly take turns. A wait tells only odd phases from even ones, so a warpgroup may look at a slot's
      // barrier only once every earlier phase of it is over: once the other warpgroup has seen the tile before.
      named_barrier<256>(1 + me.group);
      multiply(acc, me.smem, me.bar, tile * K_CHUNKS * PIECES, tiles.index < 2, segment & 1, me.group, me.lane);
      if (RESIDENT && last && me.lane == 0) barrier_arrive(me.bar.b_free());
      if (READS_C) me.with_c(acc, column, row, tile >> 1 & 1, next);
      else me.linear(acc, column, row);
    } else if (RESIDENT && last && me.lane == 0) {
      barrier_arrive(me.bar.b_free());
    }
    if (last) {
      if (EPILOGUE == 3) me.write_sums(partials + static_cast<i64>((tiles.sums_row() * 2 + me.group) * 4 + me.warp) * p.n, column);
      ++segment;
    }
    tiles = next;
  }
  if (me.lane == 0) store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             const __grid_constant__ TensorMap map_c, const __grid_constant__ TensorMap map_d,
             const __grid_constant__ TensorMap map_u, const int4* schedule, int segments, const u16* bias, float* partials,
             const i64* seed_step, int n, u32 site, u32 threshold, float scale, int rows_per_sample,
             int first_sample) {
#ifdef RL_EMULATED
  const u32 smem = dynamic_smem();
#else
  extern __shared__ __align__(1024) u8 bytes[];
  const u32 smem = smem_address(bytes);
#endif
  const Barriers bar{smem + BARRIERS};
  const Problem p{&map_a, &map_b, &map_c, &map_d, &map_u, n};
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    prefetch_map(p.d);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(bar.full(i), 1);
      barrier_init(bar.empty(i), 4);
    }
    for (int i = 0; i < K_CHUNKS; ++i) barrier_init(bar.b_full(i), 1);
    barrier_init(bar.b_free(), 8);
    for (int i = 0; i < 8 * PANELS; ++i) barrier_init(bar.c_full(0, 0, i), 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const Tiles tiles(schedule + static_cast<i64>(blockIdx.x) * segments);
  if (group < 0) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(p, tiles, smem, bar);
  } else {
    registers_up<232>();
    Mask mask{};
    if (EPILOGUE == 2 && DROPOUT) {
      mask = {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, n / 4,
              first_sample};
    }
    Consumer me{p, mask, smem, bar, group, warp, lane};
    if (group == 1) named_arrive<256>(1);  // the first turn is warpgroup 0's
    consume(me, tiles, bias, partials);
  }
}
