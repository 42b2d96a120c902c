// The end of a language model in one pass over its residual stream r [rows, 256], for sm_90a: the last norm, a head of at
// most 80 classes without a bias, the cross-entropy, and all of it backward. r is read once and its gradient written once.
//
//   n = (r − μ) / σ      z = W (n · w + b)      g = scale · (softmax(z) − target)      dr = norm'(g W)
//
// With G = W · diag(w), its columns' sums a = Σ_c G, and W b, no norm is made: z = (r G − μ a) / σ + W b. A row's gradient is
// D − mean(D) − n · mean(D n), D = (g / σ) G, and both means come from the classes: Σ_c D = (g / σ) a, Σ_c D n = (g / σ) z
// without W b. What the weights' gradients are made of is left by each block: Σ n g of each column and class, made of
// Σ r (g / σ) and Σ μ g / σ, and behind it Σ g of each class; and its loss.
//
// A tile is 64 rows, a warpgroup's; of four in shared memory two are worked on. Rows lie as panels of 64 columns under the
// 128-byte swizzle; the gradient takes their place and leaves from there.
//
// Macros: CLASSES, COUNTS partial numbers of valid rows, IGNORE: the target of a row that does not count, RMS, NORM_BIAS.
#include "columns.cuh"

using namespace rl;

constexpr int WIDTH = 256, PANELS = WIDTH / 64, ROWS = 64, PANEL_BYTES = ROWS * 128, TILE_BYTES = PANELS * PANEL_BYTES;
constexpr int COLUMNS = ceil_div(CLASSES, 8) * 8, BLOCKS = COLUMNS / 8, PARTS = ceil_div(BLOCKS, 4);  // classes of a product
constexpr int PADDED = ceil_div(CLASSES, 16) * 16, STEPS = PADDED / 16, HEAD_PANEL = PADDED * 128;
constexpr int SLOTS = 4, HEAD = SLOTS * TILE_BYTES, SLOPES = HEAD + PANELS * HEAD_PANEL, SLOPES_BYTES = 2 * PANEL_BYTES;
constexpr int TABLES = SLOPES + 2 * SLOPES_BYTES, BARRIERS = TABLES + 2 * PADDED * 4;
constexpr float LOG2_E = 1.44269504088896f, LOWEST = -3.0e38f;
static_assert(HEAD_PANEL % 1024 == 0 && PADDED <= 80, "panels begin at multiples of 1024 bytes");

struct Place {
  int group, warp, lane;  // consumer warpgroup 0 or 1 (the producer's is -1), warp in it, lane
};

struct Barriers {
  u32 base;
  RL_D u32 full(int slot) const { return base + 8 * slot; }
  RL_D u32 empty(int slot) const { return base + 8 * (SLOTS + slot); }
  RL_D void init() const {
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 4);
    }
    barrier_init_fence();
  }
};

// A block's tiles, in the order of their slots; its warpgroups take them in turn. The first rows come first: the kernel before
// has gone the other way, and left them in L2.
RL_D int row_of(int turn) { return ROWS * (static_cast<int>(blockIdx.x) + turn * static_cast<int>(gridDim.x)); }

RL_D void produce(const TensorMap* map, int rows, u32 smem, Barriers bar) {
  for (int turn = 0; row_of(turn) < rows; ++turn) {
    const int slot = turn % SLOTS;
    barrier_wait(bar.empty(slot), (turn / SLOTS & 1) ^ 1);
    if (!elected()) continue;
    barrier_expect(bar.full(slot), TILE_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      copy_2d(smem + slot * TILE_BYTES + panel * PANEL_BYTES, map, 64 * panel, row_of(turn), bar.full(slot));
  }
}

RL_D float over_warp(float x) {
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) x += shuffle_xor(x, step);
  return x;
}

// G as rows of classes, in panels of 64 columns, and what the tables hold of each class: a and W b. A warp takes a class.
RL_D void make_head(const u16* weight, const u16* scale, const u16* shift, u32 smem, int thread) {
  const int chunk = thread % WARP;
  for (int v = thread / WARP; v < PADDED; v += 384 / WARP) {
    const bool known = v < CLASSES;
    const uint4 zero = {0, 0, 0, 0}, w = known ? *reinterpret_cast<const uint4*>(weight + v * WIDTH + 8 * chunk) : zero;
    const uint4 s = *reinterpret_cast<const uint4*>(scale + 8 * chunk);
    const uint4 b = NORM_BIAS ? *reinterpret_cast<const uint4*>(shift + 8 * chunk) : zero;
    const u32 ws[4] = {w.x, w.y, w.z, w.w}, ss[4] = {s.x, s.y, s.z, s.w}, bs[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f, constant = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = pack_pair(pair_low(ws[i]) * pair_low(ss[i]), pair_high(ws[i]) * pair_high(ss[i]));
      store_shared_u32(smem + HEAD + chunk / 8 * HEAD_PANEL + swizzle128(v, chunk % 8) + 4 * i, pair);
      sum += pair_low(pair) + pair_high(pair);
      constant += pair_low(ws[i]) * pair_low(bs[i]) + pair_high(ws[i]) * pair_high(bs[i]);
    }
    sum = over_warp(sum), constant = over_warp(constant);
    if (chunk == 0) {
      const u32 mine = smem + TABLES + v / 2 * 16 + v % 2 * 4;
      store_shared(mine, sum);
      store_shared(mine + 8, constant);
    }
  }
}

