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

// D[16, 8] += A[16, 16] · B[8, 16]ᵀ. Lane l holds of A rows l / 4 and 8 below (the even and the odd elements) at columns
// l % 4 + 4 n, of B row l / 4 at these columns, of D rows l / 4 and 8 below at columns 2 (l % 4) and one further.
RL_D void multiply_doubles(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
}

RL_D void multiply_doubles(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
RL_D void multiply_doubles(double (&d)[4], const double (&a)[2], const double (&b)[1]) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
               : "d"(a[0]), "d"(a[1]), "d"(b[0]));
}

}  // namespace rl
