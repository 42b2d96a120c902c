// Thread block clusters beyond hopper.cuh: shared memory of the other blocks. And copies of rank 5.
#pragma once
#include "ridgeline/hopper.cuh"

namespace rl {

// Where `address` of this block's shared memory lies in block `rank` of the cluster.
RL_D u32 remote_address(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// 16 bytes to another block, counted by `barrier`, of that block, which expects them: no fence, no arrival.
RL_D void remote_send(u32 remote, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   remote), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

RL_D void copy_5d(u32 destination, const TensorMap* map, int x, int y, int z, int v, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w), "r"(barrier) : "memory");
}
}  // namespace rl
