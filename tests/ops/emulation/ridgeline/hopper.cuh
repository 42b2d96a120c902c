// Hopper on the host: the functions of ops/_cuda/include/ridgeline/hopper.cuh (and of attention's lanes.cuh) as plain C++,
// so that a whole kernel, compiled by a C++ compiler with this file first on the include path, runs on a CPU.
//
// A thread of a block is a fiber. Everything that waits yields to a scheduler, which takes warps in random order; copies
// of the copy engine end at random times; wgmma runs either as early or as late as the rules allow, its accumulators are
// NaN in between; shared memory starts as NaN. A kernel that passes under several seeds and both modes has its indices
// right; that its barriers order what it does in shared memory, under any schedule, races.cuh tells.
#pragma once
#include "ridgeline/machine.cuh"

namespace rl {

using emulation::Clock, emulation::Event, emulation::machine;
#ifndef RL_FP16
#define RL_FP16 0
#endif
constexpr int WARP = 32;
constexpr u32 FULL = 0xffffffffu;

// ---- numbers
RL_D u32 as_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
RL_D float from_bits(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
RL_D u32 round_bf16(float value) {
  const u32 bits = as_bits(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
RL_D u32 round_fp16(float value) {
  const auto rounded = static_cast<_Float16>(value);
  u16 bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
RL_D float from_fp16(u32 bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
RL_D u32 round_half(float value) { return RL_FP16 ? round_fp16(value) : round_bf16(value); }
RL_D u32 pack_pair(float low, float high) { return round_half(low) | round_half(high) << 16; }
RL_D float pair_low(u32 pair) { return RL_FP16 ? from_fp16(pair) : from_bits(pair << 16); }
RL_D float pair_high(u32 pair) { return RL_FP16 ? from_fp16(pair >> 16) : from_bits(pair & 0xffff0000u); }
RL_D u32 max_pair(u32 a, u32 b) {
  return pack_pair(std::fmax(pair_low(a), pair_low(b)), std::fmax(pair_high(a), pair_high(b)));
}
RL_D u16 pack_one(float value) { return static_cast<u16>(pack_pair(value, 0.f)); }
RL_D float unpack_one(u16 value) { return pair_low(value); }
RL_D float exp2_fast(float x) { return std::exp2(x); }
RL_D float reciprocal_fast(float x) { return 1 / x; }
RL_D float log2_fast(float x) { return std::log2(x); }
RL_D u32 permute(u32 a, u32 b, u32 select) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int n = 0; n < 4; ++n) {
    const u32 pick = select >> (4 * n) & 15, byte = bytes >> (8 * (pick & 7)) & 255;
    result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * n);
  }
  return result;
}
template <u32 SELECT>
RL_D u32 permute(u32 a, u32 b) {
  return permute(a, b, SELECT);
}

// ---- warps and blocks
RL_D u32 shuffle(u32 value, int source) { return machine.warp().slots[machine.post(value)][source & 31]; }
RL_D u32 shuffle_xor(u32 value, int mask) { return shuffle(value, machine.lane() ^ mask); }
RL_D float shuffle_xor(float value, int mask) { return from_bits(shuffle_xor(as_bits(value), mask)); }
RL_D void multiply_rows_of_16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int row = machine.lane() >> 2, column = 2 * (machine.lane() & 3);
  for (int half = 0; half < 2; ++half)
    for (int q = 0; q < 4; ++q) {
      const u32 a[2] = {shuffle(half ? a2 : a0, 4 * row + q), shuffle(half ? a3 : a1, 4 * row + q)};
      const u32 b[2] = {shuffle(half ? b1 : b0, 4 * column + q), shuffle(half ? b1 : b0, 4 * column + 4 + q)};
      for (int n = 0; n < 4; ++n)
        d[n] += pair_low(a[n >> 1]) * pair_low(b[n & 1]) + pair_high(a[n >> 1]) * pair_high(b[n & 1]);
    }
}
RL_D int warp_uniform(int value) { return static_cast<int>(shuffle(static_cast<u32>(value), 0)); }
RL_D bool any_in_warp(bool value) {
  const unsigned side = machine.post(value);
  bool any = false;
  for (uint64_t vote : machine.warp().slots[side]) any = any || vote;
  return any;
}
RL_D void sync_warp() { machine.post(0, true); }
inline emulation::Gathering& named(int id) { return machine.named[16 * static_cast<int>(machine.rank()) + id]; }
RL_D void sync_block() { machine.gather(named(0), machine.threads, "block", true); }
template <int THREADS>
RL_D void named_barrier(int id) {
  machine.gather(named(id), THREADS, "named barrier", true);
}
template <int THREADS>
RL_D void named_arrive(int id) {
  machine.arrive(named(id), THREADS, true);
  ++machine.progress;
}
RL_D bool any_in_group(int id, bool value) {
  auto& g = machine.named[id];
  if (g.arrived == 0) g.any[~g.generation & 1] = false;
  bool& any = g.any[~g.generation & 1];
  any = any || value;
  machine.gather(g, 128, "vote", true);
  return any;
}

// ---- memory
RL_D u32 dynamic_smem() { return emulation::SMEM_BASE + machine.rank() * emulation::SMEM_STRIDE; }
template <typename T>
RL_D T& shared(u32 address) {
  const u32 place = address % emulation::SMEM_STRIDE;
  if (place < emulation::SMEM_BASE || place + sizeof(T) > emulation::SMEM_BYTES || address % sizeof(T) || address >= machine.smem.size())
    machine.fail("shared memory address out of bounds or unaligned");
  return *reinterpret_cast<T*>(machine.smem.data() + address);
}
template <typename T>
RL_D T load(u32 address, Event by) {  // by this thread or by what it takes part in
  const T& place = shared<T>(address);
  machine.check(machine.races.read(address, sizeof(T), by, machine.races.of(machine.current), false));
  return place;
}
template <typename T>
RL_D void store(u32 address, T value, Event by) {
  T& place = shared<T>(address);
  machine.check(machine.races.write(address, sizeof(T), by, machine.races.of(machine.current), false));
  place = value;
}
template <typename T>
RL_D T load(u32 address) {
  return load<T>(address, machine.races.now(machine.current));
}
template <typename T>
RL_D void store(u32 address, T value) {
  store<T>(address, value, machine.races.now(machine.current));
}
// The addresses of a warp's lanes, for stmatrix and ldmatrix; the event that all of its accesses are.
struct Matrices {
  const uint64_t* addresses;
  Event by;
  explicit Matrices(u32 address) {
    addresses = machine.warp().slots[machine.post(address)];
    by = {machine.races.component(emulation::MATRICES, machine.current / 32), ++machine.fibers[machine.current].matrices};
    machine.races.learn(machine.current, by.who, by.when);
  }
  u32 row(int number) const { return static_cast<u32>(addresses[number]); }
};
RL_D uint4 load_shared_16(u32 address) { return load<uint4>(address); }
RL_D u32 load_shared_4(u32 address) { return load<u32>(address); }
RL_D void store_shared_4(u32 address, u32 a) { store<u32>(address, a); }
RL_D uint2 load_shared_8(u32 address) { return load<uint2>(address); }
RL_D void store_shared_8(u32 address, u32 a, u32 b) { store<uint2>(address, {a, b}); }
RL_D void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) { store<uint4>(address, {a, b, c, d}); }
RL_D uint2 load_global_8(const void* pointer) { return *static_cast<const uint2*>(pointer); }
RL_D float4 load_global_16(const float* pointer) { return *reinterpret_cast<const float4*>(pointer); }
RL_D uint4 load_global_16(const u16* pointer) { return *reinterpret_cast<const uint4*>(pointer); }
RL_D void store_global_16(float* pointer, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(pointer) = make_float4(a, b, c, d);
}
RL_D void add_global_16(float* pointer, float a, float b, float c, float d) {
  pointer[0] += a, pointer[1] += b, pointer[2] += c, pointer[3] += d;
}
RL_D void add_global(float* pointer, float value) { *pointer += value; }
RL_D void give(u32* pointer, u32 value) {
  *pointer = value;
  machine.given(pointer);
}
RL_D void wait_until_given(const u32* pointer) {
  machine.wait("another block", [&] { return *pointer != 0; });
}
RL_D void wait_for_previous_knowing(int) {}
RL_D void fence_gpu() {}
RL_D void store_global_8(void* pointer, u32 a, u32 b) { *static_cast<uint2*>(pointer) = make_uint2(a, b); }
RL_D void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const Matrices all(address);
  const u32 values[4] = {a, b, c, d};
  for (int m = 0; m < 4; ++m) store<u32>(all.row(8 * m + machine.lane() / 4) + machine.lane() % 4 * 4, values[m], all.by);
}
RL_D void load_matrices(u32 (&m)[4], u32 address) {
  const Matrices all(address);
  for (int q = 0; q < 4; ++q) m[q] = load<u32>(all.row(8 * q + machine.lane() / 4) + machine.lane() % 4 * 4, all.by);
}
RL_D void store_matrix_pair_transposed(u32 address, u32 a, u32 b) {
  const Matrices all(address);
  const u32 values[2] = {a, b}, column = machine.lane() / 4 * 2;
  for (int m = 0; m < 2; ++m)
    for (int e = 0; e < 2; ++e)
      store<u16>(all.row(8 * m + machine.lane() % 4 * 2 + e) + column, static_cast<u16>(values[m] >> (16 * e)), all.by);
}
RL_D void load_matrices_transposed(u32 (&m)[4], u32 address) {
  const Matrices all(address);
  for (int q = 0; q < 4; ++q) {
    m[q] = 0;
    for (int e = 0; e < 2; ++e) {
      const u32 row = all.row(8 * q + machine.lane() % 4 * 2 + e);
      m[q] |= static_cast<u32>(load<u16>(row + machine.lane() / 4 * 2, all.by)) << (16 * e);
    }
  }
}
RL_D void fence_async() {
  machine.races.fence(machine.current);
}
template <int COUNT>
RL_D void registers_up() {}
template <int COUNT>
RL_D void registers_down() {}

