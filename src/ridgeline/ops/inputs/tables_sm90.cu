// Gradients of small tables, those of all category columns in one pass over the vector's gradient, for sm_90a: every warp
// has the tables in shared memory and adds its rows in order, so the same rows always give the same bits.
//
// A lane has a number of some category column's row in each round; no two columns of one table share a round.
//
// Macros (see tables.py): WARPS of a block, LENGTH of all tables in numbers, ROUNDS, ID_BYTES and ID_SIGNED: the ids'
// integers.
#include "ridgeline/hopper.cuh"

#include "../attention/cuda/lanes.cuh"

using namespace rl;

constexpr int ABREAST = 8;  // rows whose numbers come in while as many others are added

struct Place {  // int[5]: column of the vector, category column, first number in the tables, width, rows (0: nothing here)
  int source, category, start, width, rows;
};

template <int BYTES, bool SIGNED>
struct Integer { using type = i64; };
template <bool SIGNED>
struct Integer<4, SIGNED> { using type = int; };
template <bool SIGNED>
struct Integer<2, SIGNED> { using type = short; };
template <>
struct Integer<1, true> { using type = signed char; };
template <>
struct Integer<1, false> { using type = u8; };
using Id = Integer<ID_BYTES, ID_SIGNED>::type;

// Of rows that a warp takes together, as they lie in memory: whoever converts or chooses a number waits for it.
struct Numbers {
  u16 value[ABREAST][ROUNDS];
  Id id[ABREAST][ROUNDS];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    tables(const u16* dvector, const void* ids, const Place* places, float* partials, int rows, int stride, int ids_stride) {
  const u32 smem = dynamic_smem();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 mine = smem + warp * LENGTH * 4;
  Place place[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) place[round] = places[round * 32 + lane];
  for (int i = lane; i < LENGTH; i += 32) store_shared_4(mine + 4 * i, 0);
  __syncwarp();
  wait_for_previous();
  let_next_start();
  const int step = gridDim.x * WARPS;
  const Id* all = static_cast<const Id*>(ids);
  const auto load = [&](Numbers& numbers, int first) {
#pragma unroll
    for (int n = 0; n < ABREAST; ++n)
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const int wanted = first + n * step;
        const i64 row = wanted < rows ? wanted : rows - 1;
        numbers.value[n][round] = dvector[row * stride + place[round].source];
        numbers.id[n][round] = all[row * ids_stride + place[round].category];
      }
  };
  const auto add = [&](const Numbers& numbers, int first) {
#pragma unroll
    for (int n = 0; n < ABREAST; ++n)
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const Id row = numbers.id[n][round];
        if (row >= 0 && row < place[round].rows && first + n * step < rows) {
          const u32 sum = mine + 4 * (place[round].start + static_cast<int>(row) * place[round].width);
          store_shared_4(sum, as_bits(from_bits(load_shared_4(sum)) + unpack_one(numbers.value[n][round])));
        }
        __syncwarp();
      }
  };
  int first = blockIdx.x * WARPS + warp;
  Numbers here, ahead;
  load(here, first);
  for (; first < rows; first += 2 * ABREAST * step) {
    load(ahead, first + ABREAST * step);
    add(here, first);
    load(here, first + 2 * ABREAST * step);
    add(ahead, first + ABREAST * step);
  }
  __syncthreads();
  partials += static_cast<i64>(blockIdx.x) * LENGTH;
  for (int i = thread; i < LENGTH; i += 32 * WARPS) {
    float sum = 0.f;
    for (int w = 0; w < WARPS; ++w) sum += from_bits(load_shared_4(smem + (w * LENGTH + i) * 4));
    partials[i] = sum;
  }
}
