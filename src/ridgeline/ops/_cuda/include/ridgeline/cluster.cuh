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
// A wait after which what other blocks wrote before they arrived may be read.
RL_D void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end_%=;\nbra again_%=;\nend_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
RL_D void remote_store(u32 remote, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
RL_D void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

RL_D void copy_5d(u32 destination, const TensorMap* map, int x, int y, int z, int v, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w), "r"(barrier) : "memory");
}
}  // namespace rl
