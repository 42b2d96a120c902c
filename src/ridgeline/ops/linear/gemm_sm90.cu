// D = epilogue(A[M, K] · B[N, K]ᵀ) for sm_90a: 16-bit operands, fp32 accumulators, any M, N and K; rows of every matrix
// start at multiples of 16 bytes.
//
// One producer warp feeds shared memory through the bulk copy engine; two or three consumer warpgroups take whole output
// tiles in turn, so that one's epilogue runs under the others' products. A block keeps its columns of B (RESIDENT) and walks down
// the rows of A, so that only A streams.
//
// Macros (a configuration is a set of them, see gemm.py):
//   GROUPS: consumer warpgroups, 2 or 3. TILE_M 64 or 128, TILE_N 64, 128 or 256: a warpgroup's output tile. STAGES: ring slots.
//   K_CHUNKS: ceil(K / 64). RESIDENT: B stays for a whole segment. B_TRANSPOSED: B is given as [K, N].
//   EPILOGUE: 0 D = acc (+ bias)   1 GELU: U = acc + bias, D = gelu(U)   2 D = C + dropout(acc + bias)
//             3 D = acc · gelu'(C), with column sums of D
//   HAS_BIAS, GELU_TANH, STORE_U (epilogue 1), DROPOUT (epilogue 2).
#include "gelu.cuh"
#include "ridgeline/dropout.cuh"
#include "smem.cuh"

using namespace rl;

constexpr int BLOCK_K = 64, ROW_BYTES = 128;              // a ring slot's rows are 64 values: one swizzle span
constexpr int M_BLOCKS = TILE_M / 64, N_HALVES = TILE_N / 64;
// A slot holds 64 columns of K for 64 rows of A where only A streams, so that few bytes wait for products to end; else of
// the whole tile and of B.
constexpr int PIECES = RESIDENT ? M_BLOCKS : 1, PIECE_M = TILE_M / PIECES;
constexpr int A_BYTES = PIECE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES;
constexpr int SLOT_BYTES = A_BYTES + (RESIDENT ? 0 : B_BYTES);
constexpr int RESIDENT_BYTES = RESIDENT ? K_CHUNKS * B_BYTES : 0;
constexpr int STEPS = K_CHUNKS * PIECES;                  // ring slots a tile takes
constexpr int IN_FLIGHT = RESIDENT && STAGES > 4 ? 2 : 1;  // slots whose products may be under way at a slot's issue
constexpr int PANEL_BYTES = 16 * ROW_BYTES;               // 16 rows × 64 columns of output: a warp's unit of work
constexpr int PANELS = M_BLOCKS * N_HALVES;               // panels a warp has in a tile
constexpr bool READS_C = EPILOGUE >= 2, BOTH = EPILOGUE == 1 && STORE_U;
constexpr int CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 152;  // and 40 for the producer's warpgroup
// dynamic shared memory: resident B, ring, a panel on each consumer warp's way out, C's panels, barriers
constexpr int RING = RESIDENT_BYTES, STAGING = RING + STAGES * SLOT_BYTES, C_POOL = STAGING + 4 * GROUPS * PANEL_BYTES;
constexpr int BARRIERS = C_POOL + (READS_C ? 8 : 0) * PANEL_BYTES, BARRIER_BYTES = 1024;

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (STAGES + slot); }
  RL_D u32 b_full(int chunk) const { return base + 8 * (2 * STAGES + chunk); }
  RL_D u32 b_free() const { return base + 8 * (2 * STAGES + K_CHUNKS); }
  RL_D u32 c_full(int group, int warp, int panel) const {
    return base + 8 * (2 * STAGES + K_CHUNKS + 1 + (group * 4 + warp) * PANELS + panel);
  }
  static constexpr int COUNT = 2 * STAGES + K_CHUNKS + 1 + 4 * GROUPS * PANELS;
};
static_assert(PANELS % 2 == 0, "C comes through two slots in turn");
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
  const TensorMap *a, *b, *c;
  u16 *d, *u;
  int d_step, u_step;  // elements from row to row
  int m, n;
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

