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

constexpr int AHEAD = 8;  // rows whose numbers are loaded before any is added

struct Place {  // int[5]: column of the vector (-1: none), category column, first number in the tables, width, rows
  int source, category, start, width, rows;
};

RL_D int load_id(const void* ids, i64 place) {
  if (ID_BYTES == 8) {
    const i64 id = static_cast<const i64*>(ids)[place];
    return id < 0 || id > 0x7fffffff ? -1 : static_cast<int>(id);
  }
  if (ID_BYTES == 4) return static_cast<const int*>(ids)[place];
  if (ID_BYTES == 2) return static_cast<const short*>(ids)[place];
  return ID_SIGNED ? static_cast<const signed char*>(ids)[place] : static_cast<const u8*>(ids)[place];
}

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
  for (int first = blockIdx.x * WARPS + warp; first < rows; first += AHEAD * step) {
    u16 value[AHEAD][ROUNDS];
    int id[AHEAD][ROUNDS];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const i64 row = first + ahead * step;
        const bool here = row < rows && place[round].source >= 0;
        value[ahead][round] = here ? dvector[row * stride + place[round].source] : 0;
        id[ahead][round] = here ? load_id(ids, row * ids_stride + place[round].category) : -1;
      }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead)
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const int row = id[ahead][round];
        if (row >= 0 && row < place[round].rows) {
          const u32 sum = mine + 4 * (place[round].start + row * place[round].width);
          store_shared_4(sum, as_bits(from_bits(load_shared_4(sum)) + unpack_one(value[ahead][round])));
        }
        __syncwarp();
      }
  }
  __syncthreads();
  partials += static_cast<i64>(blockIdx.x) * LENGTH;
  for (int i = thread; i < LENGTH; i += 32 * WARPS) {
    float sum = 0.f;
    for (int w = 0; w < WARPS; ++w) sum += from_bits(load_shared_4(smem + (w * LENGTH + i) * 4));
    partials[i] = sum;
  }
}
