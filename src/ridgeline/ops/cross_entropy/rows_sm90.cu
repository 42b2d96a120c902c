// Cross-entropy of long rows of logits, and the gradient of the logits, which may take their memory: each is read once
// and written once.
//
// A block of 32 warps holds a row in registers: its maximum, the sum of its exponentials and the gradient are three
// passes over those. While it does so the next row comes into shared memory, where each thread has places of its own.
//
// Macros: V classes, WIDTH ≥ V columns of a row (a multiple of 8), COUNTS partial numbers of valid rows, TARGET_BYTES,
// IGNORE: the target of a row that does not count.
#include "ridgeline/doubles.cuh"

using namespace rl;

constexpr int THREADS = 1024, WARPS = THREADS / WARP, PIECE = 8;  // classes that a thread takes at a time
constexpr int PIECES = ceil_div(WIDTH, PIECE * THREADS);
constexpr float LOG2_E = 1.44269504088896f;
constexpr u32 LOWEST = RL_FP16 ? 0xfc00u : 0xff80u;  // -infinity

RL_D int piece(int i) { return i * THREADS + static_cast<int>(threadIdx.x); }  // the i-th of this thread
RL_D bool inside(int i) { return (i + 1) * THREADS * PIECE <= WIDTH || piece(i) * PIECE < WIDTH; }

RL_D void fetch(const u16* row, float* shared) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const u16* from = row + (inside(i) ? PIECE * piece(i) : 0);
    copy_quad(shared + 4 * piece(i), reinterpret_cast<const float*>(from), inside(i));
  }
  copies_commit();
}

// What a thread has of a row, with -infinity for columns beyond the classes.
RL_D void read(u32 (&x)[PIECES][4], const float* shared) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const uint4 quad = *reinterpret_cast<const uint4*>(shared + 4 * piece(i));
    x[i][0] = quad.x, x[i][1] = quad.y, x[i][2] = quad.z, x[i][3] = quad.w;
    if ((i + 1) * THREADS * PIECE > V) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int left = V - PIECE * piece(i) - 2 * j;  // classes from here on
        x[i][j] = left >= 2 ? x[i][j] : left == 1 ? (x[i][j] & 0xffffu) | LOWEST << 16 : LOWEST * 0x10001u;
      }
    }
  }
}

struct Sum {
  RL_D float operator()(float a, float b) const { return a + b; }
};
struct Largest {
  RL_D float operator()(float a, float b) const { return fmaxf(a, b); }
};
template <typename Join>
RL_D float over_warp(float value, Join join) {
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) value = join(value, __shfl_xor_sync(FULL, value, step));
  return value;
}
// Over all threads, in the same order for each. Calls in turn need numbers for the exchange that take turns, too.
template <typename Join>
RL_D float over_block(float value, float* exchange, Join join) {
  value = over_warp(value, join);
  if (threadIdx.x % WARP == 0) exchange[threadIdx.x / WARP] = value;
  __syncthreads();
  return over_warp(exchange[threadIdx.x % WARP], join);
}

RL_D int target_of(const void* targets, i64 place) {
  if (TARGET_BYTES == 8) return static_cast<int>(static_cast<const i64*>(targets)[place]);
  if (TARGET_BYTES == 4) return static_cast<const int*>(targets)[place];
  if (TARGET_BYTES == 2) return static_cast<const short*>(targets)[place];
  return static_cast<const signed char*>(targets)[place];
}

// 1 / number of valid rows, times the scale that the gradient carries (a loss scale).
RL_D float row_scale(const int* counts, const float* gradient_scale) {
  u32 valid = 0;
  for (int i = threadIdx.x % WARP; i < COUNTS; i += WARP) valid += static_cast<u32>(counts[i]);
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) valid += __shfl_xor_sync(FULL, valid, step);
  return (gradient_scale == nullptr ? 1.f : gradient_scale[0]) / static_cast<float>(valid);
}

// Σ exp(x - highest) over what a thread has.
RL_D float exponentials(const u32 (&x)[PIECES][4], float highest) {
  float total[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (!inside(i)) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      total[0] += exp2_fast(pair_low(x[i][j]) * LOG2_E - highest * LOG2_E);
      total[1] += exp2_fast(pair_high(x[i][j]) * LOG2_E - highest * LOG2_E);
    }
  }
  return total[0] + total[1];
}

// Has the compiler unpack a row again for the next pass: kept unpacked it would take twice the registers.
RL_D void keep_packed(u32 (&x)[PIECES][4]) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x[i][j]));
}

// scale · (softmax - target), where factor = scale / Σ exp(x - highest).
RL_D void write_gradient(const u32 (&x)[PIECES][4], float highest, float factor, float scale, int target, u16* row) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    if (!inside(i)) continue;
    float g[PIECE];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      g[2 * j] = exp2_fast(pair_low(x[i][j]) * LOG2_E - highest * LOG2_E) * factor;
      g[2 * j + 1] = exp2_fast(pair_high(x[i][j]) * LOG2_E - highest * LOG2_E) * factor;
    }
    const int at = target - PIECE * piece(i);
    if (static_cast<u32>(at) < PIECE) {
#pragma unroll
      for (int e = 0; e < PIECE; ++e) g[e] -= at == e ? scale : 0.f;
    }
    *reinterpret_cast<uint4*>(row + PIECE * piece(i)) = {pack_pair(g[0], g[1]), pack_pair(g[2], g[3]),
                                                         pack_pair(g[4], g[5]), pack_pair(g[6], g[7])};
  }
}

RL_D void write_zeros(u16* row) {
  for (int i = 0; i < PIECES; ++i)
    if (inside(i)) *reinterpret_cast<uint4*>(row + PIECE * piece(i)) = {0, 0, 0, 0};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    cross_entropy(const u16* logits, const void* targets, u16* dlogits, float* losses, const int* counts,
                  const float* gradient_scale, int rows, int target_stride, i64 stride, i64 dstride) {
  float* const shared = shared_floats();
  float* const exchange = shared + 4 * PIECES * THREADS;
  wait_for_previous();
  let_next_start();
  fetch(logits + blockIdx.x * stride, shared);
  const float scale = row_scale(counts, gradient_scale);
  float loss = 0.f;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const int target = target_of(targets, static_cast<i64>(row) * target_stride);
    const bool known = target >= 0 && target < V;
    u32 x[PIECES][4];
    copies_wait<0>();
    read(x, shared);
    u32 top = LOWEST * 0x10001u;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) top = max_pair(top, x[i][j]);
    const bool mine = static_cast<int>(threadIdx.x) == (known ? target / PIECE % THREADS : 0);
    float chosen = nanf("");
    if (mine && known) chosen = unpack_one(reinterpret_cast<const u16*>(shared)[target]);
    const float own = fmaxf(pair_low(top), pair_high(top));  // behind all reads of this thread's places
    if (row + static_cast<int>(gridDim.x) < rows) fetch(logits + (row + static_cast<i64>(gridDim.x)) * stride, shared);
    u16* const gradient = dlogits + row * dstride;
    if (target == IGNORE) {
      write_zeros(gradient);
      continue;
    }
    const float highest = over_block(own, exchange, Largest());
    const float total = over_block(exponentials(x, highest), exchange + WARPS, Sum());
    keep_packed(x);
    if (mine) loss += highest + logf(total) - chosen;
    write_gradient(x, highest, scale / total, scale, target, gradient);
  }
  loss = over_block(loss, exchange, Sum());
  if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}
