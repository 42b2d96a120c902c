// The copy engine's boxes of rank 5, beyond hopper.cuh.
#pragma once
#include "ridgeline/hopper.cuh"

namespace rl {

RL_D void copy_5d(u32 destination, const TensorMap* map, int x, int y, int z, int v, int w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(destination), "l"(map), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w), "r"(barrier) : "memory");
}

}  // namespace rl
