// A tile of a product of fp32 matrices: out[m, n] = Σ_k A[m, k] · B[n, k], by the tensor cores in fp64.
//
// An fp32 number is an fp64 number and the product of two of them is one too, so that only the sum rounds, in fp64; the
// result is rounded to fp32 once. An H200 makes these products as fast as its lanes make fp32's, with a fraction of the
// instructions and of the traffic of shared memory.
//
// Either operand may lie by rows (K innermost, as activations and weights of y = x Wᵀ do) or by columns (K outermost). In
// shared memory it keeps its order, with pitches such that the numbers of a fragment never meet in a bank. Rows beyond the
// matrix are zeros there. A conversion to fp64 costs the tensor cores' time, so a number is converted once, on its way there.
#pragma once
#include "ridgeline/doubles.cuh"

namespace rl {

constexpr int SLAB = 16;                                 // of K
constexpr int ROWS_M = 32 * WARPS_M, COLUMNS_N = WARP_N * WARPS_N, THREADS = WARP * WARPS_M * WARPS_N;
constexpr int FRAGMENTS_M = 2, FRAGMENTS_N = WARP_N / 8;

struct Operand {
  const float* at;
  int pitch;   // elements from one row to the next, or with K outermost from one of K to the next
  int extent;  // rows of the matrix
};

// An operand's slabs in shared memory: LENGTH rows of the tile.
template <bool BY_ROWS, int LENGTH>
struct Slab {
  static constexpr int PITCH = (BY_ROWS ? SLAB : LENGTH) + 4;
  static constexpr int NUMBERS = (BY_ROWS ? LENGTH : SLAB) * PITCH;
  static RL_D int place(int row, int k) { return BY_ROWS ? row * PITCH + k : k * PITCH + row; }
};

struct alignas(16) Doubles {
  double first, second;
};

// What a thread brings of an operand's slabs: four numbers that lie together, of every STEP-th line.
template <bool BY_ROWS, int LENGTH>
struct Fetch {
  static constexpr int ALONG = (BY_ROWS ? SLAB : LENGTH) / 4, STEP = THREADS / ALONG, COUNT = LENGTH * SLAB / 4 / THREADS;
  static_assert(THREADS % ALONG == 0 && LENGTH * SLAB / 4 % THREADS == 0, "threads share a slab evenly");
  const float* from;
  int pitch, line, lines, quad, along;  // this thread's first line and place in it, and where the matrix ends
  float4 held[COUNT];

  RL_D Fetch(const Operand& whole, int row, int first, int end) : pitch(whole.pitch) {
    line = threadIdx.x / ALONG, quad = threadIdx.x % ALONG * 4;
    lines = BY_ROWS ? whole.extent - row : end - first, along = BY_ROWS ? end - first : whole.extent - row;
    from = whole.at + static_cast<i64>((BY_ROWS ? row : first) + line) * pitch + (BY_ROWS ? first : row) + quad;
  }
  RL_D void load(int k) {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int next = n * STEP + (BY_ROWS ? 0 : k), on = BY_ROWS ? k : 0;
      const bool inside = line + next < lines && quad + on < along;
      held[n] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (inside) held[n] = *reinterpret_cast<const float4*>(from + static_cast<i64>(next) * pitch + on);
    }
  }
  // In halves, which neighbouring fours of lanes write in opposite order: so they meet in no bank.
  RL_D void store(double* slab, int n) const {
    const Doubles low{held[n].x, held[n].y}, high{held[n].z, held[n].w};
    const int flip = threadIdx.x / 4 % 2;
    Doubles* to = reinterpret_cast<Doubles*>(slab + (line + n * STEP) * Slab<BY_ROWS, LENGTH>::PITCH + quad);
    to[flip] = {flip ? high.first : low.first, flip ? high.second : low.second};
    to[1 - flip] = {flip ? low.first : high.first, flip ? low.second : high.second};
  }
};

// What a warp holds of a tile: 32 rows and WARP_N columns; element 2 h + e of a fragment lies 8 h rows down, e columns on.
struct Sums {
  double of[FRAGMENTS_M][FRAGMENTS_N][4] = {};
};