RL_D bool elected() { return machine.lane() == 0; }

// ---- mbarriers
RL_D void barrier_init(u32 barrier, int arrivals) { machine.barriers[barrier] = {arrivals, arrivals}; }
RL_D void barrier_init_fence() {}
RL_D void barrier_arrive(u32 barrier) {
  auto& b = machine.barriers.at(barrier);
  if (b.pending == 0) machine.fail("too many arrivals at a barrier");
  machine.races.give(machine.current, b.given);
  --b.pending, b.settle();
}
RL_D void barrier_expect(u32 barrier, u32 bytes) {
  machine.barriers.at(barrier).bytes += static_cast<int>(bytes);
  barrier_arrive(barrier);
}
RL_D void barrier_wait(u32 barrier, u32 parity) {
  auto& b = machine.barriers.at(barrier);
  machine.wait("barrier", [&] { return b.phase != parity; });
  machine.races.take(machine.current, b.complete);
  machine.races.learn(machine.current, machine.races.component(emulation::BARRIER_COPIES, barrier), b.completed);
}
RL_D bool barrier_ready(u32 barrier, u32 parity) { return machine.barriers.at(barrier).phase != parity; }

// ---- the copy engine: 16-bit tensors
struct alignas(64) TensorMap {
  const u16* base;
  u64 stride[4];  // elements, innermost first
  u32 extent[4], box[4], swizzle;
  u32 outer_extent, outer_box;  // of a fifth dimension, see copy_5d.cuh
};
static_assert(sizeof(TensorMap) == 128);
RL_D u32 swizzled(u32 address, u32 swizzle) {
  return swizzle == 128 ? address ^ (address >> 7 & 7) << 4 : swizzle == 64 ? address ^ (address >> 7 & 3) << 4 : address;
}
// What copies and tensor cores touch is checked when they are told to: nothing may happen there from then on.
inline u32 bytes_of(const TensorMap* map) { return 2 * map->box[0] * map->box[1] * map->box[2] * map->box[3]; }
inline void check_copy(u32 destination, const TensorMap* map, u32 barrier) {
  const Event by{machine.races.component(emulation::BARRIER_COPIES, barrier), machine.barriers.at(barrier).completed + 1};
  machine.check(machine.races.write(destination, bytes_of(map), by, machine.races.of(machine.current), true));
}
inline void check_store(u32 source, const TensorMap* map) {
  const Event by{machine.races.component(emulation::THREAD_COPIES, machine.current), machine.fibers[machine.current].committed + 1};
  machine.check(machine.races.read(source, bytes_of(map), by, machine.races.of(machine.current), true));
}
RL_D void copy_4d(u32 destination, const TensorMap* map, int x, int y, int z, int w, u32 barrier) {
  check_copy(destination, map, barrier);
  machine.copies.push_back([=] {
    const int origin[4] = {x, y, z, w};
    u32 count = 1, at[4];
    for (u32 b : map->box) count *= b;
    for (u32 n = 0; n < count; ++n) {
      u32 rest = n;
      bool inside = true;
      i64 from = 0;
      for (int k = 0; k < 4; ++k) {
        at[k] = rest % map->box[k], rest /= map->box[k];
        const i64 place = static_cast<i64>(origin[k]) + at[k];
        inside = inside && place >= 0 && place < static_cast<i64>(map->extent[k]);
        from += place * static_cast<i64>(map->stride[k]);
      }
      shared<u16>(swizzled(destination + 2 * n, map->swizzle)) = inside ? map->base[from] : 0;
    }
    auto& b = machine.barriers.at(barrier);
    b.bytes -= static_cast<int>(2 * count), b.settle();
  });
}
RL_D void copy_2d(u32 destination, const TensorMap* map, int x, int y, u32 barrier) { copy_4d(destination, map, x, y, 0, 0, barrier); }