// 1 / number of valid rows.
RL_D float mean_scale(const int* counts, int lane) {
  float valid = 0.f;  // whole numbers up to 2²⁴ a part, and their sum's rounding is fp32's
  for (int i = lane; i < COUNTS; i += WARP) valid += static_cast<float>(counts[i]);
  return 1.f / over_warp(valid);
}

// A warp's 16 rows of an area of 64 whose panels are PANEL_BYTES apart: where this lane finds four 8 × 8 matrices, of columns
// 8 j … 8 j + 15 (j even). Matrix 2 (j % 2) + h has rows l / 4 + 8 h, as accumulators have.
struct Lines {
  u32 start, base, turn;
  RL_D Lines(u32 area, const Place& me)
      : start(area + me.warp * 2048), base(start + (me.lane % 16) * 128), turn((me.lane / 16 ^ me.lane % 8) << 4) {}
  RL_D u32 at(int j) const { return base + j / 8 * PANEL_BYTES + ((j % 8 * 16) ^ turn); }
};

RL_D float over_row(float x) {  // four lanes have a row
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
RL_D float largest_of_row(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// What a lane knows of its two rows, l / 4 and 8 below.
struct Rows {
  float rstd[2], mean[2];
  int target[2];
  RL_D void load(const float* means, const float* rstds, const i64* targets, int row, int rows, const Place& me) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int here = row + 16 * me.warp + me.lane / 4 + 8 * h;
      rstd[h] = here < rows ? rstds[here] : 0.f;
      mean[h] = !RMS && here < rows ? means[here] : 0.f;
      target[h] = here < rows ? static_cast<int>(targets[here]) : IGNORE;
    }
  }
};

// Of a row's gradient: dr = D + slope · r + offset.
struct Line {
  float slope[2], offset[2];
};

RL_D constexpr bool inside(int j) { return 8 * j + 8 <= CLASSES; }  // whether all eight are classes

// What the tables hold of two neighbouring classes.
struct Pair {
  float a[2], constant[2];
  RL_D Pair(u32 tables, int j, const Place& me) : a{}, constant{} {
    if (RMS && !NORM_BIAS) return;
    float all[4];
    load_shared_4(all, tables + 64 * j + 16 * (me.lane % 4));
    a[0] = all[0], a[1] = all[1], constant[0] = all[2], constant[1] = all[3];
  }
  RL_D float whole(float z, int e) const { return NORM_BIAS ? z + constant[e] : z; }
};

// From z's products to the slopes g / σ, the rows' lines, and sums over rows.
RL_D Line differentiate(float (&z)[COLUMNS / 2], const Lines& slopes, float (&sums)[2][PARTS], float& loss, const Rows& s,
                        float scale, u32 tables, const Place& me) {
  const int own = 2 * (me.lane % 4);  // of eight classes, the first that this lane has
  float highest[2] = {LOWEST, LOWEST}, total[2] = {}, factor[2], base[2], inner[2] = {}, plain[2] = {};
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const Pair pair(tables, j, me);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i / 2, e = i % 2;
      float& x = z[4 * j + i];
      x = RMS ? x * s.rstd[h] : (x - s.mean[h] * pair.a[e]) * s.rstd[h];
      if (inside(j) || own + e < CLASSES - 8 * j) highest[h] = fmaxf(highest[h], pair.whole(x, e));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) base[h] = -LOG2_E * (highest[h] = largest_of_row(highest[h]));
  const auto exponential = [&](const Pair& pair, int j, int i) {
    const float power = exp2_fast(fmaf(pair.whole(z[4 * j + i], i % 2), LOG2_E, base[i / 2]));
    return inside(j) || own + i % 2 < CLASSES - 8 * j ? power : 0.f;
  };
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    const Pair pair(tables, j, me);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i / 2] += exponential(pair, j, i);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] = over_row(total[h]);
    const bool valid = s.target[h] != IGNORE;
    factor[h] = valid ? scale : 0.f;
    if (valid && (s.target[h] < 0 || s.target[h] >= CLASSES)) loss = nanf("");
    if (valid && me.lane % 4 == 0) loss += highest[h] + logf(total[h]);
    total[h] = factor[h] / total[h];
  }
  wgmma_touch(z);  // exponentials are made again: kept they would take as many registers as z
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    float of_class[8] = {}, of_mean[8] = {};
    u32 pairs[2][2] = {};
