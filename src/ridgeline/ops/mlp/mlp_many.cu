// Gradient of the MLP half of a block of width 256 for many rows, for sm_90a, with the gradient of the norm before it:
//   da = dz Wdown, du = da · gelu'(u), dh = du Wup, dr = dresidual + norm'(dh), sums for the norm's weights.
//
// gelu'(u) is what the product forward has left in codes (slope_codes.cuh); du is stored for Wup's gradient, and not read.
//
// A tile is 128 rows, 64 a warpgroup, which holds dh of them whole; two blocks of a cluster take tiles one below the other
// and fetch half of the weights for both. The rows of dz stay in shared memory. Inner columns come 64 at a time: while a
// warpgroup turns da of one such chunk into du, the products for da of the next are under way, and those for dh with du of
// the chunk before, as registers have it.
//
// Threads of the product that made the codes hold them down the columns, eight rows of two columns in a line of 16 bytes.
// The transposing ldmatrix makes of it what a thread needs here if the rows of a tile come in another order: warp w's row
// 8 h + g is row 32 (w / 2) + 8 (g / 2) + 4 (w % 2) + 2 h + g % 2 of 64. The copy engine brings and takes all rows so, which
// is why there must be multiples of 32.
//
// The ring's four slots hold 64 inner columns of either weight. A tile takes them as: down 0, (down k + 1, up k) for each k
// there is, and at its end each warpgroup's r, whose place dr takes. dresidual comes where dz was, and is added in the first
// pass over r, so that dz of the next tile comes under the second.
//
// Macros: STAGES (4), RMS, NORM_BIAS (its sums are wanted).
#include "many_join.cuh"
#include "mlp_many.cuh"

// What a consumer warp works with.
struct Work {
  const TensorMap* du;
  u32 smem, dz, codes, panel;  // its warpgroup's rows of dz, its lane's place in a tile of codes, its own panel of du
  Barriers bar;
  Ring ring;
  u32 use, codes_phase;  // slots of the ring used before this tile; of the codes
  int row;               // the first of the warpgroup's 64
  RL_D u32 address(u32 number) const { return smem + number % STAGES * SLOT_BYTES; }  // of the slot of a use
  RL_D void wait(u32 number) const { barrier_wait(bar.full(number % STAGES), number / STAGES & 1); }
  RL_D bool ready(u32 number) const { return warp_uniform(barrier_ready(bar.full(number % STAGES), number / STAGES & 1)); }
  RL_D void release(u32 number, const Place& me) const {
    if (me.lane == 0) ring.release(number % STAGES);
  }
};

// da = dz Wdown for 64 inner columns, under way.
RL_D void multiply_down(float (&da)[32], u32 dz, u32 weight) {
  const u64 a = operand_k_major(afresh(dz)), b = operand_mn_major(weight, PANEL_BYTES);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 16; ++step)  // an operand's address is in units of 16 bytes
    wgmma<64, 0, 1>(da, a + step / 4 * (PANEL_BYTES / 16) + step % 4 * 2, b + step * 128, step > 0);
  wgmma_commit();
}

// dh += du Wup for 64 inner columns, under way.
RL_D void multiply_up(float (&dh)[WIDTH / 2], const u32 (&du)[4][4], u32 weight) {
  const u64 b = operand_mn_major(weight, PANEL_BYTES);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma_registers<WIDTH, 1>(dh, du[step], b + step * 128, true);
  wgmma_commit();
}

// du = da · gelu'(u), as operands.
RL_D void differentiate(u32 (&du)[4][4], const float (&da)[32], u32 codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 code[4];
    load_matrices_transposed(code, codes + i * 2 * WARP_CODES);
#pragma unroll
    for (int n = 0; n < 4; ++n)  // 16 columns i * 2 + n / 2, rows l / 4 + 8 (n % 2)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 slopes = h ? decode_slopes<1>(code[n]) : decode_slopes<0>(code[n]);
        const float* d = da + 8 * (2 * i + n / 2) + 4 * h + 2 * (n % 2);
        du[2 * i + n / 2][2 * h + n % 2] = pack_pair(d[0] * half_low(slopes), d[1] * half_high(slopes));
      }
  }
}