RL_D void prefetch_a(const Problem& p, int chunk, int row) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) prefetch_2d(p.a, chunk * BLOCK_K, row + piece * PIECE_M);
}
RL_D void prefetch_c(const Problem& p, int step, int column, int row) {  // a STEPS-th of the tile's panels
  for (int i = step; i < 4 * PANELS; i += STEPS)
    prefetch_2d(p.c, column + 64 * (i % N_HALVES), row + 16 * (i / N_HALVES));
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
      if (tiles.valid() && chunk % share == mine) prefetch_a(p, chunk, tiles.row());
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) {
        const u32 target = smem + RING + slot * SLOT_BYTES, full = bar.full(slot);
        barrier_wait(bar.empty(slot), phase ^ 1);
        barrier_expect(full, SLOT_BYTES);
        copy_2d(target, p.a, chunk * BLOCK_K, row + piece * PIECE_M, full);
        if (!RESIDENT) load_b(p, target + A_BYTES, column, chunk, full);
        if (READS_C && tiles.valid()) prefetch_c(p, chunk * PIECES + piece, tiles.column(), tiles.row());
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

struct Cursor {  // a place in the ring
  int slot;
  u32 phase;
  RL_D void advance(int steps) {
    slot += steps;
    while (slot >= STAGES) slot -= STAGES, phase ^= 1;
  }
};

// The products of one tile, from `at` in the ring; `fresh`: B may still be on its way.
RL_D void multiply(float (&acc)[M_BLOCKS][TILE_N / 2], u32 smem, Barriers bar, Cursor at, bool fresh, u32 b_phase, int group,
                   int lane) {
  const u32 a_ring = static_cast<u32>(operand_k_major(smem + RING));
  const u32 b_start = operand_low(RESIDENT ? smem : smem + RING + A_BYTES);
  const auto before = [&](int steps) { return at.slot >= steps ? at.slot - steps : at.slot + STAGES - steps; };
#pragma unroll(STEPS <= 16 ? STEPS : 1)
  for (int step = 0; step < STEPS; ++step) {
    const int chunk = step / PIECES, piece = step % PIECES;
    if (RESIDENT && fresh && piece == 0) barrier_wait(bar.b_full(chunk), b_phase);
    barrier_wait(bar.full(at.slot), at.phase);
    const u32 a = a_ring + at.slot * (SLOT_BYTES / 16);
    const u32 b = b_start + (RESIDENT ? chunk * (B_BYTES / 16) : at.slot * (SLOT_BYTES / 16));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k)
#pragma unroll
      for (int i = 0; i < PIECE_M / 64; ++i)
        wgmma<TILE_N, 0, B_TRANSPOSED>(acc[PIECES == 1 ? i : piece], operand(a + i * (64 * ROW_BYTES / 16) + k * (32 / 16)),
                                       operand(b + k * ((B_TRANSPOSED ? 16 * ROW_BYTES : 32) / 16)), chunk + k > 0);
    wgmma_commit();
    if (step >= IN_FLIGHT) {
      wgmma_wait<IN_FLIGHT>();
      release(bar, before(IN_FLIGHT), lane);
    }
    at.advance(1);
  }
  named_arrive<256>(1 + (group + 1) % GROUPS);  // the next warpgroup's turn
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < M_BLOCKS; ++i) wgmma_touch(acc[i]);
#pragma unroll
  for (int step = STEPS < IN_FLIGHT ? STEPS : IN_FLIGHT; step > 0; --step) release(bar, before(step), lane);
}

// ---- epilogues, one panel (16 rows × 64 columns) a warp at a time; thread (row l / 4 + 8 h, columns 8 j + 2 (l % 4) + e)