#pragma unroll
    for (int j = 4 * part; j < 4 * part + 4 && j < BLOCKS; ++j) {
      const Pair pair(tables, j, me);
      float g[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, e = i % 2;
        const bool hit = s.target[h] - own == 8 * j + e;
        g[i] = fmaf(exponential(pair, j, i), total[h], hit ? -factor[h] : 0.f);
        if (hit) loss -= pair.whole(z[4 * j + i], e);
        if (NORM_BIAS) of_class[2 * (j % 4) + e] += g[i];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) pairs[j % 2][h] = pack_pair(g[2 * h] * s.rstd[h], g[2 * h + 1] * s.rstd[h]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, e = i % 2;
        const float d = e ? pair_high(pairs[j % 2][h]) : pair_low(pairs[j % 2][h]);
        inner[h] += d * z[4 * j + i];
        if (!RMS) plain[h] += d * pair.a[e], of_mean[2 * (j % 4) + e] += d * s.mean[h];
      }
      if (j % 2 == 0 && j + 1 < BLOCKS) continue;
      store_matrices(slopes.at(j / 2 * 2), pairs[0][0], pairs[0][1], j % 2 ? pairs[1][0] : 0, j % 2 ? pairs[1][1] : 0);
    }
    if (NORM_BIAS) sums[0][part] += column_sum(of_class, me.lane);
    if (!RMS) sums[1][part] += column_sum(of_mean, me.lane);
  }
  Line line;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    line.slope[h] = over_row(inner[h]) * (-1.f / WIDTH) * s.rstd[h];
    line.offset[h] = RMS ? 0.f : -s.mean[h] * line.slope[h] - over_row(plain[h]) * (1.f / WIDTH);
  }
  return line;
}

// 64 columns of D.
RL_D void multiply_back(float (&d)[32], u32 slopes, u32 head, int panel) {
  const u64 a = operand_k_major(slopes), b = operand_mn_major(head + panel * HEAD_PANEL, HEAD_PANEL);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma<64, 0, 1>(d, a + step / 4 * (PANEL_BYTES / 16) + step % 4 * 2, b + step * 128, step > 0);
  wgmma_commit();
}

// … and of the rows' gradient, which leave.
RL_D void finish(const float (&d)[32], const Lines& lines, int panel, const Line& line, const TensorMap* dr, int row,
                 const Place& me) {
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    u32 x[4];
    load_matrices(x, lines.at(8 * panel + j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* v = d + 4 * (j + i / 2) + 2 * (i % 2);
      const float low = fmaf(pair_low(x[i]), line.slope[i % 2], v[0]), high = fmaf(pair_high(x[i]), line.slope[i % 2], v[1]);
      x[i] = RMS ? pack_pair(low, high) : pack_pair(low + line.offset[i % 2], high + line.offset[i % 2]);
    }
    store_matrices(lines.at(8 * panel + j), x[0], x[1], x[2], x[3]);
  }
  fence_async();
  sync_warp();
  if (elected()) {
    store_2d(dr, lines.start + panel * PANEL_BYTES, 64 * panel, row + 16 * me.warp);
    store_commit();
  }
}

// The block's sums, its warps' added in a fixed order, where its last tiles were: p's in both warpgroups are its products with r.
RL_D void write_sums(const float (&p)[PANELS][COLUMNS / 2], const float (&sums)[2][PARTS], float loss, float* out, float* losses,
                     u32 smem, const Place& me) {
  constexpr int COUNT = 2 * COLUMNS + 1;  // of classes, and the loss
  const int thread = 128 * me.group + 32 * me.warp + me.lane;
  const u32 small = smem + PANELS * COLUMNS * 256, mine = small + (4 * me.group + me.warp) * COUNT * 4;
  const u32 whole = small + 8 * COUNT * 4, beside = smem + 4 * (thread % 128);
  loss = over_warp(loss);
  if (elected()) store_wait_read<0>();
  sync_warp();
  named_barrier<256>(3);
#pragma unroll
  for (int kind = 0; kind < 2; ++kind)
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int v = 32 * part + 8 * (me.lane / 8) + 2 * (me.lane % 4) + me.lane / 4 % 2;
      if (v < COLUMNS) store_shared(mine + 4 * (kind * COLUMNS + v), sums[kind][part]);
    }
  if (me.lane == 0) store_shared(mine + 8 * COLUMNS, loss);
