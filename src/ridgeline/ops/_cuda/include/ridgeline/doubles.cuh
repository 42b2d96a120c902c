// fp32 operands for the tensor cores' fp64 products: copies that run beside the thread, and the product itself.
#pragma once
#include "ridgeline/hopper.cuh"

namespace rl {

extern __shared__ float4 dynamic_quads[];
RL_D float* shared_floats() { return reinterpret_cast<float*>(dynamic_quads); }

// 16 bytes into shared memory, zeros if not `inside`; counted in groups.
RL_D void copy_quad(float* to, const float* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
RL_D void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
RL_D void copies_wait() {  // until all but this thread's last PENDING groups are there
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// D[16, 8] += A[16, 4] · B[8, 4]ᵀ. Lane l holds of A rows l / 4 and 8 below at column l % 4, of B row l / 4 there, of D rows
// l / 4 and 8 below at columns 2 (l % 4) and one further.
RL_D void multiply_doubles(double (&d)[4], const double (&a)[2], double b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
               : "d"(a[0]), "d"(a[1]), "d"(b));
}

}  // namespace rl
