// Hopper's own instructions: mbarriers, the bulk tensor copy engine, wgmma, register reallocation.
#pragma once
#include "ridgeline/common.cuh"

namespace rl {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// ---- mbarriers (addresses in shared memory)
RL_D void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
RL_D void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
RL_D void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
RL_D void barrier_expect(u32 barrier, u32 bytes) {  // one arrival, and `bytes` more to come from the copy engine
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
RL_D void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra end_%=;\nbra again_%=;\nend_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
RL_D bool barrier_ready(u32 barrier, u32 parity) {  // whether a wait would be over at once; it is still to be made
  u32 yes;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
               : "=r"(yes) : "r"(barrier), "r"(parity) : "memory");
  return yes;
}

// One lane of a warp that is here as a whole, the same every time. The compiler knows that it is one: it asks no lane whether
// it has a copy to start too, and takes addresses from uniform registers as they are (a tenth of the instructions).
RL_D bool elected() {
  u32 yes;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
  return yes;
}

// ---- bulk tensor copies; coordinates innermost first
RL_D void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
RL_D void copy_2d(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          destination), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
RL_D void copy_3d(u32 destination, const TensorMap* map, int x, int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          destination), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
RL_D void copy_4d(u32 destination, const TensorMap* map, int x, int y, int z, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          destination), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier) : "memory");
}
RL_D void prefetch_2d(const TensorMap* map, int x, int y) {  // a box into L2
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
RL_D void store_2d(const TensorMap* map, u32 source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y),
               "r"(source) : "memory");
}
RL_D void store_4d(const TensorMap* map, u32 source, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(w), "r"(source) : "memory");
}
RL_D void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
RL_D void store_wait_read() {  // until the sources of all but PENDING groups may be written again
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
RL_D void store_wait() {  // until all but PENDING groups are in memory
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// In every thread that wrote shared memory with ordinary stores, before the barrier after which wgmma or a copy reads it.
RL_D void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- pairs of blocks (a cluster of 2); a barrier or a tile has the same address in both
RL_D u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster meet. It makes barriers visible that were initialised and fenced, and orders nothing else: a
// release of the cluster's scope would wait for all of the thread's stores to memory.
RL_D void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same before a block may end: all that its threads have sent to the other's shared memory is there. An arrival that is
// under way meets the next block on that multiprocessor otherwise, and its barriers.
RL_D void cluster_leave() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// One arrival at the barrier of block `rank`; orders no stores to memory either.
RL_D void remote_arrive(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
// A copy into both blocks, each of whose barriers counts its bytes.
RL_D void copy_2d_both(u32 destination, const TensorMap* map, int x, int y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<u16>(3)) : "memory");
}

// ---- kernels that start while the one before still runs (a launch with early=True)
RL_D void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel after may start filling free multiprocessors; it still waits for this one's end before it reads.
RL_D void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- registers of a warpgroup
template <int COUNT>
RL_D void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
RL_D void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- shared memory matrices
RL_D void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
RL_D void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
RL_D void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// ---- wgmma: D[64, N] (+)= A[64, 16] · B[N, 16]ᵀ, fp32 accumulators, operands in shared memory under the 128-byte swizzle.
//
// Thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds in d[4 j + 2 h + e] the element of row
// 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e.
// Operand tiles and their descriptors: operand_k_major and operand_mn_major in common.cuh.
RL_D void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RL_D void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
RL_D void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a wait.
template <int COUNT>
RL_D void wgmma_touch(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Or operands in registers from being used for something else before it.
template <int ROWS, int COUNT>
RL_D void wgmma_touch(u32 (&a)[ROWS][COUNT]) {
#pragma unroll
  for (int i = 0; i < ROWS * COUNT; ++i) asm volatile("" : "+r"(a[i / COUNT][i % COUNT])::"memory");
}

#define RL_REGISTERS_4 "%0, %1, %2, %3"
#define RL_REGISTERS_8 RL_REGISTERS_4 ", %4, %5, %6, %7"
#define RL_REGISTERS_12 RL_REGISTERS_8 ", %8, %9, %10, %11"
#define RL_REGISTERS_16 RL_REGISTERS_12 ", %12, %13, %14, %15"
#define RL_REGISTERS_20 RL_REGISTERS_16 ", %16, %17, %18, %19"
#define RL_REGISTERS_24 RL_REGISTERS_20 ", %20, %21, %22, %23"
#define RL_REGISTERS_28 RL_REGISTERS_24 ", %24, %25, %26, %27"
#define RL_REGISTERS_32 RL_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RL_REGISTERS_36 RL_REGISTERS_32 ", %32, %33, %34, %35"
#define RL_REGISTERS_40 RL_REGISTERS_36 ", %36, %37, %38, %39"
#define RL_REGISTERS_64 RL_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RL_REGISTERS_128 RL_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RL_OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RL_OUT_8(d, i) RL_OUT_4(d, i), RL_OUT_4(d, i + 4)
#define RL_OUT_12(d, i) RL_OUT_8(d, i), RL_OUT_4(d, i + 8)
#define RL_OUT_16(d, i) RL_OUT_8(d, i), RL_OUT_8(d, i + 8)
#define RL_OUT_20(d, i) RL_OUT_16(d, i), RL_OUT_4(d, i + 16)
#define RL_OUT_24(d, i) RL_OUT_16(d, i), RL_OUT_8(d, i + 16)
#define RL_OUT_28(d, i) RL_OUT_24(d, i), RL_OUT_4(d, i + 24)
#define RL_OUT_32(d, i) RL_OUT_16(d, i), RL_OUT_16(d, i + 16)
#define RL_OUT_36(d, i) RL_OUT_32(d, i), RL_OUT_4(d, i + 32)
#define RL_OUT_40(d, i) RL_OUT_32(d, i), RL_OUT_8(d, i + 32)
#define RL_OUT_64(d, i) RL_OUT_32(d, i), RL_OUT_32(d, i + 32)
#define RL_OUT_128(d, i) RL_OUT_64(d, i), RL_OUT_64(d, i + 64)

// wgmma<N, TRANSPOSED_A, TRANSPOSED_B>(d, a, b, accumulate): both operands in shared memory.
// wgmma_registers<N, TRANSPOSED_B>(d, a[4], b, accumulate): A in registers, 16 columns of it as packed pairs
//   (row l / 4, columns 2 (l % 4)), (row + 8, same), (row, columns + 8), (row + 8, columns + 8).
template <int N, int TRANSPOSED_A, int TRANSPOSED_B>
struct Wgmma;
template <int N, int TRANSPOSED_B>
struct WgmmaRegisters;
#define RL_WGMMA(N, COUNT, P0, P1, P2, P3, P4)                                                                          \
  template <int TRANSPOSED_A, int TRANSPOSED_B>                                                                       \
  struct Wgmma<N, TRANSPOSED_A, TRANSPOSED_B> {                                                                       \
    static RL_D void run(float (&d)[COUNT], u64 a, u64 b, int accumulate) {                                           \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\n"                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." RL_MMA_TYPE "." RL_MMA_TYPE                      \
                   " {" RL_REGISTERS_##COUNT "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                 \
                   : RL_OUT_##COUNT(d, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));   \
    }                                                                                                                 \
  };
#define RL_WGMMA_REGISTERS(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                        \
  template <int TRANSPOSED_B>                                                                                         \
  struct WgmmaRegisters<N, TRANSPOSED_B> {                                                                            \
    static RL_D void run(float (&d)[COUNT], const u32 (&a)[4], u64 b, int accumulate) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\n"                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." RL_MMA_TYPE "." RL_MMA_TYPE                      \
                   " {" RL_REGISTERS_##COUNT "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6  \
                   ";\n}"                                                                                             \
                   : RL_OUT_##COUNT(d, 0)                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSED_B));         \
    }                                                                                                                 \
  };
RL_WGMMA(8, 4, 4, 5, 6, 7, 8)
RL_WGMMA(16, 8, 8, 9, 10, 11, 12)
RL_WGMMA(24, 12, 12, 13, 14, 15, 16)
RL_WGMMA(32, 16, 16, 17, 18, 19, 20)
RL_WGMMA_REGISTERS(8, 4, 4, 5, 6, 7, 8, 9, 10)
RL_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13, 14)
RL_WGMMA_REGISTERS(24, 12, 12, 13, 14, 15, 16, 17, 18)
RL_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21, 22)
RL_WGMMA(40, 20, 20, 21, 22, 23, 24)
RL_WGMMA_REGISTERS(40, 20, 20, 21, 22, 23, 24, 25, 26)
RL_WGMMA(48, 24, 24, 25, 26, 27, 28)
RL_WGMMA_REGISTERS(48, 24, 24, 25, 26, 27, 28, 29, 30)
RL_WGMMA(56, 28, 28, 29, 30, 31, 32)
RL_WGMMA_REGISTERS(56, 28, 28, 29, 30, 31, 32, 33, 34)
RL_WGMMA(64, 32, 32, 33, 34, 35, 36)
RL_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 38)
RL_WGMMA(72, 36, 36, 37, 38, 39, 40)
RL_WGMMA(80, 40, 40, 41, 42, 43, 44)
RL_WGMMA(128, 64, 64, 65, 66, 67, 68)
RL_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 70)
RL_WGMMA(256, 128, 128, 129, 130, 131, 132)
RL_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133, 134)

template <int N, int TRANSPOSED_A, int TRANSPOSED_B>
RL_D void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  Wgmma<N, TRANSPOSED_A, TRANSPOSED_B>::run(d, a, b, accumulate);
}
template <int N, int TRANSPOSED_B>
RL_D void wgmma_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
  WgmmaRegisters<N, TRANSPOSED_B>::run(d, a, b, accumulate);
}

}  // namespace rl