struct Panel {
  u32 address;  // in shared memory
  int lane;
  RL_D u32 pair_of_groups(int j) const {  // where this lane's matrix row lies when column groups j and j + 1 move
    const int matrix = lane >> 3;
    return address + swizzle128((lane & 7) + 8 * (matrix & 1), j + (matrix >> 1));
  }
  RL_D void write(int j, const u32 (&values)[2][2]) const {  // column groups j and j + 1, rows l / 4 and l / 4 + 8
    store_matrices(pair_of_groups(j), values[0][0], values[0][1], values[1][0], values[1][1]);
  }
  RL_D void read(int j, u32 (&values)[2][2]) const {
    u32 m[4];
    load_matrices(m, pair_of_groups(j));
    values[0][0] = m[0], values[0][1] = m[1], values[1][0] = m[2], values[1][1] = m[3];
  }
  // To rows y … and columns x … of a matrix: whole lines of 128 bytes, four rows an instruction.
  RL_D void send(u16* matrix, int row_step, int x, int y, int m, int n) const {
    const int first = lane >> 3, chunk = lane & 7, column = x + 8 * chunk;
    u16* to = matrix + static_cast<i64>(y + first) * row_step + column;
    if (y + 16 <= m && x + 64 <= n) {
#pragma unroll
      for (int r = 0; r < 16; r += 4)
        *reinterpret_cast<uint4*>(to + r * row_step) = load_shared_16(address + swizzle128(first + r, chunk));
    } else {
#pragma unroll 1
      for (int r = 0; r < 16; r += 4) {
        const uint4 v = load_shared_16(address + swizzle128(first + r, chunk));
        if (y + first + r < m) store_part(to + r * row_step, v, n - column);
      }
    }
  }
  static RL_D void store_part(u16* to, uint4 v, int count) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (e < count) to[e] = static_cast<u16>(words[e / 2] >> (16 * (e % 2)));
  }
};

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

  RL_D Panel staging() const { return {smem + STAGING + (group * 4 + warp) * PANEL_BYTES, lane}; }
  RL_D Panel c_panel(int i) const { return {smem + C_POOL + (warp * 2 + (i & 1)) * PANEL_BYTES, lane}; }
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
    copy_2d(c_panel(i).address, p.c, column + 64 * (i % N_HALVES), row + 64 * (i / N_HALVES) + 16 * warp, full);
  }

  // Epilogues 0 and 1.
  RL_D void linear(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row) {
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      u32 later[BOTH ? 4 : 1][2][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 pre[2][2], out[2][2];
#pragma unroll
        for (int g = 0; g < 2; ++g)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float u0 = v[4 * (2 * j + g) + 2 * h], u1 = v[4 * (2 * j + g) + 2 * h + 1];
            const u32 b = bias[8 * (i % N_HALVES) + 2 * j + g];
            if (HAS_BIAS) u0 += pair_low(b), u1 += pair_high(b);
            pre[g][h] = pack_pair(u0, u1);
            if (EPILOGUE == 1) out[g][h] = pack_pair(gelu<GELU_TANH>(u0), gelu<GELU_TANH>(u1));
            if (BOTH) later[j][g][h] = out[g][h];
          }
        staging().write(2 * j, EPILOGUE == 1 && !BOTH ? out : pre);
      }
      __syncwarp();
      if (BOTH) {
        staging().send(p.u, p.u_step, x, y, p.m, p.n);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) staging().write(2 * j, later[j]);
        __syncwarp();
      }
      staging().send(p.d, p.d_step, x, y, p.m, p.n);
      __syncwarp();
    }
  }

  // Epilogues that read C, which comes two panels ahead: once a panel is read, its slot is filled for the next but one,
  // of this tile or of the one that follows, which the next warpgroup's warp of the same number takes.
  RL_D void with_c(float (&acc)[M_BLOCKS][TILE_N / 2], int column, int row, u32 phase, const Tiles& next) {
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const float* v = acc[i / N_HALVES] + 32 * (i % N_HALVES);
      const int x = column + 64 * (i % N_HALVES), y = row + 64 * (i / N_HALVES) + 16 * warp;
      u32 c[4][2][2];
      barrier_wait(bar.c_full(group, warp, i), phase);
#pragma unroll
      for (int j = 0; j < 4; ++j) c_panel(i).read(2 * j, c[j]);
      const Row mask_row = EPILOGUE == 2 && DROPOUT ? row_of(y) : Row{};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (EPILOGUE == 3) multiply_derivative(c[j], v + 8 * j, 8 * (i % N_HALVES) + 2 * j);
        if (EPILOGUE == 2) add_residual(c[j], v + 8 * j, 8 * (i % N_HALVES) + 2 * j, mask_row, x + 16 * j);
        staging().write(2 * j, c[j]);
      }
      __syncwarp();
      if (lane == 0) {
        if (i + 2 < PANELS) fetch_c(group, i + 2, column, row);
        else if (next.valid()) fetch_c((group + 1) % GROUPS, i + 2 - PANELS, next.column(), next.row());
      }
      staging().send(p.d, p.d_step, x, y, p.m, p.n);
      __syncwarp();
    }
  }
  RL_D void multiply_derivative(u32 (&c)[2][2], const float* v, int group_of_columns) {
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float d0 = v[4 * g + 2 * h] * gelu_derivative<GELU_TANH>(pair_low(c[g][h]));
        const float d1 = v[4 * g + 2 * h + 1] * gelu_derivative<GELU_TANH>(pair_high(c[g][h]));
        sums[group_of_columns + g][0] += d0;
        sums[group_of_columns + g][1] += d1;
        c[g][h] = pack_pair(d0, d1);
      }
  }
  struct Row {  // the dropout stream and first counter of the row whose masks this lane draws
    DropoutKeys keys;
    u32 counter;
  };
  RL_D Row row_of(int y) const {
    const int r = y + (lane >> 2) + 8 * (lane & 1), sample = r / mask.rows_per_sample;
    return {dropout_stream(mask.site, sample + mask.first_sample),
            static_cast<u32>(r - sample * mask.rows_per_sample) * mask.quads};
  }
  RL_D void add_residual(u32 (&c)[2][2], const float* v, int group_of_columns, const Row& mask_row, int x) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 b = bias[group_of_columns + g];
      u32 keep[2];
      if (DROPOUT) mask.draw(keep, mask_row.keys, mask_row.counter, x + 8 * g + 2 * (lane & 3), lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float t0 = v[4 * g + 2 * h], t1 = v[4 * g + 2 * h + 1];
        if (HAS_BIAS) t0 += pair_low(b), t1 += pair_high(b);
        if (DROPOUT) {
          t0 = keep[h] & 0x8000u ? t0 * mask.scale : 0.f;
          t1 = static_cast<int>(keep[h]) < 0 ? t1 * mask.scale : 0.f;
        }
        c[g][h] = pack_pair(pair_low(c[g][h]) + t0, pair_high(c[g][h]) + t1);
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
    for (int i = 0; i < 2; ++i) me.fetch_c(0, i, tiles.column(), tiles.row());
  int segment = 0, turn = 0;  // whose tile it is
  u32 round = 0;              // parity of this warpgroup's tiles
  Cursor at{0, 0};
  while (tiles.valid()) {
    const int column = tiles.column(), row = tiles.row();
    if (tiles.index == 0 && EPILOGUE != 3) me.load_bias(bias, column);
    Tiles next = tiles;
    next.advance();
    const bool last = next.index == 0;  // of this segment
    if (turn == me.group) {
      // Products strictly take turns. A wait tells only odd phases from even ones, so a warpgroup may look at a slot's
      // barrier only once every earlier phase of it is over: once the other warpgroup has seen the tile before.
      named_barrier<256>(1 + me.group);
      multiply(acc, me.smem, me.bar, at, tiles.index < GROUPS, segment & 1, me.group, me.lane);
      if (RESIDENT && last && me.lane == 0) barrier_arrive(me.bar.b_free());
      if (READS_C) me.with_c(acc, column, row, round, next);
      else me.linear(acc, column, row);
    } else if (RESIDENT && last && me.lane == 0) {
      barrier_arrive(me.bar.b_free());
    }
    if (last) {
      if (EPILOGUE == 3) me.write_sums(partials + static_cast<i64>((tiles.sums_row() * GROUPS + me.group) * 4 + me.warp) * p.n, column);
      ++segment;
    }
    tiles = next;
    at.advance(STEPS);
    if (++turn == GROUPS) turn = 0, round ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
         const __grid_constant__ TensorMap map_c, u16* d, u16* u, int d_step, int u_step, const int4* schedule,
         int segments, const u16* bias, float* partials, const i64* seed_step, int m, int n, u32 site, u32 threshold,
         float scale, int rows_per_sample, int first_sample) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const Problem p{&map_a, &map_b, &map_c, d, u, d_step, u_step, m, n};
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(p.a);
    prefetch_map(p.b);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(bar.full(i), 1);
      barrier_init(bar.empty(i), 4);
    }
    for (int i = 0; i < K_CHUNKS; ++i) barrier_init(bar.b_full(i), 1);
    barrier_init(bar.b_free(), 4 * GROUPS);
    for (int i = 0; i < 4 * GROUPS * PANELS; ++i) barrier_init(bar.c_full(0, 0, i), 1);
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
    registers_up<CONSUMER_REGISTERS>();
    Mask mask{};
    if (EPILOGUE == 2 && DROPOUT) {
      mask = {dropout_site(seed_step[0], seed_step[1], site), dropout_bias(threshold), scale, rows_per_sample, n / 4,
              first_sample};
    }
    Consumer me{p, mask, smem, bar, group, warp, lane};
    if (group == GROUPS - 1) named_arrive<256>(1);  // the first turn is warpgroup 0's
    consume(me, tiles, bias, partials);
  }
}
