// Weight gradients dW = dYᵀ X of many layers over the same rows in fp32, and column sums of dY (doubles_tile.cuh). The work
// is divided as in wgrad_sm90.cu; sums of divided tiles follow in another launch.
#include "doubles_tile.cuh"

using namespace rl;

struct Problem {
  const float *dy, *x;
  float *weight, *bias;
  int M, K, dy_pitch, x_pitch, pitch;  // elements from one row to the next
  int how;                             // of:
};
enum { ADD_WEIGHT = 1, ADD_BIAS = 2 };
static_assert(sizeof(Problem) == 56, "the host packs problems");
struct Problems {
  Problem problem[MAX_PROBLEMS];
};
struct Share {               // some of a block's work
  int problem, row, column;  // first row and column of the tile in dW
  int first, count;          // chunks of 64 rows of the operands
  int part;                  // which partial sum this is, or -1: all there is
  int bias;                  // the bias's gradient is wanted too
};
constexpr int CHUNK = 64;

struct alignas(8) Pair {
  float first, second;
};

RL_D void deliver(const Sums& sums, const Problem& problem, const Share& share, float* tiles, const Place& place) {
  const bool whole = share.part < 0, add = whole && problem.how & ADD_WEIGHT;
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = place.row + 16 * i + 8 * h + place.group;
      if (share.row + row >= problem.M) continue;
      float* out = whole ? problem.weight + static_cast<i64>(share.row + row) * problem.pitch + share.column
                         : tiles + (static_cast<i64>(share.part) * ROWS_M + row) * COLUMNS_N;
#pragma unroll
      for (int j = 0; j < FRAGMENTS_N; ++j) {
        const int column = place.column + 8 * j + 2 * place.member;
        if (share.column + column >= problem.K) continue;
        Pair* to = reinterpret_cast<Pair*>(out + column);
        const Pair before = add ? *to : Pair{0.f, 0.f};
        *to = {before.first + static_cast<float>(sums.of[i][j][2 * h]),
               before.second + static_cast<float>(sums.of[i][j][2 * h + 1])};
      }
    }
}

// Column sums of dY: the four lanes of a row have four of its columns each.
RL_D void deliver_bias(const Totals& totals, const Problem& problem, const Share& share, float* sums,
                       const Place& place) {
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      double total = totals.whole(i, h);
      total += __shfl_xor_sync(FULL, total, 1);
      total += __shfl_xor_sync(FULL, total, 2);
      const int row = place.row + 16 * i + 8 * h + place.group;
      if (place.member != 0 || place.column != 0 || share.row + row >= problem.M) continue;
      float* to = share.part < 0 ? problem.bias + share.row + row : sums + share.part * ROWS_M + row;
      *to = static_cast<float>(total) + (share.part < 0 && problem.how & ADD_BIAS ? *to : 0.f);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gradients_of_floats(const __grid_constant__ Problems problems, const int* starts, const Share* shares, float* tiles,
                        float* sums, int N) {
  using Work = Tile<false, false>;
  const Place place;
  const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  wait_for_previous();
  let_next_start();
  for (int at = first; at < last; ++at) {
    const Share share = shares[at];
    const Problem& problem = problems.problem[share.problem];
    const Operand dy{problem.dy, problem.dy_pitch, problem.M}, x{problem.x, problem.x_pitch, problem.K};
    const int begin = share.first * CHUNK, end = begin + share.count * CHUNK < N ? begin + share.count * CHUNK : N;
    Sums product;
    Totals totals;
    if (share.bias) {
      Work::run<true>(product, totals, dy, x, share.row, share.column, begin, end, place);
      deliver_bias(totals, problem, share, sums, place);
    } else {
      Work::run<false>(product, totals, dy, x, share.row, share.column, begin, end, place);
    }
    deliver(product, problem, share, tiles, place);
  }
}