// du of a chunk of 64 columns into the warp's panel, and from there to memory.
RL_D void stage(const u32 (&du)[4][4], const Work& w, const Place& me) {
  const u32 lane = afresh(me.lane), line = w.panel + lane % 16 * 128, turn = (lane / 16 ^ lane % 8) << 4;
  if (me.lane == 0) store_wait_read<0>();  // what the panel held has left
  sync_warp();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    store_matrices(line + (step * 32 ^ turn), du[step][0], du[step][1], du[step][2], du[step][3]);
}
RL_D void send(const Work& w, int column, const Place& me) {
  fence_async();
  sync_warp();
  if (me.lane == 0) {
    store_sixteen(w.du, w.panel, column, w.row, me);
    store_commit();
  }
}

// Chunk k of 64 inner columns, whose da is there; da of the next takes its place, if there is one. The products with `old`, du
// of the chunk before, are under way. A slot is given back as soon as its products are done, not behind the next ones.
template <bool NEXT, int BUFFER>
RL_D void chunk(float (&dh)[WIDTH / 2], float (&da)[32], u32 (&du)[4][4], u32 (&old)[4][4], int k, const Work& w, const Place& me) {
  const u32 before = w.use + 2 * k, down = before + 1, up = down + NEXT;
  barrier_wait(w.bar.codes_full(me.group, BUFFER), w.codes_phase);
  differentiate(du, da, w.codes + BUFFER * CODE_TILE_BYTES);
  stage(du, w, me);
  if (me.lane == 0) barrier_arrive(w.bar.codes_empty(me.group, BUFFER));  // all of them are in what has been staged
  if (NEXT) {
    w.wait(down);
    multiply_down(da, w.dz, w.address(down));
  }
  wgmma_wait<NEXT>();
  wgmma_touch(old);
  if (BUFFER > 0 || k > 0) w.release(before, me);
  const bool early = NEXT && !w.ready(up);
  if (early) {
    wgmma_wait<0>();
    w.release(down, me);
  }
  w.wait(up);
  multiply_up(dh, du, w.address(up));
  send(w, 64 * k, me);
  if (NEXT) {
    wgmma_wait<1>();
    wgmma_touch(da);
    if (!early) w.release(down, me);
  }
}

// da of the first chunk of a tile that begins with slot `use`, under way. If there is no such tile, of what is there, for
// nothing: the compiler would wait for products that may be under way or not.
RL_D void begin(float (&da)[32], bool valid, u32 use, const Work& w, const Place& me) {
  if (valid) {
    barrier_wait(w.bar.dz_full(me.group), 0);
    w.wait(use);
  }
  multiply_down(da, w.dz, afresh(w.address(use)));
}

// dh of a tile that has begun.
RL_D void multiply(float (&dh)[WIDTH / 2], float (&da)[32], int chunks, int round, Work& w, const Place& me) {
  u32 even[4][4], odd[4][4] = {};  // du
  if (round > 0 && me.lane == 0) {
    store_wait_read<0>();  // dr of the tile before
    w.release(w.use - 2 + me.group, me);
  }
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) dh[i] = 0.f;
  wgmma_wait<0>();
  wgmma_touch(da);
  w.release(w.use, me);
#pragma unroll 1
  for (int k = 0;; k += 2, w.codes_phase ^= 1) {
    chunk<true, 0>(dh, da, even, odd, k, w, me);
    if (k + 2 == chunks) {
      if (me.lane == 0) barrier_arrive(w.bar.dz_empty(me.group));
      chunk<false, 1>(dh, da, odd, even, k + 1, w, me);
      break;
    }
    chunk<true, 1>(dh, da, odd, even, k + 1, w, me);
  }
  w.codes_phase ^= 1;
  wgmma_wait<0>();
  wgmma_touch(dh);
  wgmma_touch(odd);
  w.use += 2 * chunks;
  w.release(w.use - 1, me);
}

// A warp's column sums of a tile, which lie in its panel, to its row of partial sums: a lane's columns.
RL_D void add_sums(float* partials, bool first, u32 panel, const Place& me) {
#pragma unroll
  for (int i = 0; i < 2 * KINDS; ++i) {
    const int column = 128 * i + 4 * me.lane;
    float v[4];
    load_shared_4(v, panel + 4 * column);
    if (first) store_global_16(partials + column, v[0], v[1], v[2], v[3]);
    else add_global_16(partials + column, v[0], v[1], v[2], v[3]);
  }
}