#pragma unroll
  for (int m = 0; m < PANELS; ++m)
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
      if (me.group == 1) store_shared(beside + 512 * (m * (COLUMNS / 2) + i), p[m][i]);
  named_barrier<256>(3);
  if (thread < COUNT) {
    float sum = 0.f;
    for (int warp = 0; warp < 8; ++warp) sum += load_shared(small + (warp * COUNT + thread) * 4);
    if (thread < COLUMNS) out[WIDTH * COLUMNS + thread] = sum;
    else if (thread < 2 * COLUMNS) store_shared(whole + 4 * (thread - COLUMNS), sum);
    else losses[blockIdx.x] = sum;
  }
  named_barrier<256>(3);
  if (me.group == 1) return;
#pragma unroll
  for (int m = 0; m < PANELS; ++m)
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
      const int c = 64 * m + 16 * me.warp + me.lane / 4 + 8 * (i / 2 % 2), v = 8 * (i / 4) + 2 * (me.lane % 4);
      float sum[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] = p[m][i + e] + load_shared(beside + 512 * (m * (COLUMNS / 2) + i + e));
        if (!RMS) sum[e] -= load_shared(whole + 4 * (v + e));
      }
      *reinterpret_cast<float2*>(out + c * COLUMNS + v) = make_float2(sum[0], sum[1]);
    }
}

struct Given {
  const TensorMap* dr;
  const float *mean, *rstd;
  const i64* targets;
  const int* counts;
  float *partials, *losses;  // a block's partial sums in a row, `stride` apart
  i64 stride;
  int rows;
};

RL_D void consume(const Given& in, u32 smem, Barriers bar, const Place& me) {
  const u32 mine = smem + SLOPES + me.group * SLOPES_BYTES, head = smem + HEAD;
  const Lines beside(mine, me);
  const float scale = mean_scale(in.counts, me.lane);
  float p[PANELS][COLUMNS / 2] = {}, sums[2][PARTS] = {}, loss = 0.f;
  for (int turn = me.group; row_of(turn) < in.rows; turn += 2) {
    const int slot = turn % SLOTS, row = row_of(turn);
    const u32 tile = smem + slot * TILE_BYTES;
    Rows known;
    known.load(in.mean, in.rstd, in.targets, row, in.rows, me);
    barrier_wait(bar.full(slot), turn / SLOTS & 1);
    float z[COLUMNS / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * PANELS; ++step)
      wgmma<COLUMNS, 0, 0>(z, operand_k_major(tile + step / 4 * PANEL_BYTES) + step % 4 * 2,
                           operand_k_major(head + step / 4 * HEAD_PANEL) + step % 4 * 2, step > 0);
    wgmma_commit();
    if (turn >= 2 && elected()) {  // the tile before has left
      store_wait_read<0>();
      barrier_arrive(bar.empty((turn - 2) % SLOTS));
    }
    wgmma_wait<0>();
    wgmma_touch(z);
    const Line line = differentiate(z, beside, sums, loss, known, scale, smem + TABLES, me);
    fence_async();
    named_barrier<128>(1 + me.group);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < PANELS; ++m)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<COLUMNS, 1, 1>(p[m], operand_mn_major(tile + m * PANEL_BYTES, PANEL_BYTES) + step * 128,
                             operand_mn_major(mine, PANEL_BYTES) + step * 128, 1);
    wgmma_commit();
    const Lines lines(tile, me);
    float d[32];
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      multiply_back(d, mine, head, panel);
      wgmma_wait<0>();
      wgmma_touch(d);
      if (panel == 0) named_barrier<128>(1 + me.group);  // all have read the rows
      finish(d, lines, panel, line, in.dr, row, me);
    }
#pragma unroll
    for (int m = 0; m < PANELS; ++m) wgmma_touch(p[m]);
  }
  write_sums(p, sums, loss, in.partials + blockIdx.x * in.stride, in.losses, smem, me);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    norm_head(const __grid_constant__ TensorMap r, const __grid_constant__ TensorMap dr, const u16* weight, const u16* scale,
              const u16* shift, const float* mean, const float* rstd, const i64* targets, const int* counts, float* partials,
              float* losses, i64 stride, int rows) {
  const u32 smem = dynamic_smem();
  const Barriers bar{smem + BARRIERS};
  const int thread = threadIdx.x;
  // The same for a whole warp, as the compiler has to know: operands' descriptors are made of it.
  const Place me{warp_uniform(thread / 128) - 1, warp_uniform(thread / 32 % 4), thread % 32};
  if (thread == 0) {
    prefetch_map(&r);
    bar.init();
  }
  make_head(weight, scale, shift, smem, thread);
  fence_async();
  sync_block();
  wait_for_previous();
  let_next_start();
  if (me.group < 0) {
    registers_down<24>();
    if (me.warp == 0) produce(&r, rows, smem, bar);
  } else {
    registers_up<240>();
    consume({&dr, mean, rstd, targets, counts, partials, losses, stride, rows}, smem, bar, me);
    if (elected()) store_wait<0>();
  }
}