struct Place {  // of this thread in a tile
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int row = warp % WARPS_M * 32, column = warp / WARPS_M * WARP_N;  // its warp's first
  int group = lane / 4, member = lane % 4;
};

template <bool A_BY_ROWS, bool B_BY_ROWS>
struct Tile {
  using SlabA = Slab<A_BY_ROWS, ROWS_M>;
  using SlabB = Slab<B_BY_ROWS, COLUMNS_N>;
  using FetchA = Fetch<A_BY_ROWS, ROWS_M>;
  using FetchB = Fetch<B_BY_ROWS, COLUMNS_N>;
  static constexpr int STAGE = SlabA::NUMBERS + SlabB::NUMBERS;

  // One slab; `between(n)` runs after the products of n of FRAGMENTS_N columns. With COLUMN_SUMS, totals[i][h] += the warp's
  // rows 16 i + 8 h of A (this thread's four of its columns).
  template <bool COLUMN_SUMS, typename Between>
  static RL_D void multiply(Sums& sums, double (&totals)[FRAGMENTS_M][2], const double* stage, const Place& place,
                            Between between) {
    const double* a_slab = stage + SlabA::place(place.row + place.group, place.member);
    const double* b_slab = stage + SlabA::NUMBERS + SlabB::place(place.column + place.group, place.member);
    double a[FRAGMENTS_M][8];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) a[i][e] = a_slab[SlabA::place(16 * i + 8 * (e % 2), e / 2 * 4)];
    if (COLUMN_SUMS)
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) totals[i][e % 2] += a[i][e];
    double b[2][4];  // this fragment's and the next one's, which is asked for before `between` writes
#pragma unroll
    for (int j = 0; j <= FRAGMENTS_N; ++j) {
      if (j < FRAGMENTS_N)
#pragma unroll
        for (int e = 0; e < 4; ++e) b[j % 2][e] = b_slab[SlabB::place(8 * j, 4 * e)];
      if (j == 0) continue;
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) multiply_doubles(sums.of[i][j - 1], a[i], b[(j - 1) % 2]);
      between(j - 1);
    }
  }

  // The tile at (row, column), K from `first` to `end`. While one slab is multiplied the next is on its way; it is
  // converted and stored between the products of the second half.
  template <bool COLUMN_SUMS>
  static RL_D void run(Sums& sums, double (&totals)[FRAGMENTS_M][2], const Operand& a, const Operand& b, int row, int column,
                       int first, int end, const Place& place) {
    constexpr int HALF = FRAGMENTS_N / 2;
    double* ring = reinterpret_cast<double*>(shared_floats());
    const int slabs = ceil_div(end - first, SLAB);
    FetchA fetch_a(a, row, first, end);
    FetchB fetch_b(b, column, first, end);
    auto store = [&](double* stage, int part) {  // of HALF parts
#pragma unroll
      for (int n = 0; n < FetchA::COUNT; ++n)
        if (n % HALF == part) fetch_a.store(stage, n);
#pragma unroll
      for (int n = 0; n < FetchB::COUNT; ++n)
        if ((n + FetchA::COUNT) % HALF == part) fetch_b.store(stage + SlabA::NUMBERS, n);
    };
    fetch_a.load(0), fetch_b.load(0);
#pragma unroll
    for (int part = 0; part < HALF; ++part) store(ring, part);
    __syncthreads();
    for (int slab = 0; slab < slabs; ++slab) {
      double *here = ring + slab % 2 * STAGE, *next = ring + (slab + 1) % 2 * STAGE;
      fetch_a.load((slab + 1) * SLAB), fetch_b.load((slab + 1) * SLAB);  // behind the last one zeros
      multiply<COLUMN_SUMS>(sums, totals, here, place, [&](int j) {
        if (j >= HALF) store(next, j - HALF);
      });
      __syncthreads();  // the next slab is there for all, and all have left this one
    }
  }
};

}  // namespace rl