inline std::shared_ptr<int>& open_stores() {
  auto& open = machine.fibers[machine.current].open_stores;
  if (!open) open = std::make_shared<int>(0);
  return open;
}
RL_D void store_4d(const TensorMap* map, u32 source, int x, int y, int z, int w) {
  check_store(source, map);
  auto group = open_stores();
  ++*group;
  machine.copies.push_back([=] {
    const int origin[4] = {x, y, z, w};
    for (u32 n = 0; n < bytes_of(map) / 2; ++n) {
      u32 rest = n;
      bool inside = true;
      i64 to = 0;
      for (int k = 0; k < 4; ++k) {
        const i64 place = static_cast<i64>(origin[k]) + rest % map->box[k];
        rest /= map->box[k];
        inside = inside && place >= 0 && place < static_cast<i64>(map->extent[k]);
        to += place * static_cast<i64>(map->stride[k]);
      }
      if (inside) const_cast<u16*>(map->base)[to] = shared<u16>(swizzled(source + 2 * n, map->swizzle));
    }
    --*group;
  });
}
RL_D void store_2d(const TensorMap* map, u32 source, int x, int y) { store_4d(map, source, x, y, 0, 0); }
RL_D void store_commit() {
  auto& fiber = machine.fibers[machine.current];
  fiber.stores.push_back(open_stores()), fiber.open_stores.reset(), ++fiber.committed;
}
template <int PENDING>
RL_D void store_wait_read() {
  auto& stores = machine.fibers[machine.current].stores;
  machine.wait("stores", [&] {
    for (size_t n = 0; n + PENDING < stores.size(); ++n)
      if (*stores[n] > 0) return false;
    return true;
  });
  const u32 committed = machine.fibers[machine.current].committed;
  if (committed > PENDING)
    machine.races.learn(machine.current, machine.races.component(emulation::THREAD_COPIES, machine.current), committed - PENDING);
}
RL_D void prefetch_map(const TensorMap*) {}
RL_D void prefetch_2d(const TensorMap*, int, int) {}
RL_D void wait_for_previous() {}
RL_D void let_next_start() {}

// ---- clusters
RL_D u32 cluster_rank() { return machine.rank(); }
RL_D void cluster_sync() { machine.gather(machine.named[-1], static_cast<int>(machine.fibers.size()), "cluster", false); }
RL_D void cluster_leave() { machine.gather(machine.named[-2], static_cast<int>(machine.fibers.size()), "cluster", true); }
RL_D u32 remote_address(u32 address, u32 rank) { return address % emulation::SMEM_STRIDE + rank * emulation::SMEM_STRIDE; }
RL_D void remote_free(u32 remote_barrier) {
  machine.races.send(machine.current, remote_barrier / emulation::SMEM_STRIDE);
  barrier_arrive(remote_barrier);
}
RL_D void remote_arrive(u32 barrier, u32 rank) { remote_free(remote_address(barrier, rank)); }
RL_D void copy_2d_both(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
  for (u32 rank = 0; rank < 2; ++rank) copy_2d(remote_address(destination, rank), map, x, y, remote_address(barrier, rank));
}

}  // namespace rl

#include "ridgeline/products.cuh"
