// The machine that whole kernels run on, on the host: blocks and clusters of fibers, their scheduler, shared memory,
// barriers and the copies under way; and the words of CUDA C++ that a C++ compiler lacks. See hopper.cuh beside this.
#pragma once
#define RL_EMULATED 1
#include "ridgeline/common.cuh"
#include "ridgeline/races.cuh"

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define RL_D inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct int4 {
  int x, y, z, w;
};
static inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
struct Index {
  unsigned x;
};
#define __syncwarp() sync_warp()
#define __syncthreads() sync_block()
#define __shfl_xor_sync(lanes, value, mask) shuffle_xor(value, mask)
#define __shfl_sync(lanes, value, source) shuffle(value, source)

namespace emulation {

constexpr unsigned SMEM_BYTES = 228 * 1024, SMEM_BASE = 1024;
constexpr unsigned SMEM_STRIDE = 256 * 1024;  // from one block of a cluster to the next

struct Product {  // one wgmma of one warp
  int n, transposed_a, transposed_b, accumulate;
  bool registers;
  uint64_t a, b;
  uint32_t a_registers[32][4];
  float* d[32];
};
struct Barrier {
  int arrivals = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
  uint32_t completed = 0;                  // phases
  std::shared_ptr<Clock> given, complete;  // by this phase's arrivals; by the last one's
  void settle() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = arrivals, ++completed, complete = std::move(given), given.reset();
  }
};
struct Gathering {  // of any number of threads, again and again
  int arrived = 0;
  unsigned generation = 0;
  bool any[2];  // votes of this and of the last time
  std::shared_ptr<Clock> given;
};
struct Warp {
  Gathering gathering;
  uint64_t slots[2][32];
  std::vector<std::vector<Product>> groups;  // committed, oldest first
  std::vector<Product> open;
  uint32_t committed = 0;  // groups
  std::map<float*, std::vector<float>> in_flight;  // by lane 0's accumulators: the values of all lanes
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  const char* waits_for = "";
  std::vector<std::shared_ptr<int>> stores;  // groups of stores not yet read from shared memory, oldest first
  std::shared_ptr<int> open_stores;
  uint32_t committed = 0, matrices = 0;  // groups of stores; stmatrix and ldmatrix that it has taken part in
};

struct Machine {
  std::vector<unsigned char> smem;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, Gathering> named;
  std::vector<Warp> warps;
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> copies;
  std::mt19937 random;
  Races races;
  bool late = false;
  ucontext_t scheduler;
  int current = 0, block = 0, grid = 0, threads = 0, cluster = 1;  // `block` is the first of `cluster` that run together
  uint64_t progress = 0;
  const char* fault = nullptr;  // what a thread did that no hardware would forgive
  std::function<void()> kernel;
  std::function<void(const uint32_t*)> given = [](const uint32_t*) {};  // called when a note for other blocks is written

  Warp& warp() { return warps[current / 32]; }
  int lane() const { return current % 32; }
  unsigned rank() const { return current / threads; }  // of this thread's block in its cluster
  void yield() { swapcontext(&fibers[current].context, &scheduler); }
  void fail(const char* what) {
    fault = what;
    while (true) yield();
  }
  template <typename Condition>
  void wait(const char* what, Condition condition) {
    fibers[current].waits_for = what;
    while (!condition()) yield();
    ++progress;
  }
  std::shared_ptr<Clock> arrive(Gathering& g, int count, bool orders) {  // returns what all who meet will have given
    if (orders) races.give(current, g.given);
    auto given = g.given;
    if (++g.arrived == count) g.arrived = 0, ++g.generation, g.given.reset();
    return given;
  }
  void gather(Gathering& g, int count, const char* what, bool orders) {
    const unsigned generation = g.generation;
    const auto given = arrive(g, count, orders);
    wait(what, [&] { return g.generation != generation; });
    races.take(current, given);
  }
  // An access of this thread to shared memory; what it is not ordered after ends the run.
  void check(bool right) {
    if (!right) fail(races.last());
  }
  unsigned post(uint64_t value, bool orders = false) {  // one of each lane of the warp; returns which slots hold them
    const unsigned side = warp().gathering.generation & 1;
    warp().slots[side][lane()] = value;
    gather(warp().gathering, 32, "warp", orders);
    return side;
  }
  const char* run_cluster();  // nothing, or what went wrong
};
inline Machine machine;

inline void fiber_main() {
  machine.kernel();
  machine.fibers[machine.current].done = true;
  ++machine.progress;
  machine.yield();
}
inline const char* Machine::run_cluster() {
  smem.assign(cluster * SMEM_STRIDE, 0xff);  // NaN in every format
  barriers.clear(), named.clear(), copies.clear();
  fault = nullptr;
  warps.assign(cluster * threads / 32, Warp{});
  fibers = std::vector<Fiber>(cluster * threads);
  races.reset(cluster * threads, smem.size());
  for (auto& fiber : fibers) {
    constexpr size_t STACK = 256 * 1024;
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, fiber_main, 0);
  }
  uint64_t seen = 0;
  for (int idle = 0; idle < 20000; ++idle) {
    if (progress != seen) idle = 0, seen = progress;
    const int w = random() % warps.size();
    for (int l = 0; l < 32; ++l)
      if (current = 32 * w + l; !fibers[current].done) swapcontext(&scheduler, &fibers[current].context);
    if (!copies.empty() && random() % 4 == 0) {
      const size_t which = random() % copies.size();
      auto copy = copies[which];
      copies.erase(copies.begin() + which);
      copy(), ++progress;
    }
    if (fault) return fault;
    bool all = true;
    for (auto& fiber : fibers) all = all && fiber.done;
    if (all) return races.all_came(threads) ? nullptr : races.last();
  }
  for (size_t w = 0; w < warps.size(); ++w)
    std::fprintf(stderr, "block %d, warp %zu: %s\n", block, w, fibers[32 * w].done ? "done" : fibers[32 * w].waits_for);
  return "deadlock";
}
// Runs `kernel` once for each thread of each block, the blocks of a cluster together. Returns nothing, or what went wrong.
inline const char* launch(int grid, int threads, unsigned seed, bool late, std::function<void()> kernel, int cluster = 1) {
  machine.random.seed(seed);
  machine.late = late, machine.grid = grid, machine.threads = threads, machine.cluster = cluster;
  machine.kernel = std::move(kernel);
  for (machine.block = 0; machine.block < grid; machine.block += cluster)
    if (const char* fault = machine.run_cluster()) return fault;
  return nullptr;
}

}  // namespace emulation

#define threadIdx (Index{static_cast<unsigned>(emulation::machine.current % emulation::machine.threads)})
#define blockIdx (Index{emulation::machine.block + emulation::machine.rank()})
#define gridDim (Index{static_cast<unsigned>(emulation::machine.grid)})