// The next tile, if there is one, begins meanwhile.
RL_D void join(float (&dh)[WIDTH / 2], float (&da)[32], Statistics& statistics, const Backward& p, u32 vector, int round,
               bool last, Work& w, const Place& me) {
  statistics.finish();
  const u32 held = w.use + me.group, other = w.use + (me.group ^ 1);
  const Place here = me.afresh();  // addresses of it are made here: they would take registers from the products
  const Lines lines(w.address(held), here), added(w.dz, here);
  if (me.lane == 0) store_wait_read<0>();  // the panel takes the sums
  sync_warp();
  const auto take = [&](int kind, int i, float sum) {
    store_shared(w.panel + (kind * WIDTH + 32 * i + sum_column(here)) * 4, sum);
  };
  float plain[2] = {};
  if (!RMS) sum_plain(plain, dh, vector, here, take);
  barrier_wait(w.bar.dz_full(me.group), 1);
  w.wait(held);
  const Line line = sum_rows<true>(dh, plain, statistics, vector, lines, added, here, take);
  fence_async();  // an arrival may overtake reads
  sync_warp();
  if (me.lane == 0) barrier_arrive(w.bar.dz_empty(me.group));
  w.wait(other);  // a slot whose rows are the other warpgroup's is free as soon as they have come
  w.release(other, me);
  const auto store = [&](u32 from, int column) { store_sixteen(p.dr, from, column, w.row, here); };
  finish_rows<true, 0, 24>(dh, line, statistics, lines, added, here, store);
  w.use += 2;
  begin(da, !last, w.use, w, me);
  finish_rows<true, 24, 32>(dh, line, statistics, lines, added, here, store);
  const int row = static_cast<int>(afresh(blockIdx.x * 8 + 4 * me.group + me.warp));
  add_sums(p.partials + row * p.stride, round == 0, w.panel, here);  // behind the fences, which wait for stores
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    mlp_many_backward(const __grid_constant__ TensorMap dz, const __grid_constant__ TensorMap down,
                      const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap codes,
                      const __grid_constant__ TensorMap held, const __grid_constant__ TensorMap beside,
                      const __grid_constant__ TensorMap du, const __grid_constant__ TensorMap dr, const u16* weight,
                      const float* mean, const float* rstd, float* partials, i64 stride, int rows, int inner) {
  const u32 smem = dynamic_smem(), vector = smem + VECTOR;
  const Barriers bar{{smem + BARRIERS}};
  const int chunks = 2 * ceil_div(inner, 128);
  const Place me = Place::here();
  if (threadIdx.x == 0) {
    prefetch_map(&dz), prefetch_map(&down), prefetch_map(&up), prefetch_map(&codes);
    bar.init();
  }
  if (me.group == 0) copy_vectors(vector, weight, nullptr, nullptr, threadIdx.x - 128);
  sync_block();
  cluster_sync();
  wait_for_previous();
  let_next_start();
  const Ring ring(smem, bar, me.rank);
  if (me.group < 0) {
    registers_down<24>();
    const Maps maps{&dz, &down, &up, &codes, &held, &beside};
    if (me.warp == 0) produce(maps, rows, chunks, ring);
    if (me.warp == 1) produce_rows(maps, rows, smem, bar, me.rank);
    if (me.warp == 2) produce_codes(maps, rows, inner, chunks, smem, bar, me.rank);
  } else {
    registers_up<240>();
    Work w{&du, smem, smem + DZ + me.group * ROWS_BYTES, smem + CODES + me.group * 2 * CODE_TILE_BYTES + code_place(me),
           smem + PANELS_AT + (4 * me.group + me.warp) * WARP_PANEL_BYTES, bar, ring, 0, 0, 0};
    float dh[WIDTH / 2];
    float da[32];
    Tiles tiles(rows, me.rank);
    begin(da, true, 0, w, me);
    while (tiles.valid()) {
      const int round = tiles.round;
      w.row = tiles.row() + 64 * me.group;
      multiply(dh, da, chunks, round, w, me);
      Statistics statistics;
      statistics.load(mean, rstd, w.row + row_of(me.afresh()), 2, rows);
      tiles.advance();
      join(dh, da, statistics, {&dr, mean, rstd, partials, stride}, vector, round, !tiles.valid(), w, me);
    }
    wgmma_wait<0>();
    if (me.lane == 0) store_wait<0>();
  }
  sync_warp();
  cluster_leave();
}
