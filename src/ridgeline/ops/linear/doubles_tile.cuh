// A tile of a product of fp32 matrices: out[m, n] = Σ_k A[m, k] · B[n, k], by the tensor cores in fp64.
//
// An fp32 number is an fp64 number and the product of two of them is one too, so that only the sum rounds, in fp64; the
// result is rounded to fp32 once. An H200 makes these products as fast as its lanes make fp32's, with a fraction of the
// instructions and of the traffic of shared memory.
//
// Either operand may lie by rows (K innermost, as activations and weights of y = x Wᵀ do) or by columns (K outermost). In
// shared memory it keeps its order, with pitches such that the 32 numbers of a fragment never meet in a bank. Rows beyond
// the matrix are zeros there. Copies of STAGES slabs of 16 of K are under way. A number is converted whenever it becomes part
// of a fragment: to convert it once, on its way into shared memory, takes longer (gpt2-c256's step 7.35 instead of 6.74 ms).
// Four of K are multiplied at a time while the next four are loaded and converted, so that no product waits for its operands
// but the first.
#pragma once
#include "ridgeline/doubles.cuh"

namespace rl {

constexpr int SLAB = 16, AT_ONCE = 4, PARTS = SLAB / AT_ONCE;  // of K: copied, and multiplied, at a time
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
  static constexpr int PITCH = BY_ROWS ? SLAB + 4 : LENGTH + 8;
  static constexpr int FLOATS = BY_ROWS ? LENGTH * PITCH : SLAB * PITCH;
  static RL_D int place(int row, int k) { return BY_ROWS ? row * PITCH + k : k * PITCH + row; }
};

// What a thread copies of an operand's slabs, one after the other: four numbers that lie together, of every STEP-th line.
template <bool BY_ROWS, int LENGTH>
struct Copies {
  static constexpr int ALONG = (BY_ROWS ? SLAB : LENGTH) / 4, STEP = THREADS / ALONG, COUNT = LENGTH * SLAB / 4 / THREADS;
  static_assert(THREADS % ALONG == 0 && LENGTH * SLAB / 4 % THREADS == 0, "threads share a slab evenly");
  const float* from;        // of the next slab
  i64 step, slab;           // elements from one of its lines to the next, and to the slab after it
  int place, lines, quads;  // of the first line in shared memory; lines and numbers left of the matrix

  RL_D Copies(const Operand& whole, int row, int first, int end) {
    const int line = threadIdx.x / ALONG, quad = threadIdx.x % ALONG * 4;
    lines = (BY_ROWS ? whole.extent - row : end - first) - line, quads = (BY_ROWS ? end - first : whole.extent - row) - quad;
    from = whole.at + static_cast<i64>((BY_ROWS ? row : first) + line) * whole.pitch + (BY_ROWS ? first : row) + quad;
    step = static_cast<i64>(STEP) * whole.pitch, slab = BY_ROWS ? SLAB : static_cast<i64>(SLAB) * whole.pitch;
    place = line * Slab<BY_ROWS, LENGTH>::PITCH + quad;
  }
  RL_D void fetch(float* to) {
    const float* line = from;
#pragma unroll
    for (int n = 0; n < COUNT; ++n, line += step)
      copy_quad(to + place + n * STEP * Slab<BY_ROWS, LENGTH>::PITCH, line, n * STEP < lines && quads > 0);
    from += slab;
    (BY_ROWS ? quads : lines) -= SLAB;
  }
};

// A matrix that lies as the result, or none: its tile comes into the ring behind the last slabs, so that no thread waits for
// its numbers of it one after the other when the sums are done.
struct Beside {
  const float* at = nullptr;  // of the tile's first row and column
  int pitch, rows, columns;   // elements from one row to the next; what is left of the matrix
};

// What a warp holds of a tile: 32 rows and WARP_N columns; element 2 h + e of a fragment lies 8 h rows down, e columns on.
struct Sums {
  double of[FRAGMENTS_M][FRAGMENTS_N][4] = {};
};

// Sums of A's rows by the ordinary lanes, with what each addition rounded away: of a warp's row 16 i + 8 h this thread's part.
// In fp64 they stand in the way of the products, and the next slab's copies and loads behind them. With infinity in it a sum
// is NaN.
struct Totals {
  float of[FRAGMENTS_M][2] = {}, rest[FRAGMENTS_M][2] = {};

  RL_D void add(int i, int h, float value) {
    const float before = of[i][h], after = before + value, added = after - before;
    rest[i][h] += (before - (after - added)) + (value - added), of[i][h] = after;
  }
  RL_D double whole(int i, int h) const { return static_cast<double>(of[i][h]) + rest[i][h]; }
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
  static constexpr int STAGE = SlabA::FLOATS + SlabB::FLOATS;
  static constexpr int BESIDE_PITCH = COLUMNS_N + 8, BESIDE_ALONG = COLUMNS_N / 4, BESIDE_STEP = THREADS / BESIDE_ALONG;
  static constexpr int BESIDE_ROWS = STAGE / BESIDE_PITCH / BESIDE_STEP * BESIDE_STEP;  // in a slab's place
  static_assert(BESIDE_ROWS * STAGES >= ROWS_M, "the ring holds a tile of the result");

  // What a warp multiplies at once: AT_ONCE of K, of its 32 rows of A and its WARP_N rows of B.
  struct Part {
    double a[FRAGMENTS_M][2], b[FRAGMENTS_N];

    // Its numbers of A into the totals too, if it is of the matrix.
    template <bool ROW_SUMS>
    RL_D void load(const float* stage, int k, const Place& place, Totals& totals, bool of_matrix) {
      const float* a_slab = stage + SlabA::place(place.row + place.group, k + place.member);
      const float* b_slab = stage + SlabA::FLOATS + SlabB::place(place.column + place.group, k + place.member);
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float value = a_slab[SlabA::place(16 * i + 8 * h, 0)];
          a[i][h] = value;
          if (ROW_SUMS) totals.add(i, h, of_matrix ? value : 0.f);
        }
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) b[j] = b_slab[SlabB::place(8 * j, 0)];
    }
  };

  static RL_D void multiply(Sums& sums, const Part& part) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; ++j)
#pragma unroll
      for (int i = 0; i < FRAGMENTS_M; ++i) multiply_doubles(sums.of[i][j], part.a[i], part.b[j]);
  }

  // Rows of a matrix beside, from BESIDE_ROWS · part on, into a slab's place.
  static RL_D void fetch_beside(float* stage, const Beside& beside, int part) {
    const int line = threadIdx.x / BESIDE_ALONG, quad = threadIdx.x % BESIDE_ALONG * 4;
    const int row = part * BESIDE_ROWS + line, rows = quad < beside.columns ? beside.rows - row : 0;
    const float* from = beside.at + static_cast<i64>(row) * beside.pitch + quad;
    float* to = stage + line * BESIDE_PITCH + quad;
#pragma unroll
    for (int n = 0; n < BESIDE_ROWS; n += BESIDE_STEP, from += static_cast<i64>(BESIDE_STEP) * beside.pitch)
      copy_quad(to + n * BESIDE_PITCH, from, n < rows);
  }
  // Where a row of it lies when the sums over `length` of K are done.
  static RL_D const float* row_beside(int row, int length) {
    return shared_floats() + (ceil_div(length, SLAB) + row / BESIDE_ROWS) % STAGES * STAGE + row % BESIDE_ROWS * BESIDE_PITCH;
  }

  // The tile at (row, column), K from `first` to `end`. The next part is loaded while one is multiplied. BESIDE: with a tile
  // of a matrix beside.
  template <bool ROW_SUMS, bool BESIDE = false>
  static RL_D void run(Sums& sums, Totals& totals, const Operand& a, const Operand& b, int row, int column, int first, int end,
                       const Place& place, const Beside& beside = {}) {
    static_assert(PARTS % 2 == 0, "a slab begins with the first of two parts");
    float* ring = shared_floats();
    const int slabs = ceil_div(end - first, SLAB);
    Copies<A_BY_ROWS, ROWS_M> copies_a(a, row, first, end);
    Copies<B_BY_ROWS, COLUMNS_N> copies_b(b, column, first, end);
    auto stage = [&](int slab) { return ring + slab % STAGES * STAGE; };
    auto fetch = [&](int slab) {
      if (slab < slabs) {
        copies_a.fetch(stage(slab));
        copies_b.fetch(stage(slab) + SlabA::FLOATS);
      } else if (BESIDE) {
        fetch_beside(stage(slab), beside, slab - slabs);
      }
      copies_commit();
    };
    Part parts[2];
#pragma unroll
    for (int slab = 0; slab < STAGES; ++slab) fetch(slab);
    copies_wait<STAGES - 1>();
    __syncthreads();
    parts[0].template load<ROW_SUMS>(stage(0), 0, place, totals, slabs > 0);
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
#pragma unroll
      for (int s = 0; s < PARTS - 1; ++s) {
        parts[(s + 1) % 2].template load<ROW_SUMS>(stage(slab), (s + 1) * AT_ONCE, place, totals, true);
        multiply(sums, parts[s % 2]);
      }
      copies_wait<STAGES - 2>();
      __syncthreads();  // the next slab is there for all, and all have loaded this one, whose place is filled next
      fetch(slab + STAGES);
      parts[0].template load<ROW_SUMS>(stage(slab + 1), 0, place, totals, slab + 1 < slabs);  // at last for nothing
      multiply(sums, parts[1]);
    }
    if (BESIDE) copies_wait<0>();
    __syncthreads();  // before a next tile, or before what lies beside is read
  }
};

}  // namespace rl
